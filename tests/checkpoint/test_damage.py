"""Checkpoints from strangers: whatever was done to the files, an error that says so, or the very values."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_dynatrain.checkpoint import folder, record
from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.files import dumped
from ds_dynatrain.checkpoint.manifest import Manifest, ManifestRow
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved, TrainingRecord
from ds_dynatrain.cli.main import app
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from tests.checkpoint.worlds import load, save, state_of
from tests.transfer.states import differences

LAYOUT = Layout(data=2, zero_stage=1)
TENSORS = [LogicalTensor("a", (30, 50)), LogicalTensor("b", (7,)), LogicalTensor("frozen", (5,), -1)]
SPACE = VirtualParameterSpace.of(TENSORS, ZeroRules(), standard_kinds(2), LAYOUT, (0, 1))
STATE = state_of(SPACE)


CARRY = {
    "counters": {"global_steps": 7, "global_samples": 56, "skipped_steps": 0},
    "groups": [{"lr": 0.1, "betas": {"__tuple__": [0.9, 0.99]}}],
    "scalars": {"step": {"0": 7.0, "1": 7.0}},
}
REST = {"grad_norm": None, "buffers": {}, "objects": {}}


def whole(path: Path, tag: str = "step7") -> Path:
    """A checkpoint as `engine.save` leaves it, but for most of the carry and random streams."""
    path.mkdir(exist_ok=True)
    hidden = folder.begin(path, tag)
    manifest = save(hidden, SPACE, LAYOUT, STATE).to_bytes()
    (hidden / record.MANIFEST).write_bytes(manifest)
    sums = {record.MANIFEST: record.sum_of(manifest)}
    for rank in range(2):
        data = dumped({"streams": {}, "rest": REST})
        (hidden / record.rank_file(rank)).write_bytes(data)
        sums[record.rank_file(rank)] = record.sum_of(data)
    tensors = [[each.name, list(each.shape), each.group, each.expert] for each in TENSORS]
    kinds = list(SPACE.present_kinds())
    files = [0, 0], sums, record.sizes_of(hidden)
    made = TrainingRecord(7, LAYOUT.to_dict(), 1, 2, kinds, tensors, CARRY, *files, record.WRITER)
    folder.write(hidden / record.RECORD, record.to_bytes(made))
    return folder.finish(hidden, tag)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return whole(tmp_path)


def read_all(path: Path) -> bool:
    """Whether everything opens, fits, and is what was saved; CheckpointError where it says that it is not."""
    found = Saved.open(path)
    with Reader(path, found.manifest) as reader:
        sound = all(reader.is_sound(row) for row in found.manifest if row.file)
    wrong = [
        differences(SPACE, LAYOUT, rank, STATE, load(path, found.manifest, SPACE, LAYOUT, rank)) for rank in range(2)
    ]
    assert not sound or wrong == [[], []], "a wrong value with the right digest"
    return sound


def test_it_is_whole(saved: Path) -> None:
    assert read_all(saved) and Saved.open(saved).record.step == 7
    assert folder.latest(saved.parent) == "step7"


@pytest.mark.parametrize("name", ["checkpoint.json", "manifest.arrow", "00000.float32.arrow", "00001.bfloat16.arrow"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_cut_off(saved: Path, name: str, share: float) -> None:
    names = {each.name for each in saved.iterdir()}
    file = saved / (name if name in names else "00000.bfloat16.arrow")
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointError):
        read_all(saved)


@pytest.mark.parametrize("name", ["checkpoint.json", "manifest.arrow", "00000.float32.arrow"])
def test_bits_flipped_anywhere(saved: Path, name: str) -> None:
    """A change of the small files is always found; of a data file where it has values."""
    file, draw = saved / name, random.Random(3)
    data = file.read_bytes()
    held = [(row.offset, row.offset + row.nbytes) for row in Saved.open(saved).manifest if row.file == name]
    for _ in range(60):
        at = draw.randrange(len(data))
        changed = bytearray(data)
        changed[at] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        matters = not held or any(low <= at < high for low, high in held)
        try:
            found = read_all(saved)
        except CheckpointError:
            found = False
        assert found != matters, (name, at)
    file.write_bytes(data)
    assert read_all(saved)


def test_files_shuffled(saved: Path) -> None:
    one, other = saved / "00000.float32.arrow", saved / "00001.float32.arrow"
    one.rename(saved / "x")
    other.rename(one)
    (saved / "x").rename(other)
    try:
        assert not read_all(saved)
    except CheckpointDamaged:
        pass


def lied(path: Path, change: Callable[[ManifestRow], ManifestRow]) -> None:
    """Change the first master's row, and all sums so that nothing but the lie is wrong."""
    found = Saved.open(path)
    rows = list(found.manifest)
    place = next(index for index, row in enumerate(rows) if row.kind == "master" and row.tensor == "a")
    rows[place] = change(rows[place])
    data = Manifest.of(rows).to_bytes()
    (path / record.MANIFEST).write_bytes(data)
    sums = {**found.record.sums, record.MANIFEST: record.sum_of(data)}
    (path / record.RECORD).write_bytes(record.to_bytes(replace(found.record, sums=sums)))


