"""What a live engine of DeepSpeed's must hold if the cuts and the facts in `expert_groups` are right; bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_dynatrain.space import AxisCuts

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """A rank of a world with `size` as its expert size."""

    rank: int
    ranks: int
    size: int

    @property
    def index(self) -> int:
        """On the expert axis."""
        return self.rank % self.size

    def group(self, expert: bool) -> tuple[int, int]:
        """(rank, ranks) of the group over which ZeRO deals a tensor."""
        return (self.rank // self.size, self.ranks // self.size) if expert else (self.rank, self.ranks)


def held_here(values: Tensors, cuts: Mapping[str, AxisCuts], index: int, tensor: int = 0) -> dict[str, torch.Tensor]:
    """The local tensor of each logical one that an expert index, at a place on the tensor axis, has something of."""
    found = {
        name: _local(whole, cuts[name], index, tensor) if name in cuts else whole for name, whole in values.items()
    }
    return {name: held for name, held in found.items() if held.numel()}


def _local(whole: torch.Tensor, cuts: AxisCuts, index: int, tensor: int) -> torch.Tensor:
    shard = cuts.shard(tuple(whole.shape), index, tensor)
    local = torch.full(shard.shape, torch.nan)
    for piece in shard.pieces:
        box = tuple(slice(low, high) for low, high in zip(piece.box.start, piece.box.stop, strict=True))
        local.as_strided(piece.box.shape, piece.strides, piece.offset).copy_(whole[box])
    return local


def check_weights(engine: Any, names: Mapping[str, str], expected: Tensors) -> None:
    """Every parameter is the local tensor of its name, and there is no other."""
    found = {names[name]: held for name, held in engine.module.named_parameters()}
    assert list(found) == list(expected)
    for name, held in found.items():
        assert same(held.data, expected[name]), name


def check_flat_groups(engine: Any, groups: Sequence[Sequence[str]], expected: Tensors, place: Place) -> None:
    """Stages 1 and 2: which tensors lie in which group, how long it is, what of it is this rank's master."""
    zero = engine.optimizer
    flats, masters = _flat_groups(zero)
    assert len(flats) == len(groups) == len(masters)
    for number, (names, whole, master) in enumerate(zip(groups, flats, masters, strict=True)):
        rank, ranks = place.group(_is_expert(names))
        dense = torch.cat([expected[name].flatten() for name in names])
        step = 2 * ranks
        length = -(-dense.numel() // step) * step
        assert whole.numel() == length, (number, whole.numel(), length)
        padded = torch.cat([dense, torch.zeros(length - dense.numel())])
        assert same(whole, padded), number
        part = length // ranks
        assert same(master.detach().to(whole.dtype), padded[rank * part : (rank + 1) * part]), number


def check_parts(engine: Any, subgroups: Sequence[Sequence[str]], expected: Tensors, place: Place) -> None:
    """Stage 3: which tensors are in which sub-group, and what of each is this rank's."""
    zero = engine.optimizer
    found = [[engine.param_names[held] for held in group] for group in zero.fp16_groups]
    assert found == [list(group) for group in subgroups]
    for names, parameters, weights, masters in zip(
        subgroups, zero.fp16_groups, zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True
    ):
        rank, ranks = place.group(_is_expert(names))
        position = 0
        for name, held in zip(names, parameters, strict=True):
            whole = expected[name].flatten()
            width = -(-whole.numel() // ranks)
            mine = whole[rank * width : (rank + 1) * width]
            assert held.ds_tensor.ds_numel == held.ds_tensor.numel() == width, name
            assert (held.ds_zero_partition_rank, held.ds_zero_partition_world_size) == (rank, ranks)
            assert tuple(held.ds_shape) == tuple(expected[name].shape)
            for flat in (weights, masters.detach().to(weights.dtype)):
                assert same(flat[position : position + len(mine)], mine), name
            position += width
        assert weights.numel() == masters.numel() == position


def _flat_groups(zero: Any) -> tuple[Any, Any]:
    if hasattr(zero, "bf16_groups_flat"):
        return zero.bf16_groups_flat, zero.fp32_groups_flat_partition
    return zero.bit16_groups_flat, zero.single_partition_of_fp32_groups


def _is_expert(names: Sequence[str]) -> bool:
    (kind,) = {"experts." in name and ".shared_" not in name for name in names}
    return kind


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit-equal, once `other` has the element type of `one`."""
    return one.shape == other.shape and torch.equal(one, other.to(one.dtype))


def modules_like(one: torch.nn.Module, other: torch.nn.Module) -> Iterator[str]:
    """In what two module trees differ, values of tensors apart."""
    mine, theirs = dict(one.named_modules()), dict(other.named_modules())
    if list(mine) != list(theirs):
        yield f"modules {set(mine) ^ set(theirs)}"
        return
    for name, part in mine.items():
        if type(part) is not type(theirs[name]):
            yield f"{name}: {type(part)} and {type(theirs[name])}"
        yield from (f"{name}.{found}" for found in _differences(_plain(vars(part)), _plain(vars(theirs[name]))))
    for (name, held), (twin, like) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        facts = [(key, p.shape, p.dtype, p.device, p.requires_grad) for key, p in ((name, held), (twin, like))]
        if facts[0] != facts[1]:
            yield f"{facts}"
        yield from (f"{name}: {found}" for found in _differences(_plain(vars(held)), _plain(vars(like))))
    for (name, buffer), (twin, like) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        if name != twin or not torch.equal(buffer, like):
            yield f"buffer {name} and {twin}"


def _differences(one: Mapping[str, object], other: Mapping[str, object]) -> Iterator[str]:
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            yield f"{key} is {one.get(key)} and {other.get(key)}"


def _plain(attributes: Mapping[str, object]) -> dict[str, object]:
    """Attributes that are numbers, names and tables of them."""
    kinds = (int, float, str, bool, tuple, list, dict, type(None))
    kept = {key: value for key, value in attributes.items() if isinstance(value, kinds)}
    return {key: value for key, value in kept.items() if key not in LEFT_OUT and "_hooks" not in key}


LEFT_OUT = ("_modules", "_parameters", "_buffers", "deepep_scope", "config")
"""What is compared elsewhere, or counts the conversions of a process."""
