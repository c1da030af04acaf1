"""State of a rank: its flat buffers, their element types and memory, and optimizers' scalars.

On a CPU there is one memory. With an accelerator there are two: state is on the device, except for state that ZeRO
offloads, which lies where DeepSpeed's constructors put it (0.19.8, `stage_1_and_2.py`, `stage3.py`). The buffers that a
layout needs are newly allocated, or kept from the current layout.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from ds_dynatrain.adapters.groups.device import HOST, compute_device, is_accelerated, start_thread
from ds_dynatrain.space import MASTER, WEIGHT, BufferId, Layout, LocalSpace, Pieces, VirtualParameterSpace, row_of
from ds_dynatrain.space.zero import group_size

Buffers = dict[tuple[str, BufferId], torch.Tensor]
"""A map from (state kind, buffer) to the flat local tensor of the buffer."""


class Found(NamedTuple):
    """One row of a census, which records where elements of a tensor lie in memory.

    kind: the state kind.
    tensor: the number of the tensor.
    start: the row-major index of the first element in the tensor.
    numel: the number of elements.
    address: the address of the first element.
    """

    kind: str
    tensor: int
    start: int
    numel: int
    address: int


@dataclass(frozen=True)
class Scalars:
    """Optimizer scalars, keyed by name and then by tensor number: {"step": {0: 12.0, ...}}.

    Empty before the first step.
    """

    values: dict[str, dict[int, float]] = field(default_factory=dict)

    def of(self, tensor: int) -> dict[str, float]:
        """Return the scalars of one tensor, keyed by name."""
        return {name: table[tensor] for name, table in self.values.items() if tensor in table}


@dataclass(frozen=True)
class ElementTypes:
    """Element type of each state kind; the same in every layout.

    weight: the type of the parameters.
    gradient: the type of accumulated gradients, and of the last gradients that ZeRO-3 keeps.
    master: the type of the masters, and of moments that are not listed in `moments`.
    moments: a map from the names of moments to their types.
    """

    weight: torch.dtype
    gradient: torch.dtype
    master: torch.dtype = torch.float32
    moments: Mapping[str, torch.dtype] = field(default_factory=dict)

    def of(self, kind: str) -> torch.dtype:
        """Return the element type of one kind."""
        of_job: torch.dtype = getattr(self, row_of(kind).element)
        return self.moments.get(kind, of_job)


class MemoryPlace(NamedTuple):
    """A device, and the kind of its memory.

    pinned: whether the memory is page-locked host memory, which an accelerator can access directly.
    """

    device: torch.device
    pinned: bool = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in this memory. A tensor may be pinned even if that is not required."""
        return tensor.device == self.device and (not self.pinned or is_pinned(tensor))

    def __str__(self) -> str:
        return f"{'pinned memory of ' if self.pinned else ''}{self.device}"


HERE = MemoryPlace(HOST)
"""Host memory that is not pinned. Its pages are allocated when they are first touched."""


@dataclass(frozen=True)
class Memory:
    """Element type and place of the buffers of a state kind."""

    dtype: torch.dtype
    place: MemoryPlace = HERE