LIES: dict[str, Callable[[ManifestRow], ManifestRow]] = {
    "far offset": lambda row: replace(row, offset=1 << 40),
    "negative offset": lambda row: replace(row, offset=-64),
    "crooked offset": lambda row: replace(row, offset=row.offset + 1),
    "long": lambda row: replace(row, extent=replace(row.extent, length=1 << 62)),
    "many": lambda row: replace(row, extent=replace(row.extent, count=1 << 62, step=1)),
    "backwards": lambda row: replace(row, extent=replace(row.extent, count=3, length=1, step=-1)),
    "negative": lambda row: replace(row, extent=replace(row.extent, start=-5)),
    "huge shape": lambda row: replace(row, shape=(1 << 40, 1 << 40)),
    "negative shape": lambda row: replace(row, shape=(-30, -50)),
    "another shape": lambda row: replace(row, shape=(50, 30)),
    "another type": lambda row: replace(row, dtype="float64"),
    "no type": lambda row: replace(row, dtype="Tensor"),
    "another folder": lambda row: replace(row, file="../00000.float32.arrow"),
    "an absolute path": lambda row: replace(row, file="/etc/passwd"),
    "no file": lambda row: replace(row, file=""),
    "no such file": lambda row: replace(row, file="00007.float32.arrow"),
    "a part": lambda row: replace(row, extent=Extent(row.extent.start, 1, 0, 1)),
    "another kind": lambda row: replace(row, kind="exp_avg"),
    "another tensor": lambda row: replace(row, tensor="c"),
    "another digest": lambda row: replace(row, digest=row.digest ^ 1),
}


@pytest.mark.parametrize("name", LIES)
def test_a_manifest_that_lies(saved: Path, name: str) -> None:
    lied(saved, LIES[name])
    try:
        assert not read_all(saved)
    except CheckpointDamaged:
        pass


def test_a_link_is_no_data_file(saved: Path, tmp_path: Path) -> None:
    file = saved / "00000.float32.arrow"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamaged, match="0 bytes"):
        read_all(saved)


def with_version(path: Path, version: object) -> None:
    content = json.loads((path / record.RECORD).read_text())
    content.pop("sum")
    content["version"], content["later"] = version, {"key": 1}
    text = json.dumps(content, sort_keys=True)
    content["sum"] = record.sum_of(text.encode())
    (path / record.RECORD).write_text(json.dumps(content))


def test_versions(saved: Path) -> None:
    with_version(saved, [1, 9])
    assert read_all(saved), "a later second number is read"
    with_version(saved, [2, 0])
    with pytest.raises(CheckpointError, match=r"of version 2\.0, and this reads 1\.x.*ds_dynatrain"):
        read_all(saved)
    with_version(saved, "2")
    with pytest.raises(CheckpointDamaged, match="version"):
        read_all(saved)


@pytest.mark.parametrize("text", ["", "[]", "{", "nan", "[" * 100_000, '{"format": 1}'])
def test_no_record(saved: Path, text: str) -> None:
    (saved / record.RECORD).write_text(text)
    with pytest.raises(CheckpointDamaged):
        Saved.open(saved)


# ---- folders --------------------------------------------------------------------------------------------------------


def test_the_newest_whole_one(tmp_path: Path) -> None:
    first = whole(tmp_path)
    shutil.copytree(first, tmp_path / "step8")
    (tmp_path / "step8" / "manifest.arrow").write_bytes(b"")
    (tmp_path / "latest").write_text("step8")
    assert [each.path.name for each in folder.newest(tmp_path)] == ["step7"]
    (tmp_path / "latest").unlink()
    assert [each.path.name for each in folder.newest(tmp_path)] == ["step7"]
    assert list(folder.newest(tmp_path / "none")) == []


def test_the_last_ones_stay(tmp_path: Path) -> None:
    for number in range(5):
        hidden = folder.begin(tmp_path, f"s{number}")
        (hidden / record.RECORD).write_text("{}")
        folder.finish(hidden, f"s{number}", keep=2)
    (tmp_path / ".saving-left-over").mkdir()
    assert sorted(folder.tags(tmp_path)) == ["s3", "s4"] and folder.latest(tmp_path) == "s4"
    folder.begin(tmp_path, "s5").rmdir()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "s3", "s4"]


def test_one_job_at_a_time(tmp_path: Path) -> None:
    with folder.locked(tmp_path), pytest.raises(CheckpointError, match="another job"), folder.locked(tmp_path):
        pass
    with folder.locked(tmp_path):
        pass


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    with folder.locked(tmp_path):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with folder.locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("tag", ["", ".x", "a/b", "..", "latest", "a" * 300, "a\n"])
def test_tags(tag: str) -> None:
    with pytest.raises(CheckpointError, match="tag"):
        folder.check_tag(tag)


# ---- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


def test_inspect_and_verify(saved: Path) -> None:
    code, text = run("inspect", saved.parent, "--json")
    said = json.loads(text)
    assert code == 0 and said["step"] == 7 and said["kinds"]["exp_avg"]["bytes"] == 4 * 1507
    assert said["kinds"]["weight"]["bytes"] == 10 and said["kinds"]["weight"]["elements"] == 1512
    assert run("inspect", saved)[0] == run("verify", saved)[0] == 0
    file = saved / "00001.float32.arrow"
    data = bytearray(file.read_bytes())
    row = next(each for each in Saved.open(saved).manifest if each.file == file.name)
    data[row.offset] ^= 1
    file.write_bytes(data)
    code, text = run("verify", saved)
    assert code == 1 and f"{row}: not what was saved" in " ".join(text.split())
    assert run("verify", saved / "nothing")[0] == run("inspect", saved / "nothing")[0] == 2
