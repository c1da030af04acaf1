"""The DeepSpeed series that are supported, and that no private name of theirs is used without being listed."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch

from ds_dynatrain.adapters.versions import deepspeed_versions as versions
from ds_dynatrain.adapters.versions.deepspeed_versions import NAMES, check_names, paths
from ds_dynatrain.errors import SwitchRefused, UnsupportedError
from ds_dynatrain.space import Layout

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "ds_dynatrain" / "adapters"
GONE = object()
NEWEST, MIDDLE, OLDER = versions.SERIES


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[versions.Series], None]:
    """Make a series the installed one."""
    return lambda series: monkeypatch.setattr(versions, "present", lambda: series)


# ---- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version", ["0.19.8", "0.19.9", "0.19.2", "0.19.6", "0.19.7", "0.18.9", "0.18.10", "0.18.9+cpu", "0.19.9.dev0"]
)
def test_tested_patches_and_newer_ones_are_let_in(version: str) -> None:
    series = versions.series_of(version)
    assert version.startswith(series.tested[0].rsplit(".", 1)[0])
    assert (series is MIDDLE) == (version in ("0.19.2", "0.19.6", "0.19.7"))


@pytest.mark.parametrize("version", ["0.19.1", "0.18.8", "0.17.6", "0.20.0", "1.18.9"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(ImportError) as found:
        versions.series_of(version)
    assert all(part in str(found.value) for part in (version, *NEWEST.tested, *MIDDLE.tested, *OLDER.tested))


def test_the_project_names_the_same_versions() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    wanted = re.search(r'"(deepspeed[<>=!][^"]*)"', project)
    assert wanted is not None
    from packaging.requirements import Requirement

    allowed = Requirement(wanted.group(1)).specifier
    for patch in range(20):
        for minor in (17, 18, 19, 20):
            version = f"0.{minor}.{patch}"
            try:
                versions.series_of(version)
            except ImportError:
                assert version not in allowed
            else:
                assert version in allowed
    assert f"deepspeed=={NEWEST.tested[0]}\n" in (ROOT / "constraints.txt").read_text()
    assert f"VERSION  ?= {OLDER.tested[0]}\n" in (ROOT / "Makefile").read_text()


def test_a_name_of_one_series_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    series = versions.Series((deepspeed.__version__,), {"deepspeed.runtime.engine": "gone"}, "gc")
    monkeypatch.setattr(versions, "SERIES", (series,))
    with pytest.raises(ImportError, match=r"deepspeed\.runtime\.engine\.gone"):
        check_names()


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"disable_python_gc": True}, "disable_python_gc"),
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "zero_optimization.offload_param.device"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"zero_optimization": {"contiguous_gradients": False}}, "zero_optimization.contiguous_gradients"),
        ({"zero_optimization": {"parameter_alignment": True}}, "zero_optimization.parameter_alignment"),
    ],
)
def test_what_the_older_series_cannot_do_is_refused_by_name(
    config: dict[str, Any], key: str, install: Callable[[versions.Series], None]
) -> None:
    for series in (MIDDLE, OLDER):
        install(series)
        with pytest.raises(UnsupportedError, match=re.escape(key)):
            versions.refuse_for_series(config)
    install(NEWEST)
    versions.refuse_for_series(config)


def test_defaults_are_not_refused(install: Callable[[versions.Series], None]) -> None:
    install(OLDER)
    zero = {"contiguous_gradients": True, "parameter_alignment": False, "stage": 2}
    versions.refuse_for_series({"disable_python_gc": False, "zero_optimization": zero})
    versions.refuse_for_series({"zero_optimization": None})


def test_frozen_16_bit_parameters_in_a_group_are_refused_where_they_would_be_stepped(
    install: Callable[[versions.Series], None],
) -> None:
    install(OLDER)
    frozen, trained = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UnsupportedError, match="group 1"):
        versions.refuse_groups([[trained], [trained, frozen]])
    versions.refuse_groups([[trained], [torch.zeros(2)]])
    install(NEWEST)
    versions.refuse_groups([[trained, frozen]])


def test_optimizers_of_deepspeed_s_own_are_refused_where_they_were_not_tested(
    install: Callable[[versions.Series], None],
) -> None:
    install(OLDER)
    kind: Any = type("Own", (torch.optim.SGD,), {"__module__": "deepspeed.ops.somewhere"})
    own = kind([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(UnsupportedError, match="optimizer Own"):
        versions.refuse_optimizer(own)
    versions.refuse_optimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
    install(NEWEST)
    versions.refuse_optimizer(own)


def test_other_axes_of_the_older_series(install: Callable[[versions.Series], None]) -> None:
    install(OLDER)
    layout = Layout(data=2, tensor=2, sequence=2, zero_stage=1)
    with pytest.raises(
        SwitchRefused,
        match=r"^tensor=2, sequence=2: tested with DeepSpeed 0\.19\.8 only; install DeepSpeed 0\.19\.8, or leave",
    ):
        versions.refuse_axes(layout)
    versions.refuse_axes(Layout(data=4, zero_stage=3))
    install(NEWEST)
    versions.refuse_axes(layout)


def test_flat_groups_lose_their_history() -> None:
    flat = torch.cat([torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)])
    zero = SimpleNamespace(bit16_groups_flat=[flat], parallel_partitioned_bit16_groups=[None])
    zero.get_data_parallel_partitions = lambda tensor, group: [tensor[:2], tensor[2:]]
    versions.settle_flat_groups(zero)
    assert zero.bit16_groups_flat[0].grad_fn is None and zero.bit16_groups_flat[0].data_ptr() == flat.data_ptr()
    parts = zero.parallel_partitioned_bit16_groups[0]
    assert parts[1].grad_fn is None and parts[1].data_ptr() == flat.data_ptr() + 2 * flat.element_size()
    versions.settle_flat_groups(SimpleNamespace())


def test_parameters_are_gathered_one_by_one() -> None:
    class Gathers:
        def __init__(self) -> None:
            self.calls: list[tuple[list[int], int, bool]] = []

        def _allgather_params_coalesced(
            self, param_list: list[int], hierarchy: int = 0, quantize: bool = False
        ) -> None:
            self.calls.append((param_list, hierarchy, quantize))

    for _ in range(2):
        versions.gather_one_by_one(Gathers)
    made = Gathers()
    made._allgather_params_coalesced([1, 2], 3, quantize=True)
    assert made.calls == [([1], 3, True), ([2], 3, True)]


def test_parameters_are_gathered_in_one_order() -> None:
    """Whatever the order of the set that DeepSpeed has them in."""

    class Gathers:
        def __init__(self) -> None:
            self.calls: list[tuple[list[int], bool]] = []

        def _PartitionedParameterCoordinator__all_gather_params(  # noqa: N802
            self, params: Iterable[SimpleNamespace], forward: bool
        ) -> None:
            self.calls.append(([each.ds_id for each in params], forward))

    for _ in range(2):
        versions.gather_in_one_order(Gathers)
    made, third, first = Gathers(), SimpleNamespace(ds_id=3), SimpleNamespace(ds_id=1)
    made._PartitionedParameterCoordinator__all_gather_params([third, first], forward=True)
    assert made.calls == [([1, 3], True)]


def test_offsets_in_a_flat_group() -> None:
    held = [torch.zeros(3), torch.zeros(2, 2), torch.zeros(5)]
    older = SimpleNamespace(round_robin_bit16_groups=[[], held])
    assert versions.flat_offsets(older, 1) == [0, 3, 7] and versions.flat_offsets(older, 0) == []
    newer = SimpleNamespace(round_robin_bit16_groups=[held], round_robin_bit16_offsets=[[0, 4, 8]])
    assert versions.flat_offsets(newer, 0) == [0, 4, 8]


# ---- names ----------------------------------------------------------------------------------------------------------


def listed() -> set[str]:
    """Every name that is checked at import, of whatever series, and the classes that hold them."""
    tables = [NAMES, *(series.names for series in versions.SERIES)]
    found = [path for table in tables for row in table.items() for path in paths(*row)]
    return {".".join(path[:stop]) for path in found for stop in range(2, len(path) + 1)}


def used(source: str) -> set[str]:
    """Private names of DeepSpeed's in a file: imported, read off a module or class, or overridden by a class.

    What is not there is left out: a name of another series, or one that comes into being later.
    """
    tree = ast.parse(source)
    known = dict(_imports(tree))
    found = {path for path in known.values() if not isinstance(_held(path)[1], ModuleType)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.update(_resolved(_chain(node), known))
        elif isinstance(node, ast.ClassDef):
            bases = [known[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in known]
            names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            names |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute) and _of_super(part)}
            found.update(f"{base}.{name}" for base in bases for name in names if hasattr(_held(base)[1], name))
    return {name for name, held in map(_held, found) if held is not GONE and _is_private(name)}


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            yield from ((name.asname or name.name, f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "deepspeed":
                    yield (name.asname, name.name) if name.asname else ("deepspeed", "deepspeed")


def _chain(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        parts = _chain(node.value)
        return [*parts, node.attr] if parts else []
    return [node.id] if isinstance(node, ast.Name) else []


def _resolved(chain: list[str], known: dict[str, str]) -> Iterator[str]:
    if chain and chain[0] in known:
        path, held = known[chain[0]], _held(known[chain[0]])[1]
        for part in chain[1:]:
            if isinstance(held, (ModuleType, type)) and not part.startswith("__"):
                path, held = f"{path}.{part}", _held(f"{path}.{part}")[1]
        if not isinstance(held, ModuleType):
            yield path


def _of_super(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"


def _held(path: str) -> tuple[str, object]:
    """The path with the module's own name (`deepspeed.zero` is `deepspeed.runtime.zero`), and what it leads to."""
    parts, module = path.split("."), importlib.import_module("deepspeed")
    rest: list[str] = []
    held: object = module
    for number, name in enumerate(parts[1:], 1):
        with contextlib.suppress(ImportError):
            if not rest and not hasattr(held, name):
                importlib.import_module(".".join(parts[: number + 1]))
        held = getattr(held, name, GONE)
        if isinstance(held, ModuleType) and not rest:
            module = held
        else:
            rest.append(name)
    return ".".join([module.__name__, *rest]), held


