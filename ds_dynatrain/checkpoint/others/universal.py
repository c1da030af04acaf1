"""A checkpoint of ours as DeepSpeed's universal format, which its `load_universal` reads in ZeRO stages 1 to 3.

One small file for each tensor and state, and the weights of the model in one file, whose values are written into it
tensor by tensor. Read by DeepSpeed in any number of data ranks; other axes would need DeepSpeed's own notes on them.
"""

from __future__ import annotations

import os
import secrets
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

from ds_dynatrain.checkpoint.convert import Progress, proven, silent
from ds_dynatrain.checkpoint.elements import named
from ds_dynatrain.checkpoint.folder import check_tag
from ds_dynatrain.checkpoint.hidden import appearing
from ds_dynatrain.checkpoint.names import check_file_names, check_names
from ds_dynatrain.checkpoint.others.torch_files import read_tree
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.space import MASTER, WEIGHT, row_of

LATEST = "latest_universal"
MASTERS, STEP, OPTIMIZER = "fp32", "step", "optimizer_state.pt"
MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Where DeepSpeed looks in stages 1 and 2, and in stage 3."""


def to_universal(
    saved: Saved,
    carry: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    path: Path,
    progress: Progress = silent,
) -> Path:
    """Write a checkpoint into the folder `path`, beside others, under its own tag; its folder.

    carry: the shared carry, decoded. buffers: of the module. Memory: the largest tensor. CheckpointError for what
    DeepSpeed's format has no place for, or if it is there already, CheckpointDamaged for values that are not what was
    saved. It has its name only when it is whole.
    """
    tag = saved.path.name
    check_tag(tag)
    _check(saved, carry, buffers)
    with appearing(path / tag, parents=True) as hidden, Reader(saved.path, saved.manifest) as reader:
        _write_states(saved, carry, reader, hidden / "zero", progress)
        _write_models(saved, carry, buffers, reader, hidden, progress)
    note = path / f".{LATEST}-{secrets.token_hex(4)}"
    note.write_text(tag)
    os.rename(note, path / LATEST)
    return path / tag


def _check(saved: Saved, carry: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
    if MASTER not in saved.record.kinds or "groups" not in carry:
        raise CheckpointError(
            f"{saved.path} has weights only, and DeepSpeed's format needs an optimizer's states; convert it to "
            "safetensors (--to safetensors)"
        )
    experts = [each.name for each in saved.record.logical_tensors() if each.expert]
    if experts:
        raise CheckpointError(
            f"{saved.path}: {experts[0]!r} is of experts, for which DeepSpeed's format needs notes of its own; "
            "convert it to safetensors (--to safetensors)"
        )
    names = [each.name for each in saved.record.logical_tensors()]
    check_names(names, saved.record.kinds)
    twice = buffers.keys() & {*names}
    if twice:
        raise CheckpointError(
            f"{saved.path} has a parameter and a buffer that are both {min(twice)!r}; rename one of them in the "
            "model, and save again"
        )
    check_file_names((each.name for each in saved.record.logical_tensors() if each.trainable), (OPTIMIZER,))
    check_file_names(_moments(saved), (MASTERS, STEP))


def _moments(saved: Saved) -> list[str]:
    return [kind for kind in saved.record.kinds if row_of(kind).is_moment]


def _write_states(saved: Saved, carry: Mapping[str, Any], reader: Reader, folder: Path, progress: Progress) -> None:
    """Masters and moments, a folder for each tensor; hyper-parameters in a file of their own."""
    steps = carry.get("scalars", {}).get(STEP, {})
    for number, tensor in enumerate(saved.record.logical_tensors()):
        if not tensor.trainable or not tensor.numel:
            continue
        (folder / tensor.name).mkdir(parents=True)
        for kind in (MASTER, *_moments(saved)):
            if (tensor.name, kind) not in saved.manifest.rows:
                continue
            name = MASTERS if kind == MASTER else kind
            torch.save({"param": proven(reader, tensor, kind), "cat_dim": 0}, folder / tensor.name / f"{name}.pt")
            progress(tensor.numel * named(saved.manifest.rows[tensor.name, kind][0].dtype).itemsize)
        if str(number) in steps:
            torch.save(torch.tensor(steps[str(number)]), folder / tensor.name / f"{STEP}.pt")
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(_optimizer(carry, steps), folder / OPTIMIZER)


def _optimizer(carry: Mapping[str, Any], steps: Mapping[str, float]) -> dict[str, Any]:
    """What all tensors share: for stages 1 and 2 at the top, for stage 3 one level below."""
    groups = [{**group, "params": []} for group in carry["groups"]]
    state = {0: {STEP: torch.tensor(max(steps.values()))}} if steps else {}
    own = {"state": state, "param_groups": groups}
    return {**own, "optimizer_state_dict": own, "ds_version": deepspeed_version()}


def _write_models(
    saved: Saved,
    carry: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    reader: Reader,
    folder: Path,
    progress: Progress,
) -> None:
    """Counters and schedule, and the weights: room is left for their values, which are then written one by one."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.serialization import skip_data

    tensors = saved.record.logical_tensors()
    rows = saved.manifest.rows
    types = {each.name: named(rows[each.name, WEIGHT][0].dtype) for each in tensors if (each.name, WEIGHT) in rows}
    names = [list[Any]() for _ in carry["groups"]]
    for each in tensors:
        if each.trainable:
            names[each.group].append((each.name, torch.Size(each.shape)))
    said = {
        "buffer_names": list(buffers),
        "param_shapes": [dict(group) for group in names],
        "optimizer": None,
        "lr_scheduler": carry.get("scheduler"),
        "random_ltd": carry.get("random-LTD"),
        "data_sampler": None,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": deepspeed_version(),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        **carry.get("counters", {}),
    }
    torch.save({"module": {}, **said}, folder / MODELS[1])
    with FakeTensorMode(), skip_data(materialize_fake_tensors=True):
        module = {each.name: torch.empty(each.shape, dtype=types[each.name]) for each in tensors if each.name in types}
        module.update({name: torch.empty(held.shape, dtype=held.dtype) for name, held in buffers.items()})
        torch.save({"module": module, **said}, folder / MODELS[0])
    places, crcs = read_tree(folder, MODELS[0])["module"], dict[int, int]()
    with (folder / MODELS[0]).open("r+b") as file:
        for name, held in buffers.items():
            crcs[places[name].offset] = _put(file.fileno(), places[name].offset, held)
        for each in tensors:
            if each.name in types and each.numel:
                at = places[each.name].offset
                crcs[at] = _put(file.fileno(), at, proven(reader, each, WEIGHT))
                progress(each.numel * types[each.name].itemsize)
        _note_crcs(file, crcs)
        file.flush()
        os.fsync(file.fileno())


def _note_crcs(file: IO[bytes], crcs: Mapping[int, int]) -> None:
    """Write CRC32s of members whose bytes were put in after torch.save had left room for them, by their first byte."""
    with zipfile.ZipFile(file, "a") as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        begins = [entry.header_offset for entry in entries]
        for at, crc in crcs.items():
            entries[bisect_right(begins, at) - 1].CRC = crc
        archive.comment = b""  # zipfile writes its directory anew


def _put(file: int, at: int, values: torch.Tensor) -> int:
    """Write values at a byte of a file; their CRC32."""
    view: memoryview = values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    crc = zlib.crc32(view)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done
    return crc


def deepspeed_version() -> str:
    """That of the installed DeepSpeed, or the one that this was written for."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return "0.19.8"
