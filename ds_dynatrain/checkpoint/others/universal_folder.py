"""Checkpoints in DeepSpeed's universal format, which `ds_to_universal` writes and `load_universal` reads, both ways.

| file | content |
|---|---|
| `zero/NAME/fp32.pt` and other states | `{"param": values}` or, in stage 3, only the flat values |
| `zero/NAME/step.pt`, or `optimizer_state.pt` | step counts |
| `zero/optimizer_state.pt` | hyper-parameters of the groups, the loss scale |
| `*_model_states.pt` | names and shapes by group, counters, schedule, buffers, frozen weights (in parts in stage 3) |

A folder that this package writes has one small file per tensor and state, and one file with all weights of the model,
which is filled tensor by tensor. DeepSpeed reads such a folder in ZeRO stages 1 to 3 on any number of data ranks. Other
axes would need additional metadata of DeepSpeed's.
"""

from __future__ import annotations

import os
import secrets
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch

from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.files import (
    Progress,
    appearing,
    check_file_names,
    check_names,
    is_component,
    silent,
)
from ds_dynatrain.checkpoint.folder import check_tag
from ds_dynatrain.checkpoint.manifest import ManifestRow
from ds_dynatrain.checkpoint.others.foreign import (
    Foreign,
    cast_from_master,
    number_of,
    stored_row,
    whole_row,
)
from ds_dynatrain.checkpoint.others.torch_files import Stored, read_tree
from ds_dynatrain.checkpoint.others.zero_files import (
    OptimizerFile,
    ZeroFolder,
    carry_of,
    configured_type,
    frozen_shapes,
    groups_of,
)
from ds_dynatrain.checkpoint.reading import Reader, proven
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import FROZEN, MASTER, WEIGHT, LogicalTensor, row_of

FORMAT = "DeepSpeed's universal format"
ZERO, MASTERS, STEP, OPTIMIZER = "zero", "fp32", "step", "optimizer_state.pt"
LATEST = "latest_universal"
MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Names of the file that DeepSpeed reads in stages 1 and 2, and of the file that it reads in stage 3."""


# ---- reading ---------------------------------------------------------------------------------------------------------


def is_universal(path: Path) -> bool:
    """Return whether a folder looks like a checkpoint in DeepSpeed's universal format."""
    return (path / ZERO / OPTIMIZER).is_file()


def read_universal(path: Path, trust_pickle: bool = False) -> Foreign:
    """Return a description of a checkpoint in DeepSpeed's universal format. Tensor values are not read.

    trust_pickle: whether to unpickle content that is neither tensors nor plain values.

    Raises CheckpointError if the checkpoint cannot be read without its model, and CheckpointDamaged if part of the
    checkpoint is missing.
    """
    files = replace(ZeroFolder.open(path, trust_pickle), layers={})
    said, weights, shared = files.model(0), files.weights(0), files.tree(f"{ZERO}/{OPTIMIZER}")
    groups, common = list(shared["param_groups"]), _common_step(path, shared)
    trained, rows = _trained(files, groups), list[ManifestRow]()
    steps, read = dict[str, float](), [f"{ZERO}/{OPTIMIZER}"]
    for tensor in (each for each in trained if each.numel):
        step = common
        for name, held in _states(files, tensor):
            read.append(f"{ZERO}/{tensor.name}/{name}.pt")
            if name == STEP:
                step = number_of(path, held)
            else:
                rows.append(_state_row(files, tensor, read[-1], MASTER if name == MASTERS else name, held))
        if step is not None:
            steps[tensor.name] = step
        weight = weights.get(tensor.name)
        rows.append(cast_from_master(tensor, configured_type(files.config) if weight is None else weight.dtype))
    there = frozen_shapes(said, weights, (each.name for each in trained))
    frozen = [LogicalTensor(name, shape, FROZEN) for name, shape in there.items()]
    for tensor in frozen:
        rows += _frozen(files, tensor, weights.get(tensor.name))
    return Foreign.of(
        path,
        FORMAT,
        [*trained, *frozen],
        rows,
        int(said.get("global_steps", 0)),
        carry_of(path, said, OptimizerFile(0, [], [], groups, shared)),
        {STEP: steps} if steps else {},
        buffers={name: held for name, held in weights.items() if name in files.buffer_names},
        archives=(*files.archives, *((name, None) for name in read)),
    )


def _trained(files: ZeroFolder, groups: list[Mapping[str, Any]]) -> list[LogicalTensor]:
    """Return the trained tensors, in the optimizer's order."""
    found: dict[str, LogicalTensor] = {}
    for part in range(files.parts):
        tables = files.model(part).get("param_shapes")
        if tables is None:
            raise CheckpointError(
                f"{files.path} has no param_shapes of model-parallel rank {part}, which say what was trained; load it "
                "with DeepSpeed, and save it with engine.save"
            )
        for group, table in zip(groups_of(files.path, groups, len(tables)), tables, strict=True):
            for name, shape in table.items():
                found.setdefault(name, LogicalTensor(name, tuple(shape), group))
    return list(found.values())


def _states(files: ZeroFolder, tensor: LogicalTensor) -> Iterator[tuple[str, Any]]:
    """Yield (name, content) of a trained tensor's files. Raises CheckpointDamaged if the master is missing."""
    name = tensor.name
    folder = files.path / ZERO / name
    if not is_component(name) or not (folder / f"{MASTERS}.pt").is_file():
        raise CheckpointDamaged(f"{files.path} trained {name!r} and has no {ZERO}/{name}/{MASTERS}.pt")
    for file in sorted(folder.glob("*.pt")):
        yield file.stem, read_tree(files.path, f"{ZERO}/{name}/{file.name}", files.trust_pickle)


def _state_row(files: ZeroFolder, tensor: LogicalTensor, file: str, kind: str, held: Any) -> ManifestRow:
    """Return the manifest row of one state kind of a trained tensor.

    Raises CheckpointError if the file holds only a part of the tensor.
    """
    advice = "load it into an engine of DeepSpeed's in the layout that wrote it, and save it with engine.save"
    if isinstance(held, Mapping):
        if held.get("ep_is_expert_param") or held.get("vocab_tensor"):
            raise CheckpointError(
                f"{files.path / file} is of experts or of a padded vocabulary, which is not read; {advice}"
            )
        held = held.get("param")
    if not isinstance(held, Stored):
        raise CheckpointDamaged(f"{files.path / file} has no values")
    if files.parts > 1 and held.numel != tensor.numel:
        raise CheckpointError(f"{files.path}: {tensor.name!r} is cut over tensor ranks; {advice}")
    return whole_row(tensor, kind, held)


def _common_step(path: Path, shared: Mapping[str, Any]) -> float | None:
    """Return the step count in the optimizer state that all tensors share; None if there is none, or several."""
    own = shared.get("optimizer_state_dict")
    states = own.get("state", {}).values() if isinstance(own, Mapping) else ()
    found = {number_of(path, state[STEP]) for state in states if STEP in state}
    return found.pop() if len(found) == 1 else None


def _frozen(files: ZeroFolder, tensor: LogicalTensor, stored: Stored | None) -> Iterator[ManifestRow]:
    """Yield a frozen tensor's manifest rows: one row if it is stored whole, otherwise one per rank (stage 3)."""
    if files.parts > 1:
        raise CheckpointError(
            f"{files.path}: {tensor.name!r} is frozen, and may be cut over model-parallel ranks; load it into an "
            "engine of DeepSpeed's, and save it with engine.save"
        )
    if stored is not None and stored.numel == tensor.numel:
        yield from [whole_row(tensor, WEIGHT, stored)] if tensor.numel else ()
        return
    at = 0
    for (_, rank), file in sorted(files.models.items()) if tensor.numel else ():
        held = (files.tree(file).get("frozen_param_fragments") or {}).get(tensor.name)
        if not isinstance(held, Stored):
            raise CheckpointDamaged(f"{files.path}: the part of the frozen {tensor.name!r} of rank {rank} is missing")
        numel = min(held.numel, tensor.numel - at)  # the last part is padded
        if numel > 0:
            yield stored_row(tensor, WEIGHT, held, Extent(at, numel))
            at += numel


# ---- writing ---------------------------------------------------------------------------------------------------------


