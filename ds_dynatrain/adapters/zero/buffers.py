"""The local buffers that a layout needs: newly allocated, or kept from the current layout."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from ds_dynatrain.adapters.groups.device import HOST, is_accelerated, start_thread
from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.adapters.zero.state_memory import Memory
from ds_dynatrain.space import (
    MASTER,
    WEIGHT,
    BufferId,
    Layout,
    LocalSpace,
    Pieces,
    VirtualParameterSpace,
)

SLACK = 2048
"""Spare elements of a flat weight buffer, so that the padding of another world size fits into the same memory."""

Allocate = Callable[[int, Memory], torch.Tensor]
"""Function (number of elements, their element type and memory) -> a flat tensor."""


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
    for kind in vps.present_kinds(target):
        if kind not in present:
            continue
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
    if apart:  # slices of one tensor: all of them or none
        kept = {(kind, name) for kind, name in kept if kind not in apart or name.place != "subgroup"}
    return kept - _masters_apart(target, kept, live) if is_one_memory(memory, target) else kept


def _by_buffer(pieces: Pieces) -> dict[BufferId, bytes]:
    """Return a map from each buffer to its runs and their offsets, as bytes, so that two layouts can be compared."""
    columns = np.stack([pieces.start, pieces.stop, pieces.offset], axis=1)
    found = {}
    for index in np.unique(pieces.buffer).tolist():
        found[pieces.buffers[index]] = columns[pieces.buffer == index].tobytes()
    return found


def _masters_apart(target: Layout, kept: set[tuple[str, BufferId]], live: Buffers) -> set[tuple[str, BufferId]]:
    """Return the kept weights and masters that lie in separate memory although `provide` would make them share memory.

    DeepSpeed's own constructor of stage 3 puts them into separate memory.
    """
    pairs = [(live.get((WEIGHT, name)), live.get((MASTER, name))) for _, name in kept]
    apart = [
        weight is not None
        and master is not None
        and weight.dtype == master.dtype
        and weight.data_ptr() != master.data_ptr()
        for weight, master in pairs
    ]
    if not any(apart):
        return set()
    return {key for key in kept if key[0] in (WEIGHT, MASTER) and (MASTER, key[1]) in live}


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
    allocate: function (number of elements, memory) -> a flat tensor.

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
