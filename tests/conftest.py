"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.adapters.versions.deepspeed_versions import present
from tests import sets
from tests.engine.pool import RankPool
from tests.ops import Builds, surroundings

RANKS = 4
NEWEST_ALONE = ["adapters/test_tensor.py", "adapters/test_experts.py"]
"""Of the core, what DeepSpeed 0.18 does not have: a description of what AutoTP cuts, and AutoEP."""
collect_ignore = [] if present().is_newest else NEWEST_ALONE


OPERATORS = {
    "lab_pool": "lab",
    "lab_built": "lab",
    "cpu_adam": "CPUAdamBuilder",
    "shared_memory": "ShareMemCommBuilder",
    "fused_adam": "FusedAdamBuilder",
    "cpu_lion": "CPULionBuilder",
}
"""What is compiled, by DeepSpeed and for the test device, by the fixture that a test asks for it with."""
RESOLVER = "timeout:1 attempts:1"
"""torch's stores ask a name server at each connection who that is, for their log; a lost answer is worth no 5 s."""
BUILDS = pytest.StashKey[Builds]()
SLOWEST = 10
SHARED = (
    (
        "tests/elastic/",
        "tests/device/test_elastic.py",
        "tests/engine/test_endings.py",
        "tests/integrations/test_run.py",
        "tests/weights/test_elastic_sends.py",
        "tests/cli/test_probe.py",
        "tests/docs/test_snippets.py",
        "tests/test_examples.py",
    ),
    ("tests/scenarios/",),
    ("tests/integrations/",),
    ("tests/device/",),
)
"""Files that one worker has: those with static runs and launches that are forked (tests/elastic/warm.py); scenarios,
which are forked by a process of their own; those with ranks that have imported Trainer; those with ranks on the device
without hardware.
"""
ORDER = ("tests/elastic/", "tests/scenarios/", "tests/integrations/", "tests/device/", "tests/engine/")
"""What begins first: what takes a worker minutes. Last comes what is short, so that all end at about the same time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Another device for what runs on ranks; a Slurm that is not installed."""
    parser.addoption("--on-device", action="store_true", help="ranks compute on the device without hardware")
    parser.addoption("--slurm", type=Path, help="folder with Slurm's packages, unpacked; without it: what is on PATH")


def pytest_configure(config: pytest.Config) -> None:
    """What all processes that the tests start are to have in their environment."""
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
    os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir()) / f"dynatrain-tests-{os.geteuid()}")
    os.environ.update(surroundings())
    sets.is_full = config.option.markexpr != "not full"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and made in here stays: to look for garbage among it took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests into their order.

    Where all ranks are on it, what makes no sense there is left out, by name.
    """
    items.sort(key=lambda item: next((at for at, files in enumerate(ORDER) if item.nodeid.startswith(files)), 9))
    for item in items if config.option.on_device else ():
        if (mark := item.get_closest_marker("not_on_device")) is not None:
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to compile what the tests will need; of several workers one does, and the others wait for its locks."""
    wanted = {name for item in session.items if isinstance(item, pytest.Function) for name in item.fixturenames}
    builders = [builder for fixture, builder in OPERATORS.items() if fixture in wanted]
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    session.config.stash[BUILDS] = Builds(builders if is_first and not session.config.option.collectonly else [])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave out what is not needed any more."""
    if builds := session.config.stash.get(BUILDS, None):
        builds.stop()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several workers each takes a file at a time; folders whose files share what is slow to start are one's."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((files[0] for files in SHARED if file.startswith(files)), file)

    config.option.loadscopereorder = False  # those of few tests would come last: of ranks, and not the shortest at all
    return ByFile(config, log)


def pytest_report_header() -> str | None:
    """What is left out with another DeepSpeed."""
    return f"not in this DeepSpeed, left out: {', '.join(collect_ignore)}" if collect_ignore else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The slowest files: where time is to be won."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if not seconds:
        return
    terminalreporter.section(f"slowest {SLOWEST} files")
    for file, taken in sorted(seconds.items(), key=itemgetter(1), reverse=True)[:SLOWEST]:
        terminalreporter.write_line(f"{taken:7.1f} s  {file}")


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four rank processes for the whole session, started by the first test that runs a case on them."""
    if request.config.option.on_device:
        yield request.getfixturevalue("lab_pool")
        return
    ranks = RankPool(RANKS, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def lab_pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four more, which compute on the device without hardware (tests/device), each with its memory."""
    request.config.stash[BUILDS].wait(OPERATORS["lab_pool"])
    ranks = RankPool(RANKS, tmp_path_factory.mktemp("lab"), module="tests.device.rank_process")
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def lab_built(request: pytest.FixtureRequest) -> None:
    """The device without hardware is compiled, for processes of a test's own."""
    request.config.stash[BUILDS].wait(OPERATORS["lab_built"])


@pytest.fixture(scope="session")
def in_time(request: pytest.FixtureRequest) -> Callable[[float, float], None]:
    """Fails a test whose first number, of seconds, is not below the second: in the full set, which has a quiet machine.

    The default set has to pass on a busy one; it waits no longer than for its own time-outs.
    """
    is_judged = request.config.option.markexpr != "not full"

    def check(seconds: float, bound: float) -> None:
        assert not is_judged or seconds < bound, f"it took {seconds:.2f} s, and {bound} s are allowed"

    return check


@pytest.fixture(scope="session")
def fused_adam(request: pytest.FixtureRequest) -> None:
    """DeepSpeed's FusedAdam, which a configuration without `torch_adam` means, is compiled."""
    if request.config.option.on_device:
        pytest.skip("DeepSpeed's FusedAdam has no kernel for the device without hardware")
    request.config.stash[BUILDS].wait(OPERATORS["fused_adam"])


@pytest.fixture(scope="session")
def cpu_adam(request: pytest.FixtureRequest) -> None:
    """DeepSpeedCPUAdam, which offload means, is compiled."""
    request.config.stash[BUILDS].wait(OPERATORS["cpu_adam"])


@pytest.fixture(scope="session")
def cpu_lion(request: pytest.FixtureRequest) -> None:
    """DeepSpeedCPULion is compiled."""
    request.config.stash[BUILDS].wait(OPERATORS["cpu_lion"])


@pytest.fixture(scope="session")
def shared_memory(request: pytest.FixtureRequest) -> None:
    """What DeepSpeed's own collectives on a CPU want is compiled."""
    request.config.stash[BUILDS].wait(OPERATORS["shared_memory"])
