"""Jobs of `training.py` under torchrun, and what must be true of each: its history is that of a static run."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from ds_dynatrain.elastic.messages import Status
from tests.elastic.agents import ROOT, TIMES, Job, Row, processes
from tests.elastic.kinds import settings
from tests.elastic.warm import Warm, WarmJob, nursery
from tools.history import Losses, Samples, history

SCRIPT = Path(__file__).with_name("training.py")
RUN_ON_DEVICE = Path(__file__).parents[1] / "device" / "elastic_training.py"
"""Runs the script `$SCRIPT` on the device without hardware."""
STATIC_STEPS = 200
STATIC_LAYOUTS = ({"data": 1}, {"data": 3})
SECONDS = 120.0
"""How long anything may take on a busy machine: a worker imports DeepSpeed, and that alone takes a while."""
on_device: ContextVar[bool] = ContextVar("on_device", default=False)
"""Whether jobs compute on the device without hardware; what they are held against does not."""


def training(
    folder: Path,
    stage: int = 1,
    block: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    kind: type[Job] = WarmJob,
    **given: Any,
) -> Job:
    """A job of `training.py`; own, block: see `settings`; given: see `Job`. kind: `Job` for new processes."""
    variables = {"SETTINGS": json.dumps(settings(stage, own, **(block or {}))), "DS_ACCELERATOR": "cpu"}
    variables |= {"STEP_SECONDS": "0.8", **given.pop("variables", {})}
    script = given.pop("script", SCRIPT)
    if on_device.get() and script != RUN_ON_DEVICE:
        variables["SCRIPT"], script = str(script), RUN_ON_DEVICE
    times = {**TIMES, "silent_seconds": 5.0}  # the default: other tests compile for minutes beside this one
    return kind(folder, variables=variables, seconds=SECONDS, script=script, **{"times": times, **given})


class Static:
    """Runs of the same script with worlds that never change."""

    def __init__(
        self,
        folder: Path,
        layouts: Sequence[dict[str, Any]] = STATIC_LAYOUTS,
        own: dict[str, Any] | None = None,
        **variables: str,
    ) -> None:
        folders, self._own = [folder / str(number) for number in range(len(layouts))], own
        started = [self._start(where, layout, variables) for where, layout in zip(folders, layouts, strict=True)]
        runs = [self._read(where, run) for where, run in zip(folders, started, strict=True)]
        self.losses, self.samples = runs[0]
        self.distance = max(_furthest(one, other) for one, _ in runs for other, _ in runs)
        """The largest relative distance between two of them, over all steps."""

    def _start(self, folder: Path, layout: dict[str, Any], given: dict[str, str]) -> Warm:
        folder.mkdir(parents=True)
        block = {"layout": {"zero_stage": 1, **layout}}
        size = math.prod(length for axis, length in layout.items() if axis not in ("zero_stage", "shares"))
        variables = {"OUT": str(folder), "STEPS": str(STATIC_STEPS), "STEP_SECONDS": "0", "DS_ACCELERATOR": "cpu"}
        variables |= {
            "SETTINGS": json.dumps(settings(layout.get("zero_stage", 1), own=self._own, **block)),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **given,
        }
        command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", str(SCRIPT)]
        with (folder / "log").open("wb") as log:
            return nursery().start(command, {**os.environ, **variables}, folder, log.fileno())

    def _read(self, folder: Path, run: Warm) -> tuple[Losses, Samples]:
        try:
            code = run.wait(2 * SECONDS)
        finally:
            run.kill()
        assert code == 0, (folder / "log").read_text()[-3000:]
        lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
        return history([row for line in lines if (row := json.loads(line))["event"] == "step"])


def _furthest(one: Losses, other: Losses) -> float:
    return max(abs(one[step] - other[step]) / abs(other[step]) for step in one.keys() & other.keys())


class HasRows(Protocol):
    """A job, or several that one folder of checkpoints went through."""

    def rows(self, event: str) -> list[Row]:
        """What their scripts wrote, of one kind."""


def check_history(job: HasRows, static: Static, kills: int = 0, event: str = "step") -> None:
    """Every sample was used once and in its step, and the losses are those of a static run.

    The bound is the design's: twice the largest distance between static runs, over as many steps or more. kills: so
    many steps may have been made by all and written down by those alone who lived to do it. event: what the script
    calls a step.
    """
    losses, samples = history(job.rows(event))
    assert sorted(losses) == list(range(len(losses))) and len(losses) <= STATIC_STEPS
    for step, numbers in samples.items():
        wanted = static.samples[step]
        if kills and len(numbers) < len(wanted) and set(numbers) < set(wanted):
            kills -= 1
            del losses[step]
            continue
        assert numbers == wanted, f"step {step}: {numbers}, not {wanted}"
    far = {step: abs(loss - static.losses[step]) / abs(static.losses[step]) for step, loss in losses.items()}
    worst = max(far, key=lambda step: far[step])
    assert far[worst] <= 2 * static.distance, f"step {worst}: {far[worst]:.1e} from the static run's"


def second_joins(job: Job) -> Status:
    """1 -> 2: the status then."""
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)
    job.node("b", is_host=0)
    joined = job.settled(2, first.generation)
    assert processes(joined)[0] == processes(first)[0], "the same process"
    return joined


def first_leaves(job: Job, joined: Status) -> None:
    """2 -> 1: the node of rank 0 hands over what it has, and goes; the other one makes the end of the job."""
    job.kill("a", signal.SIGTERM)
    left = job.settled(1, joined.generation)
    assert processes(left) == processes(joined)[1:]
    assert all(change.change == "planned" for change in left.changes), left.changes
    job.code("a")
    finish(job, "b", "coordinator")


def finish(job: Job, *nodes: str) -> None:
    """All scripts end by themselves, with code 0. nodes: by default those that have not ended, and the coordinator.

    They end no earlier than what a failure took back is made again: of that, who died may have written nothing down.
    """
    job.wait(lambda: is_made_again(job.rows()), "what was taken back to be made again")
    job.end()
    nodes = nodes or living(job)
    assert {node: job.code(node) for node in nodes} == dict.fromkeys(nodes, 0), job.logs()


def is_made_again(rows: Sequence[Row]) -> bool:
    """Whether of each engine the newest generation has come as far as any before it."""
    furthest: dict[str, dict[int, int]] = defaultdict(dict)
    for row in rows:
        if "parts" not in row:
            continue
        made = furthest[row["event"]]
        made[row["generation"]] = max(row["step"], made.get(row["generation"], 0))
    return all(made[max(made)] == max(made.values()) for made in furthest.values())


def finish_together(job: Job) -> None:
    """The same for scripts that cannot agree on the end: it is a few steps ahead of them."""
    end = max(row["step"] for row in job.rows("step")) + 8
    (job.folder / "stopping").write_text(str(end))
    (job.folder / "stopping").rename(job.folder / "stop")
    finish(job)


def living(job: Job) -> tuple[str, ...]:
    """The agents and coordinators that have not ended."""
    return tuple(name for name, process in job.processes.items() if process.poll() is None)


def steps_on(job: Job, count: int = 3) -> None:
    """Wait until so many steps more have been made than there are now."""
    made = max(row["step"] for row in job.rows("step"))
    job.wait(lambda: max(row["step"] for row in job.rows("step")) >= made + count, f"{count} steps more")


def gated(job: Job, name: str, gate: str = "", *options: str, **given: str) -> None:
    """Start a node that warms up, and comes when `open_gate` is called. given: environment variables."""
    with variables(job, GATE=gate or f"gate-{name}", **given):
        job.node(name, *options, is_host=0)


def open_gate(job: Job, name: str) -> None:
    """Let the nodes behind a gate come; of a name, or the node's own."""
    (job.folder / (name if name.startswith("gate-") else f"gate-{name}")).touch()


def worker(job: Job, name: str) -> int:
    """The only worker of a node."""
    return int(job.wait(lambda: job.workers_of(name), f"the worker of {name}")[0])


def node_of(job: Job, status: Status, rank: int) -> str:
    """The agent whose worker has a rank."""
    pid = processes(status)[rank]
    return next(name for name in job.processes if pid in job.workers_of(name))


def world_with(job: Job, pid: int, size: int) -> list[int] | None:
    """The processes of a world of this size with that one in it, if it makes steps."""
    status = job.status()
    if status is None or len(status.ranks) != size or pid not in processes(status):
        return None
    working = [one for one in status.members if one.rank is not None]
    is_in = len(working) == size and all(one.entered == status.generation for one in working)
    return processes(status) if is_in and job.steps(status.generation) >= size else None


@contextmanager
def variables(job: Job, **given: str) -> Iterator[None]:
    """Nodes that are started inside of the block get other environment variables."""
    before = dict(job.variables)
    job.variables.update(given)
    yield
    job.variables = before
