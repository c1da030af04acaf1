"""Records that a stranger has written, with all sums right: they are refused, or they can be read."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_dynatrain.checkpoint import record
from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.manifest import ManifestRow
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.errors import CheckpointDamaged
from tests.checkpoint.strangers import FORMATS, checkpoint, rewritten, with_rows
from tests.checkpoint.test_damage import whole

# ---- record and manifest --------------------------------------------------------------------------------------------


def tensors(change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda said: change(said["tensors"])


DISAGREE: dict[str, Callable[[Any], object]] = {
    "larger": tensors(lambda said: said[0].__setitem__(1, [4096, 1024])),
    "turned": tensors(lambda said: said[0].__setitem__(1, [50, 30])),
    "huge": tensors(lambda said: said[0].__setitem__(1, [1 << 40, 1 << 10])),
    "beyond words": tensors(lambda said: said[0].__setitem__(1, [1 << 70])),
    "empty": tensors(lambda said: said[0].__setitem__(1, [0, 1 << 62])),
    "one more": tensors(lambda said: said.append(["more", [3], -1, False])),
    "one less": tensors(lambda said: said.pop()),
    "one twice": tensors(lambda said: said.insert(1, said[0])),
    "another order": tensors(lambda said: said.reverse()),
    "another group": tensors(lambda said: said[0].__setitem__(2, 1 << 40)),
}


@pytest.mark.parametrize("name", DISAGREE)
def test_record_and_manifest_that_disagree(tmp_path: Path, name: str) -> None:
    path = whole(tmp_path / "ours")
    rewritten(path, DISAGREE[name])
    with pytest.raises(CheckpointDamaged):
        Saved.open(path)
    assert checkpoint("verify", path)[0] == 2
    assert checkpoint("convert", path, tmp_path / "x.safetensors")[0] == 2
    assert not (tmp_path / "x.safetensors").exists()


def test_a_huge_shape_of_which_nothing_is_stored(tmp_path: Path) -> None:
    path, found = whole(tmp_path / "ours"), list[ManifestRow]()

    def one_row(row: ManifestRow) -> ManifestRow | None:
        if row.tensor != "a":
            return row
        if found or row.kind != "weight":
            return None
        found.append(row)
        return replace(row, shape=(1 << 50,), extent=Extent(0, 1 << 50, 0, 1))

    with_rows(path, one_row)
    rewritten(path, lambda said: said["tensors"][0].__setitem__(1, [1 << 50]))
    with pytest.raises(CheckpointDamaged, match="nor a master"):
        Saved.open(path)


def test_bytes_that_are_several_values(tmp_path: Path) -> None:
    path = whole(tmp_path / "ours")
    rows = [row for row in Saved.open(path).manifest if row.file == "00000.float32.arrow"]
    first = min(row.offset for row in rows)
    with_rows(path, lambda row: replace(row, offset=first) if row.file == "00000.float32.arrow" else row)
    rewritten(path)
    with pytest.raises(CheckpointDamaged, match="in one place"):
        Saved.open(path)


# ---- anything at all ------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    ["", "a", "0", "1", "master", "weight", "rest", "float32", "__tensor__", "__array__", "__number__", "__bytes__"]
    + ["__tuple__", "__items__", "../x", "groups", "scalars", "counters", "\ud800", "step", "99"]
)
NUMBERS = st.sampled_from([-(1 << 70), -1, 0, 1, 2, 7, 1 << 31, 1 << 50, 1 << 63, 1 << 70, 1.5, float("nan"), 1e300])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(WORDS, part, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn, said: Any) -> Any:
    """One to three places of a JSON value are others, gone, or twice."""
    said = copy.deepcopy(said)
    for _ in range(draw(st.integers(1, 3))):
        held = said
        while True:
            keys = list(range(len(held))) if isinstance(held, list) else list(held)
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(held[key], list | dict) and held[key] and draw(st.booleans()):
                held = held[key]
                continue
            how = draw(st.sampled_from(["another", "another", "gone", "more"]))
            if how == "gone":
                del held[key]
            elif how == "another":
                held[key] = draw(VALUES)
            elif isinstance(held, list):
                held.append(draw(VALUES))
            else:
                held[draw(WORDS)] = draw(VALUES)
            break
    return said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole(tmp_path_factory.mktemp("model"))


GROUP = {"lr": 0.1, "betas": {"__tuple__": [0.9, 0.99]}, "x": {"__items__": [[1, 2]]}, "y": {"__bytes__": "AA=="}}
CARRY = {
    "counters": {"global_steps": 7},
    "groups": [GROUP],
    "scalars": {"step": {"0": 7.0, "1": 7.0}},
    "scheduler": {"a": [1, 2]},
}
BUFFER = {"__tensor__": 0, "dtype": "float32", "shape": [0, 2]}
REST = {
    "grad_norm": None,
    "buffers": {"mean": BUFFER},
    "objects": {"one": {"__array__": {"__tensor__": 1, "dtype": "int64", "shape": [0]}}},
}


def check_read_or_refused(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    """The commands end with code 0, 1 or 2: no exception gets out of them."""
    path, out = tmp_path / "step7", tmp_path / "out"
    for each in (path, out):
        shutil.rmtree(each, ignore_errors=True)
    shutil.copytree(model, path)
    out.mkdir()
    where = data.draw(st.sampled_from(["nowhere", "record", "carry", "carry", "rest", "rest"]))
    small: Any = {"streams": {}, "rest": REST}
    if where == "rest":
        small["rest"] = data.draw(mutated(small["rest"]))
    (path / record.rank_file(0)).write_text(json.dumps(small))
    said = {**json.loads((path / record.RECORD).read_text()), "carry": CARRY}
    said.pop("sum")
    if where == "record":
        said = data.draw(mutated(said))
    elif where == "carry":
        said["carry"] = data.draw(mutated(said["carry"]))
    rewritten(path, lambda held: (held.clear(), held.update(said)))
    to = data.draw(st.sampled_from(FORMATS))
    assert checkpoint("verify", path)[0] in ((0,) if where == "nowhere" else (0, 1, 2))
    assert checkpoint("inspect", path, "--json")[0] in (0, 2)
    assert checkpoint("convert", path, out / "x", "--to", to)[0] in ((0,) if where == "nowhere" else (0, 2))


QUIET = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(QUIET, max_examples=30)
@given(data=st.data())
def test_any_record_is_read_or_refused(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    check_read_or_refused(model, tmp_path, data)


@pytest.mark.full
@settings(QUIET, max_examples=400)
@given(data=st.data())
def test_any_of_many_records(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    check_read_or_refused(model, tmp_path, data)
