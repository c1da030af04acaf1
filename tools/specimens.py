"""Small checkpoints of every readable format, to be mutated. Two ranks of DeepSpeed's are written by hand, others by
us.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from ds_dynatrain.checkpoint.others.recognize import told_at
from ds_dynatrain.checkpoint.others.torch_files import Archive, opened
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.cli import conversion
from ds_dynatrain.cli.choices import Format

SHAPES = {"a.weight": (5, 7), "a.bias": (3,), "b": (2, 2, 3)}
RANKS, STEP = 2, "step3"
OURS = ("ours fp32", "ours bf16")
COUNTED = {"global_steps": 3, "global_samples": 36, "skipped_steps": 0, "dp_world_size": RANKS}
GROUP = {"lr": 0.5, "betas": (0.9, 0.95), "weight_decay": 0.0}
_DATA = "data/"
"""Start of the names of members that are tensors."""


@dataclass(frozen=True)
class Specimen:
    """A checkpoint, as files by name.

    values: (file, first byte, end) of tensors whose damage must be found.
    """

    name: str
    files: dict[str, bytes]
    values: tuple[tuple[str, int, int], ...]

    @property
    def is_ours(self) -> bool:
        """Whether the checkpoint is ours, so that it is verified, and converted to other formats instead of to ours."""
        return self.name in OURS

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes."""
        return sum(map(len, self.files.values()))


def specimens(folder: Path) -> list[Specimen]:
    """Make all checkpoints in a folder, and return them."""
    torch.manual_seed(1)
    low, full = flat_stage(folder / "stage 2 bf16", 2, "bf16"), flat_stage(folder / "stage 1 fp32", 1, "fp32")
    theirs = [low, full, stage_0(folder / "stage 0 fp32"), stage_3(folder / "stage 3 bf16")]
    for name, source in zip(OURS, (full, low), strict=True):
        _convert(source, folder / name, "universal")
    _convert(folder / OURS[1], folder / "u", "deepspeed-universal")
    _convert(folder / OURS[0], folder / "DCP", "dcp")
    _convert(folder / OURS[1], folder / "weights.safetensors", "safetensors")
    (folder / "safetensors").mkdir()
    (folder / "weights.safetensors").rename(folder / "safetensors" / "model.safetensors")
    state = {"model": {name: torch.randn(shape) for name, shape in SHAPES.items()}}
    save(state, checkpoint_id=folder / "DCP of torch", no_dist=True)
    (folder / "u" / STEP).rename(folder / "universal")
    others = [folder / name for name in ("universal", "DCP", "DCP of torch", "safetensors")]
    found = [_specimen(name, folder / name / STEP) for name in OURS]
    return found + [_specimen(path.name, path) for path in (*theirs, *others)]


@dataclass(frozen=True)
class Member:
    """A member of a zip of torch.save.

    end: the position after the member's last byte.
    """

    file: str
    name: str
    first: int
    end: int


def members_of(folder: Path, archive: Archive) -> list[Member]:
    """Return the members of a file of torch.save, as torch finds them."""
    name, part = archive
    begin = part[0] if part else 0
    with opened(folder, archive) as file:
        reader: Any = torch._C.PyTorchFileReader(file)
        records = [(each, begin + reader.get_record_offset(each)) for each in reader.get_all_records()]
        return [Member(name, each, first, first + reader.get_record_size(each)) for each, first in records]


def _convert(path: Path, out: Path, to: str) -> None:
    list(conversion.convert(path, out, Format(to), None, False))


def _specimen(name: str, path: Path) -> Specimen:
    files = {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}
    if name in OURS:
        rows = [row for row in Saved.open(path).manifest if row.file]
        return Specimen(name, files, tuple((row.file, row.offset, row.offset + row.nbytes) for row in rows))
    parts = [
        part for archive in told_at(path).archives for part in members_of(path, archive) if part.name.startswith(_DATA)
    ]
    return Specimen(name, files, tuple((part.file, part.first, part.end) for part in parts))


# ---- DeepSpeed's -----------------------------------------------------------------------------------------------------


def _model(dtype: str, **more: Any) -> dict[str, Any]:
    """Return model states, which include a frozen weight and a buffer."""
    frozen = torch.arange(4.0).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    return {
        "module": {"frozen": frozen, "seen": torch.tensor([9, 8, 7])},
        "buffer_names": ["seen"],
        "param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
        "frozen_param_shapes": {"frozen": frozen.shape},
        "frozen_param_fragments": {"frozen": frozen[:2].clone()},
        "shared_params": {},
        "lr_scheduler": {"last": 3, "base_lrs": [0.5]},
        "ds_config": {dtype: {"enabled": dtype == "bf16"}},
        **COUNTED,
        **more,
    }


def _base(*moments: torch.Tensor) -> dict[str, Any]:
    names = ("exp_avg", "exp_avg_sq")
    state = {"step": torch.tensor(3.0), **dict(zip(names, moments, strict=True))}
    return {"state": {0: state}, "param_groups": [{**GROUP, "params": [0]}]}


def flat_stage(folder: Path, stage: int, dtype: str) -> Path:
    """Write a checkpoint of ZeRO stage 1 or 2, in which each rank has an equal part of a flat buffer."""
    folder.mkdir()
    torch.save(_model(dtype), folder / "mp_rank_00_model_states.pt")
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    part = -(-numel // (2 * RANKS)) * 2  # the final padding is not saved
    for rank in range(RANKS):
        master, *moments = (torch.randn(min(part, numel - rank * part)) for _ in range(3))
        own = {"zero_stage": stage, "base_optimizer_state": _base(*moments), "loss_scaler": None}
        said = {"optimizer_state_dict": {**own, "single_partition_of_fp32_groups": [master]}, "ds_config": {}}
        prefix = "bf16_" if dtype == "bf16" else ""
        torch.save(said, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def stage_0(folder: Path) -> Path:
    """Write a checkpoint without ZeRO, with torch's own optimizer."""
    folder.mkdir()
    module = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    states = [{"step": torch.tensor(3.0), "exp_avg": torch.randn(shape)} for shape in SHAPES.values()]
    optimizer = {"state": dict(enumerate(states)), "param_groups": [{**GROUP, "params": [0, 1, 2]}]}
    said: dict[str, Any] = {
        "module": module,
        "optimizer": optimizer,
        "buffer_names": [],
        "lr_scheduler": None,
        **COUNTED,
    }
    torch.save(said, folder / "mp_rank_00_model_states.pt")
    return folder


def stage_3(folder: Path) -> Path:
    """Write a checkpoint of ZeRO stage 3, in which each rank has a part of each tensor."""
    folder.mkdir()
    numel = sum(-(-torch.Size(shape).numel() // RANKS) for shape in SHAPES.values())
    for rank in range(RANKS):
        torch.save(_model("bf16"), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        master, *moments = (torch.randn(numel) for _ in range(3))
        own = {"zero_stage": 3, "optimizer_state_dict": _base(*moments), "fp32_flat_groups": [master]}
        said = {"optimizer_state_dict": own, "ds_config": {}}
        torch.save(said, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder
