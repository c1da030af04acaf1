"""Other tools' files without a training: where values lie in them, and files from strangers."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ds_dynatrain.checkpoint.others.foreign import Foreign, take
from ds_dynatrain.checkpoint.others.recognize import told_at
from ds_dynatrain.checkpoint.reading import Reader, whole
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import MASTER, WEIGHT

WEIGHTS = {
    "a.weight": torch.randn(5, 7).to(torch.bfloat16),
    "b": torch.randn(3, 2, 4),
    "half": torch.randn(9).to(torch.float16),
    "wide": torch.randn(3, dtype=torch.float64),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
}


def taken(foreign: Foreign, folder: Path) -> Saved:
    """As a checkpoint of ours."""
    rest = {"grad_norm": None, "buffers": {}, "objects": {}}
    return Saved.open(take(foreign, folder, dict(foreign.carry), rest, ()))


def check(saved: Saved, weights: dict[str, torch.Tensor]) -> None:
    """All weights are there in their types, and masters of those that a master can stand for."""
    tensors = {each.name: each for each in saved.record.logical_tensors()}
    assert {name: each.shape for name, each in tensors.items()} == {n: tuple(w.shape) for n, w in weights.items()}
    with Reader(saved.path, saved.manifest) as reader:
        assert all(reader.is_sound(row) for row in saved.manifest if row.file)
        for name, held in weights.items():
            if held.numel():
                assert torch.equal(whole(reader, tensors[name], WEIGHT, held.dtype), held), name
                has_master = held.dtype in (torch.float32, torch.bfloat16, torch.float16)
                assert ((name, MASTER) in saved.manifest.rows) == has_master
                if has_master:
                    assert torch.equal(whole(reader, tensors[name], MASTER, torch.float32), held.float()), name


# ---- safetensors ----------------------------------------------------------------------------------------------------


def test_one_file_and_a_folder(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    check(taken(told_at(tmp_path / "model.safetensors"), tmp_path / "one"), WEIGHTS)
    save_file(WEIGHTS, tmp_path / "adapter.safetensors")
    check(taken(told_at(tmp_path), tmp_path / "two"), WEIGHTS)
    with pytest.raises(CheckpointError, match="there is a 'step0'"):
        taken(told_at(tmp_path), tmp_path / "two")


def test_an_index_of_several_files(tmp_path: Path) -> None:
    names = list(WEIGHTS)
    files = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, held in files.items():
        save_file({name: WEIGHTS[name] for name in held}, tmp_path / file)
    with pytest.raises(CheckpointError, match=r"has 2 safetensors files and no model\.safetensors\.index\.json"):
        told_at(tmp_path)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check(taken(told_at(tmp_path), tmp_path / "ours"), WEIGHTS)
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has both"):
        told_at(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for wrong in ("../model-1.safetensors", "none.safetensors", "model-2.safetensors", 3):
        index["weight_map"]["a.weight"] = wrong  # type: ignore[assignment]
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointDamaged):
            told_at(tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda said: said["b"].update(shape=[3, 2, 5]),
        lambda said: said["b"].update(shape=[-3, -2, 4]),
        lambda said: said["b"].update(data_offsets=[0, 1 << 60], shape=[1 << 58]),
        lambda said: said["b"].update(dtype="X9"),
        lambda said: said.update(b=3),
        lambda said: said["b"].pop("data_offsets"),
    ],
)
def test_headers_that_lie(tmp_path: Path, spoil: Callable[[Any], object]) -> None:
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    said = json.loads(data[8 : 8 + length])
    spoil(said)
    text = json.dumps(said).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(CheckpointError):
        told_at(tmp_path / "x.safetensors")


def test_safetensors_cut_off_or_changed(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    for size in (0, 5, 8, 100, len(data) - 1):
        (tmp_path / "x.safetensors").write_bytes(data[:size])
        with pytest.raises(CheckpointDamaged):
            told_at(tmp_path / "x.safetensors")
    _damaged(tmp_path / "x.safetensors", data, lambda: told_at(tmp_path / "x.safetensors"), 600)


def _damaged(path: Path, data: bytes, read: Callable[[], object], end: int) -> None:
    """Bits flipped near the beginning: an error, or none; never another exception."""
    draw = random.Random(5)
    for _ in range(80):
        changed = bytearray(data)
        changed[draw.randrange(min(end, len(data)))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            read()
        except CheckpointError:
            pass
    path.write_bytes(data)


# ---- torch's distributed checkpoints --------------------------------------------------------------------------------


def saved_by_torch(path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("nested", [True, False])
def test_plain_weights(tmp_path: Path, nested: bool) -> None:
    weights = {f"model.{name}": held for name, held in WEIGHTS.items() if held.numel()}
    theirs = saved_by_torch(tmp_path / "theirs", {"model": weights, "seen": 5} if nested else weights)
    foreign = told_at(theirs)
    assert foreign.left_out == (("seen",) if nested else ())
    check(taken(foreign, tmp_path / "ours"), weights)


def test_pieces_of_several_ranks(tmp_path: Path) -> None:
    """A tensor in boxes, as two ranks of a sharded training would have written it."""
    values, metadata, storage, at = torch.arange(4 * 6 * 5.0).view(4, 6, 5), [], {}, 0
    (tmp_path / "theirs").mkdir()
    with (tmp_path / "theirs" / "__0_0.distcp").open("wb") as file:
        for begin, end in (
            ((0, 0, 0), (4, 2, 5)),
            ((0, 2, 0), (3, 6, 3)),
            ((3, 2, 0), (4, 6, 3)),
            ((0, 2, 3), (4, 6, 5)),
        ):
            part = values[tuple(slice(*each) for each in zip(begin, end, strict=True))].clone()
            torch.save(part, file)
            metadata.append(ChunkStorageMetadata(torch.Size(begin), part.size()))
            storage[MetadataIndex("w", begin)] = _StorageInfo("__0_0.distcp", at, file.tell() - at)
            at = file.tell()
    whole_of = TensorStorageMetadata(TensorProperties(), values.size(), metadata)
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(Metadata({"w": whole_of}, storage_data=storage)))
    check(taken(told_at(tmp_path / "theirs"), tmp_path / "ours"), {"w": values})
    del storage[MetadataIndex("w", (3, 2, 0))]
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(Metadata({"w": whole_of}, storage_data=storage)))
    with pytest.raises(CheckpointDamaged, match="'w' is there twice or not at all"):
        taken(told_at(tmp_path / "theirs"), tmp_path / "damaged")


def test_an_optimizer_that_names_no_weights(tmp_path: Path) -> None:
    """As `optimizer.state_dict()` has it, by numbers; and states without groups."""
    weight, moment = {"a": torch.ones(3)}, {"exp_avg": torch.ones(3)}
    by_number = {"state": {0: moment}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    theirs = saved_by_torch(tmp_path / "number", {"model": weight, "optimizer": by_number})
    with pytest.raises(CheckpointError, match=r"optimizer states of '0', and no weight of that name.*get_state_dict"):
        told_at(theirs)
    theirs = saved_by_torch(tmp_path / "states", {"model": weight, "optim": {"state": {"a": moment}}})
    with pytest.raises(CheckpointError, match=r"no 'optim\.param_groups' that names their tensors"):
        told_at(theirs)


class Trap:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_its_metadata_is_not_run(tmp_path: Path) -> None:
    theirs = saved_by_torch(tmp_path / "theirs", {"a": torch.ones(3)})
    data = (theirs / ".metadata").read_bytes()
    for trap in (Trap(tmp_path / "trace"), Metadata({"a": Trap(tmp_path / "trace")})):
        (theirs / ".metadata").write_bytes(pickle.dumps(trap))
        with pytest.raises(CheckpointError, match=r"posix\.mkdir, which is no record"):
            told_at(theirs, trust_pickle=True)
    assert not (tmp_path / "trace").exists()
    for size in (0, 20, len(data) - 3):
        (theirs / ".metadata").write_bytes(data[:size])
        with pytest.raises(CheckpointDamaged):
            told_at(theirs)
    _damaged(theirs / ".metadata", data, lambda: told_at(theirs), len(data))
    (theirs / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointDamaged):
        told_at(theirs)