def _is_private(path: str) -> bool:
    """What starts with an underscore, and all that stands below `deepspeed.runtime`."""
    name = path.rsplit(".", 1)[-1]
    return not name.startswith("__") and (name.startswith("_") or path.startswith("deepspeed.runtime"))


FILES = sorted((ROOT / "ds_dynatrain").rglob("adapters/*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_private_name_is_listed(file: Path) -> None:
    missing = sorted(used(file.read_text()) - listed())
    assert not missing, f"{file.name} relies on these: list them in adapters/versions/deepspeed_versions.py"


def test_a_name_that_is_not_listed_is_found() -> None:
    source = """
import deepspeed.comm.comm as wire
from deepspeed import zero
from deepspeed.runtime.engine import DeepSpeedEngine as Base, EngineTimers
from deepspeed.utils import groups, logger

class Mine(Base):
    def _take_model_step(self): super()._configure_optimizer()
    def own(self): wire.cdb.barrier(); groups._WORLD_GROUP = None; zero.partition_parameters.Init.param_id = 0
"""
    engine = "deepspeed.runtime.engine"
    base = f"{engine}.DeepSpeedEngine"
    zero = "deepspeed.runtime.zero.partition_parameters.Init"
    groups = "deepspeed.utils.groups._WORLD_GROUP"
    assert used(source) - {base, zero} == {
        *(f"{base}._configure_optimizer", f"{base}._take_model_step", f"{engine}.EngineTimers"),
        *(f"{zero}.param_id", groups),
    }


def test_deepspeed_is_imported_in_the_adapters_alone() -> None:
    for file in sorted((ROOT / "ds_dynatrain").rglob("*.py")):
        if "adapters" not in file.relative_to(ROOT).parts:
            names = {path for _, path in _imports(ast.parse(file.read_text()))}
            private = {
                path for path in names if not re.fullmatch(r"deepspeed(\.comm|\.accelerator\.get_accelerator)?", path)
            }
            assert not private, f"{file}: {sorted(private)}"


def test_what_the_newest_series_alone_has_is_imported_where_it_is_asked_for() -> None:
    """A module that needs it to be imported is imported inside of functions alone, or by another such one."""
    newest, older = ({".".join(path) for row in one.names.items() for path in paths(*row)} for one in (NEWEST, OLDER))
    imported: dict[str, set[str]] = {}
    for file in sorted((ROOT / "ds_dynatrain").rglob("*.py")):
        at_once = [each for each in ast.parse(file.read_text()).body if isinstance(each, ast.ImportFrom)]
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        imported[module] = {path for each in at_once for path in (f"{each.module}.{name.name}" for name in each.names)}
        imported[module] |= {str(each.module) for each in at_once}
    alone = {module for module, names in imported.items() if names & (newest - older)}
    assert alone == {"ds_dynatrain.adapters.model.auto_tp"}
    assert {module for module, names in imported.items() if names & alone} <= alone