def to_universal(
    saved: Saved,
    carry: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    path: Path,
    progress: Progress = silent,
) -> Path:
    """Convert one of our checkpoints to DeepSpeed's universal format. Return the new folder, a subfolder of `path`.

    The subfolder is named after the checkpoint's tag, and becomes visible when it is complete.

    carry: the checkpoint's shared extra state, decoded.
    buffers: the buffers of the module.
    progress: called with the number of bytes of each tensor.

    The conversion needs memory for the largest tensor. Raises CheckpointError if DeepSpeed's format cannot represent
    the content or the subfolder exists, and CheckpointDamaged if values are not what was saved.
    """
    tag = saved.path.name
    check_tag(tag)
    _check(saved, carry, buffers)
    with appearing(path / tag, parents=True) as hidden, Reader(saved.path, saved.manifest) as reader:
        _write_states(saved, carry, reader, hidden / ZERO, progress)
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
    tensors = saved.record.logical_tensors()
    experts = [each.name for each in tensors if each.expert]
    if experts:
        raise CheckpointError(
            f"{saved.path}: {experts[0]!r} is of experts, for which DeepSpeed's format needs notes of its own; "
            "convert it to safetensors (--to safetensors)"
        )
    names = [each.name for each in tensors]
    check_names(names, saved.record.kinds)
    twice = buffers.keys() & {*names}
    if twice:
        raise CheckpointError(
            f"{saved.path} has a parameter and a buffer that are both {min(twice)!r}; rename one of them in the "
            "model, and save again"
        )
    check_file_names((each.name for each in tensors if each.trainable), (OPTIMIZER,))
    check_file_names(_moments(saved), (MASTERS, STEP))


def _moments(saved: Saved) -> list[str]:
    return [kind for kind in saved.record.kinds if row_of(kind).is_moment]


def _write_states(saved: Saved, carry: Mapping[str, Any], reader: Reader, folder: Path, progress: Progress) -> None:
    """Write masters, moments and step counts, one folder per tensor, and one file of hyper-parameters."""
    steps = carry.get("scalars", {}).get(STEP, {})
    for number, tensor in enumerate(saved.record.logical_tensors()):
        if not tensor.trainable or not tensor.numel:
            continue
        (folder / tensor.name).mkdir(parents=True)
        for kind in (MASTER, *_moments(saved)):
            if (tensor.name, kind) not in saved.manifest.rows:
                continue
            name = MASTERS if kind == MASTER else kind
            values = proven(reader, tensor, kind)
            torch.save({"param": values, "cat_dim": 0}, folder / tensor.name / f"{name}.pt")
            progress(values.nbytes)
            del values  # before the next one is read
        if str(number) in steps:
            torch.save(torch.tensor(steps[str(number)]), folder / tensor.name / f"{STEP}.pt")
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(_optimizer(carry, steps), folder / OPTIMIZER)


def _optimizer(carry: Mapping[str, Any], steps: Mapping[str, float]) -> dict[str, Any]:
    """Return the optimizer state that all tensors share, in DeepSpeed's format.

    The state appears twice: at the top level for stages 1 and 2, and one level below for stage 3.
    """
    groups = [{**group, "params": []} for group in carry["groups"]]
    state = {0: {STEP: torch.tensor(max(steps.values()))}} if steps else {}
    own = {"state": state, "param_groups": groups}
    return {**own, "optimizer_state_dict": own, "ds_version": version("deepspeed")}


def _write_models(
    saved: Saved,
    carry: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    reader: Reader,
    folder: Path,
    progress: Progress,
) -> None:
    """Write the files of model states: counters and schedule first, with space for the weights, then the weights."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.serialization import skip_data

    tensors = saved.record.logical_tensors()
    said_types = ((each.name, saved.manifest.dtype(each.name, WEIGHT)) for each in tensors)
    types = {name: dtype for name, dtype in said_types if dtype is not None}
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
        "ds_version": version("deepspeed"),
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
            crcs[places[name].offset] = _put(file, places[name].offset, held)
        for each in tensors:
            if each.name in types and each.numel:
                at = places[each.name].offset
                crcs[at] = _put(file, at, proven(reader, each, WEIGHT))
                progress(each.numel * types[each.name].itemsize)
        _note_crcs(file, crcs)
        file.flush()
        os.fsync(file.fileno())


def _note_crcs(file: IO[bytes], crcs: Mapping[int, int]) -> None:
    """Set the CRC32s of zip members whose values were written after `torch.save`.

    crcs: a map from the position of a member's values in the file to their CRC32.
    """
    with zipfile.ZipFile(file, "a") as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        begins = [entry.header_offset for entry in entries]
        for at, crc in crcs.items():
            entries[bisect_right(begins, at) - 1].CRC = crc
        archive.comment = b""  # makes zipfile rewrite its directory


def _put(file: IO[bytes], at: int, values: torch.Tensor) -> int:
    """Write values to a file at byte `at`. Return their CRC32."""
    view = values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    file.seek(at)
    file.write(view)
    return zlib.crc32(view)