def place_of(config: Any, kind: str, zero_stage: int) -> MemoryPlace:
    """Return the memory in which DeepSpeed keeps a state kind under a ZeRO stage.

    config: DeepSpeed's parsed configuration.

    State is on the device unless `offload_optimizer` or `offload_param` moves it to the host. It is pinned there if
    these settings say so, with three exceptions: moments, which the CPU optimizer allocates itself, and stage 3's
    masters are never pinned; stage 3's offloaded weights are always pinned.
    """
    device, is_weight = compute_device(), kind == WEIGHT
    block = config.zero_config.offload_param if is_weight else config.zero_config.offload_optimizer
    is_on_device = block is None or str(getattr(block.device, "value", block.device)) == "none"
    if device == HOST or is_on_device or zero_stage == 0 or (is_weight and zero_stage < 3):
        return MemoryPlace(device)
    return MemoryPlace(HOST, pinned=is_weight or (bool(block.pin_memory) and zero_stage in row_of(kind).pinned_in))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in pinned memory, from and to which the accelerator copies by itself."""
    return bool(get_accelerator().is_pinned(tensor))


SLACK = 2048
"""Spare elements of a flat weight buffer, so that the padding of another world size fits into the same memory."""

Allocate = Callable[[int, Memory], torch.Tensor]
"""Function (number of elements, their element type and memory) that returns a flat tensor."""


def reusable(
    vps: VirtualParameterSpace,
    rank: int | None,
    target: Layout,
    target_rank: int,
    live: Buffers,
    memory: Mapping[str, Memory],
) -> set[tuple[str, BufferId]]:
    """Return the existing buffers that the target layout can keep.

    A buffer can be kept if it is large enough, lies in the memory that the target requires, and has every required
    element at the same offset.
    """
    if rank is None:
        return set()
    sizes, present = vps.local(target, target_rank).sizes(), vps.present_kinds()
    kept, apart = set[tuple[str, BufferId]](), set[str]()
    for kind in {*vps.present_kinds(target)}.intersection(present):
        have = _by_buffer(vps.holding(vps.layout, rank, kind))
        want = _by_buffer(vps.holding(target, target_rank, kind))
        for (wanted, name), size in sizes.items():
            if wanted != kind:
                continue
            held = live.get((kind, name))
            if held is not None and memory[kind].place.holds(held) and have.get(name) == want.get(name):
                bytes_left = held.untyped_storage().nbytes() - held.storage_offset() * held.element_size()
                if bytes_left >= size * held.element_size():
                    kept.add((kind, name))
            if name.place == "subgroup" and (kind, name) not in kept:
                apart.add(kind)
    if apart:  # slices of one tensor are kept all or none
        kept = {(kind, name) for kind, name in kept if kind not in apart or name.place != "subgroup"}
    if is_one_memory(memory, target):  # stage 3's own constructor separates weights and masters
        names = {name for _, name in kept if {(WEIGHT, name), (MASTER, name)} <= live.keys()}
        if any(live[WEIGHT, name].data_ptr() != live[MASTER, name].data_ptr() for name in names):
            kept = {(kind, name) for kind, name in kept if (MASTER, name) not in live or kind not in (WEIGHT, MASTER)}
    return kept


def _by_buffer(pieces: Pieces) -> dict[BufferId, bytes]:
    """Return the runs and offsets in each buffer, as bytes, so that two layouts can be compared."""
    columns = np.stack([pieces.start, pieces.stop, pieces.offset], axis=1)
    found = {}
    for index in np.unique(pieces.buffer).tolist():
        found[pieces.buffers[index]] = columns[pieces.buffer == index].tobytes()
    return found


def provide(
    local: LocalSpace,
    memory: Mapping[str, Memory],
    keep: set[tuple[str, BufferId]],
    live: Buffers,
    allocate: Allocate,
) -> Buffers:
    """Return every buffer of a rank. Kept buffers stay in place; the others are zeroed memory from `allocate`.

    memory: a map from each state kind to its element type and memory.
    keep: buffers to keep. The sub-group buffers of a kind, which are slices of one tensor, are either all kept or none.
    live: the current buffers.
    allocate: function (number of elements, memory) that returns a flat tensor.

    Weight and master share memory at ZeRO stages 0 and 3 if they have the same element type (fp32) and device, as in
    DeepSpeed.
    """
    one_memory, sizes = is_one_memory(memory, local.layout), local.sizes()
    buffers: Buffers = {}
    for kind, made_of in memory.items():
        if kind == MASTER and one_memory:
            continue
        wanted = [key for key in sizes if key[0] == kind]
        slices = [key for key in wanted if key[1].place == "subgroup" and key not in keep]
        if slices:
            parts = [sizes[key] for key in slices]
            buffers.update(zip(slices, allocate(sum(parts), made_of).split(parts), strict=True))
        for key in wanted:
            if key in keep:
                buffers[key] = live[key].as_strided((sizes[key],), (1,), live[key].storage_offset())
            elif key not in buffers:
                slack = SLACK if key[1].place == "group" and kind == WEIGHT else 0
                buffers[key] = allocate(sizes[key] + slack, made_of)[: sizes[key]]
    if one_memory:
        buffers.update({(MASTER, name): buffers[WEIGHT, name] for kind, name in sizes if kind == MASTER})
    return buffers


def is_one_memory(memory: Mapping[str, Memory], layout: Layout) -> bool:
    """Return whether weights and masters share memory."""
    return memory[WEIGHT] == memory.get(MASTER) and layout.zero_stage in (0, 3)


def zeros(numel: int, memory: Memory) -> torch.Tensor:
    """Allocate zeroed memory for `provide`. Unless it is pinned, host memory is not touched before its first use."""
    held = torch.zeros(numel, dtype=memory.dtype, device=memory.place.device)
    return get_accelerator().pin_memory(held) if memory.place.pinned else held


def bucket_bytes(engine: Any, zero_stage: int) -> int:
    """Return the number of bytes that ZeRO-3's constructor allocates on an accelerator for one gradient reduction.

    Returns 0 on a CPU, where the pages of this memory are allocated only when a backward pass touches them.
    """
    if zero_stage != 3 or not is_accelerated() or not engine.zero_contiguous_gradients():
        return 0
    return int(engine.zero_reduce_bucket_size()) * int(engine.communication_data_type.itemsize)


class Untouched:
    """An allocator for `provide` that uses no physical memory.

    On the host, its tensors lie in pages that are never touched, and that no limit on this process's own memory counts.
    A device has no such pages, so all tensors on a device share the same memory.
    """

    def __init__(self) -> None:
        self._shared = torch.empty(0, dtype=torch.uint8)

    def __call__(self, numel: int, memory: Memory) -> torch.Tensor:
        """Return a flat tensor that must not be written to."""
        device, nbytes = memory.place.device, numel * memory.dtype.itemsize
        if not numel:
            return torch.empty(0, dtype=memory.dtype, device=device)
        if device == HOST:
            return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=memory.dtype)
        if self._shared.numel() < nbytes:
            self._shared = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._shared[:nbytes].view(memory.dtype)


def release(buffers: Buffers) -> threading.Thread:
    """Free memory in a thread, because unmapping takes time. `buffers` is emptied at once."""
    old = dict(buffers)
    buffers.clear()
    return start_thread(old.clear, "dynatrain-release")


def working_bytes(local: LocalSpace, weight: torch.dtype, accumulates: bool) -> int:
    """Return the largest number of bytes that offload takes on a rank in addition to the state.

    weight: element type of the weights.
    accumulates: whether a step has several micro-batches.

    Stages 1 and 2 take a copy of the rank's part of the weights, two buffers as large as the largest tensor and, if
    gradients are accumulated, the whole gradient of each parameter that overlaps the part.
    """
    if local.layout.zero_stage not in (1, 2):
        return 0
    numels = local.line.numels[: local.line.trainable_count]
    part, largest = int(numels.sum()) // group_size(local.layout), int(numels.max(initial=0))
    groups = len({tensor.group for tensor in local.tensors if tensor.trainable})
    window = min(int(numels.sum()), part + 2 * groups * largest) if accumulates else 0
    return (part + 2 * largest + window) * weight.itemsize
