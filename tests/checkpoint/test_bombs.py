"""Files that never end: pipes, devices, and small ones that stand for endless values. Each is refused, and soon."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ds_dynatrain.checkpoint import folder, record
from ds_dynatrain.checkpoint.others.recognize import told_at
from ds_dynatrain.checkpoint.others.torch_files import read_tree
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from tests.checkpoint.strangers import checkpoint
from tests.checkpoint.test_damage import whole

SECONDS, BYTES = 60, 2 << 30


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """No test here may take long, or much memory beyond what the process has."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not refused within {SECONDS} s")

    before, limit = signal.signal(signal.SIGALRM, stop), resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, limit[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limit)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def elsewhere(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


# ---- pipes, devices, links ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [pipe, device, elsewhere])
def test_ours_has_regular_files_only(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    ours = whole(tmp_path / "ours")
    for name in sorted(each.name for each in ours.iterdir()):
        path = shutil.copytree(ours, tmp_path / name / "step7")
        spoil(path / name)
        code, text = checkpoint("verify", path)
        assert code in (1, 2), (name, text)


def test_a_folder_may_be_a_link(tmp_path: Path) -> None:
    whole(tmp_path / "ours")
    (tmp_path / "here").symlink_to(tmp_path / "ours")
    assert checkpoint("verify", tmp_path / "here")[0] == 0


@pytest.mark.parametrize("spoil", [pipe, device])
def test_a_note_is_a_regular_file(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    whole(tmp_path)
    spoil(tmp_path / folder.LATEST)
    with pytest.raises(CheckpointError, match="no regular file"):
        folder.latest(tmp_path)
    spoil(tmp_path / "latest_universal")
    with pytest.raises(CheckpointError):
        told_at(tmp_path)


def stock(path: Path) -> Path:
    """As DeepSpeed's `save_checkpoint` at stage 1 would leave it, as far as it is read before anything is refused."""
    path.mkdir()
    torch.save({"module": {}, "dp_world_size": 1}, path / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {}}, path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return path


@pytest.mark.parametrize("spoil", [pipe, device])
@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_deepspeeds_has_regular_files_only(tmp_path: Path, name: str, spoil: Callable[[Path], None]) -> None:
    spoil(stock(tmp_path / "c") / name)
    with pytest.raises(CheckpointDamaged, match="no regular file"):
        told_at(tmp_path / "c")


def test_others_may_have_links(tmp_path: Path) -> None:
    """The caches of download tools are full of them."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    elsewhere(tmp_path / "x.safetensors")
    for number, path in enumerate((tmp_path / "dcp", tmp_path / "x.safetensors")):
        for each in sorted(path.iterdir()) if path.is_dir() else ():
            elsewhere(each)
            (path / "elsewhere").rename(tmp_path / each.name.strip("."))
            each.unlink()
            each.symlink_to(tmp_path / each.name.strip("."))
        code, text = checkpoint("convert", path, tmp_path / f"ours{number}", "--to", "universal")
        assert code == 0, text


# ---- small files that stand for much --------------------------------------------------------------------------------


def doubled(depth: int, make: Callable[..., Any]) -> Any:
    """2^depth values, made of `depth`."""
    part = make([])
    for _ in range(depth):
        part = make([part, part])
    return part


def in_itself() -> Any:
    part: list[Any] = []
    part.append(part)
    return part


def deep(depth: int) -> Any:
    part: list[Any] = []
    for _ in range(depth):
        part = [part]
    return part


BOMBS: dict[str, Callable[[], Any]] = {
    "lists": lambda: doubled(60, list),
    "tables": lambda: doubled(60, lambda parts: dict(enumerate(parts))),
    "a long text": lambda: ["x" * 1_000_000] * 1_000,
    "in itself": in_itself,
    "deep": lambda: deep(300),
    "a long integer": lambda: 1 << 100_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_values_that_never_end(tmp_path: Path, name: str) -> None:
    torch.save({"lr_scheduler": BOMBS[name](), "module": {}, "dp_world_size": 1}, tmp_path / "x.pt")
    with pytest.raises(CheckpointDamaged, match=r"x\.pt"):
        read_tree(tmp_path, "x.pt")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    said = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    said.planner_data["w"] = ("w", BOMBS[name]())
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(said))
    with pytest.raises(CheckpointDamaged, match="metadata"):
        told_at(tmp_path / "dcp")


def key_of_pairs() -> bytes:
    """A table whose key is 2^60 nested tuples: to look at its hash takes for ever."""
    pairs = b"".join(b"h%ch%c\x86\x940" % (number, number) for number in range(60))
    return b"\x80\x04})\x940" + pairs + b"h%cK\x01s." % 60


def key_of_pairs_by_number() -> bytes:
    """The same with the operations that `weights_only` knows, the pairs in a list."""
    pairs = b"".join(b"h%ch%c\x86q%ca" % (number, number, number + 1) for number in range(60))
    return b"\x80\x02])q\x00a" + pairs + b"}h%cK\x01s\x86." % 60


PICKLES = {
    "a key of pairs": key_of_pairs(),
    "a key of pairs, by number": key_of_pairs_by_number(),
    "a far place": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a long text": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"x.",
    "doubled": b"\x80\x02)2\x862\x86.",
    "nothing": b".",
    "no end": b"\x80\x02}",
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_that_lie(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as made:
        made.writestr("x/data.pkl", PICKLES[name])
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(PICKLES[name])
    with pytest.raises(CheckpointDamaged):
        read_tree(tmp_path, "x.pt")
    with pytest.raises(CheckpointDamaged):
        told_at(tmp_path / "dcp")


def test_what_is_shared_stays_shared(tmp_path: Path) -> None:
    shared = {"a": [1, 2]}
    torch.save({"one": shared, "other": shared}, tmp_path / "x.pt")
    tree = read_tree(tmp_path, "x.pt")
    assert tree == {"one": shared, "other": shared} and tree["one"] is tree["other"]


def rezipped(path: Path, change: Callable[[zipfile.ZipFile, str, bytes], None]) -> None:
    held = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(held) as old, zipfile.ZipFile(path, "w") as made:
        for each in old.infolist():
            change(made, each.filename, old.read(each))


def swollen(made: zipfile.ZipFile, name: str, data: bytes) -> None:
    if not name.endswith("data.pkl"):
        made.writestr(name, data)
        return
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    with made.open(info, "w", force_zip64=True) as file:
        file.write(data[:-1])
        for _ in range(8):
            file.write(b"N0" * (1 << 22))
        file.write(b".")


def twice(made: zipfile.ZipFile, name: str, data: bytes) -> None:
    made.writestr(name, data)
    if name.endswith("data.pkl"):
        made.writestr(name.upper(), data)


@pytest.mark.parametrize("change", [swollen, twice])
def test_zips_that_torch_does_not_write(tmp_path: Path, change: Callable[..., None]) -> None:
    torch.save({"a": 1}, tmp_path / "x.pt")
    rezipped(tmp_path / "x.pt", lambda made, name, data: made.writestr(name, data))
    assert read_tree(tmp_path, "x.pt") == {"a": 1}
    rezipped(tmp_path / "x.pt", change)
    with pytest.raises(CheckpointDamaged):
        read_tree(tmp_path, "x.pt")


def test_a_record_of_many_values(tmp_path: Path) -> None:
    path = whole(tmp_path)
    (path / record.RECORD).write_bytes(b'{"a":[' + b"0," * 30_000_000 + b"0]}")
    with pytest.raises(CheckpointDamaged, match=r"values, and at most \d+ are read"):
        Saved.open(path)


def test_ranks_that_are_not_there(tmp_path: Path) -> None:
    for name in ("mp_rank_99999999999_model_states.pt", "layer_99999999999-model_states.pt"):
        path = stock(tmp_path / name)
        shutil.copy(path / "mp_rank_00_model_states.pt", path / name)
        with pytest.raises(CheckpointDamaged, match="99999999999"):
            told_at(path)
    path = stock(tmp_path / "c")
    (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    torch.save({"module": {}, "dp_world_size": 10**12, "optimizer": {}}, path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointDamaged, match=str(10**12)):
        told_at(path)


LIES: dict[str, Any] = {
    "one place for two": {"b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
    "a hole": {"b": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]}},
    "broken sizes": {"b": {"dtype": "F32", "shape": [4.5], "data_offsets": [16, 32]}},
    "a note of half a character": {"__metadata__": {"format": "\ud800"}},
    "no number, in a note": {"__metadata__": float("nan")},
    "a note that is no text": {"__metadata__": {"format": 1}},
    "sizes in words": {"b": {"dtype": "F32", "shape": ["4"], "data_offsets": [16, 32]}},
}


@pytest.mark.parametrize("name", LIES)
def test_safetensors_that_the_library_refuses(tmp_path: Path, name: str) -> None:
    said = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, **LIES[name]}
    text = json.dumps(said).encode()
    (tmp_path / "x.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + bytes(16 if "note" in name else 32)
    )
    with pytest.raises(CheckpointDamaged):
        told_at(tmp_path / "x.safetensors")
    with pytest.raises(SafetensorError):
        safe_open(tmp_path / "x.safetensors", "pt")


def test_safetensors_with_a_name_twice(tmp_path: Path) -> None:
    """The library takes the last one, and so it is here."""
    text = (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    foreign = told_at(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as held:
        assert [each.name for each in foreign.tensors] == held.keys() == ["a"]
