"""Checks of whether a switch is feasible: axes, tensors, number of members, batch and memory."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from ds_dynatrain.adapters.groups.device import HOST, free_bytes
from ds_dynatrain.adapters.model.moe import first_dropping_layer
from ds_dynatrain.adapters.versions import deepspeed_versions as versions
from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes
from ds_dynatrain.data import BatchArithmetic, ColumnArithmetic, LeafArithmetic, nearest_even
from ds_dynatrain.errors import DataError, LayoutError, SwitchRefused, UnsupportedError
from ds_dynatrain.space import Layout, VirtualParameterSpace
from ds_dynatrain.support import axes

Needs = Mapping[tuple[int, str], int]
"""A map from (member, device type) to the bytes that the member allocates there."""


def check_combination(features: axes.Features, target: Layout, processes: int) -> None:
    """Raise SwitchRefused if DeepSpeed cannot train a model with these features in a layout, because of the layout's
    axes or ZeRO stage."""
    found = axes.refusal(features, target, processes)
    if found is not None:
        raise SwitchRefused(found.why, found.instead)


def check_tensors(vps: VirtualParameterSpace, target: Layout) -> None:
    """Raise SwitchRefused if a layout cannot divide the model's tensors along its axes.

    Also raises SwitchRefused for an empty tensor in a ZeRO stage that does not support empty tensors.
    """
    try:
        vps.mesh(target)
    except (LayoutError, UnsupportedError) as error:
        raise SwitchRefused(str(error), "choose other sizes of pipe, expert and tensor") from error
    refusing = versions.present().needs_elements
    for tensor in vps.tensors:
        if target.zero_stage in refusing and not tensor.numel:
            others = ", ".join(str(stage) for stage in range(4) if stage not in refusing)
            raise SwitchRefused(
                f"{target}: parameter {tensor.name} has no elements, and DeepSpeed's stage {target.zero_stage} "
                "cannot hold it",
                f"choose ZeRO stage {others}, or take the parameter out of the model",
            )


def target_layout(present: Layout, layout: Layout | None, changes: Mapping[str, int]) -> Layout:
    """Return the layout that the arguments of `switch` or `plan` describe.

    present: the current layout.
    layout: the layout, if it is given as a whole.
    changes: the axes to change in the current layout otherwise.

    Raises SwitchRefused if the arguments describe no layout.
    """
    if layout is not None and changes:
        raise SwitchRefused(
            f"both {layout} and changes to the present layout ({', '.join(changes)}) were given",
            "give one of the two",
        )
    if layout is None and not changes:
        raise SwitchRefused("no layout was given", "pass Layout(data=..., zero_stage=...) or data=..., zero_stage=...")
    if layout is not None and not isinstance(layout, Layout):
        raise SwitchRefused(f"{layout!r} is no Layout", "pass Layout(data=..., zero_stage=...)")
    try:
        target = present.replace(**changes) if layout is None else layout
    except LayoutError as error:
        raise SwitchRefused(str(error)) from error
    return target


def check_size(target: Layout, processes: int) -> None:
    """Raise SwitchRefused if the job has fewer processes than the layout has ranks."""
    if target.world_size > processes:
        raise SwitchRefused(
            f"{target} needs {target.world_size} members and this launch has {processes} processes",
            f"nearest: {axes.smaller(target, processes)}",
        )


def dealt(sizes: BatchSizes, layout: Layout, has_stages: bool = False) -> BatchArithmetic:
    """Return how a global batch is divided among the ranks of a layout.

    Raises DataError if the layout's shares do not add up to the samples of the batch.

    has_stages: whether the model is a PipelineModule.
    """
    if sizes.in_leaves:
        return LeafArithmetic(sizes.train_batch_size, sizes.micro_batch_size, layout.data, layout.shares)
    kind = ColumnArithmetic if has_stages else BatchArithmetic
    return kind(sizes.train_batch_size, sizes.micro_batch_size, layout.data, layout.shares)


def check_batch(target: Layout, sizes: BatchSizes, module: nn.Module, has_stages: bool = False) -> None:
    """Raise SwitchRefused if dividing the global batch among the ranks of a layout would change the result of training.

    module: the model with all its layers.
    has_stages: whether the model is a PipelineModule.
    """
    size = sizes.train_batch_size
    if sizes.in_leaves:
        _check_leaves(target, sizes)
        return
    if target.data > size:
        raise SwitchRefused(
            f"data={target.data} ranks share a train_batch_size of {size}: {target.data - size} would never have a "
            "sample",
            f"nearest: {axes.smaller(target, target.world_size, size)}",
        )
    try:
        batch = dealt(sizes, target, has_stages)
    except DataError as error:
        raise SwitchRefused(str(error), f"give {target.data} shares that are {size} samples together") from error
    if batch.even():
        return
    cut, way_out = _evener(batch)
    if isinstance(batch, ColumnArithmetic):
        gives = f"gives pipelines of {', '.join(map(str, batch.columns.counts))} micro-batches"
        if target.expert > 1:
            raise SwitchRefused(f"{cut} {gives}, and ranks that share experts exchange tokens in each of them", way_out)
    else:
        gives = "gives micro-batches of different sizes"
    routed = first_dropping_layer(module)
    normed = [name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if routed is not None:
        why = f"experts of {routed!r} drop tokens beyond a capacity that follows from them"
        way_out += ", or drop_tokens=False"
    elif normed:
        why = f"{normed[0]!r} is a BatchNorm: its statistics would weigh samples unequally"
    else:
        return
    raise SwitchRefused(f"{cut} {gives}, and {why}", way_out)


def _check_leaves(target: Layout, sizes: BatchSizes) -> None:
    """Raise SwitchRefused if there are more data ranks than leaves (micro-batches of fixed size) in a global batch."""
    leaves = LeafArithmetic(sizes.train_batch_size, sizes.micro_batch_size, 1).leaves
    if target.data > leaves:
        raise SwitchRefused(
            f"data={target.data} ranks share {leaves} leaves of {sizes.micro_batch_size} samples of a train_batch_size "
            f"of {sizes.train_batch_size}: {target.data - leaves} would never have one",
            f"nearest: {target.replace(data=leaves)}, or make train_micro_batch_size_per_gpu smaller in a new job",
        )


def _evener(batch: BatchArithmetic) -> tuple[str, str]:
    """Return a description of why a batch is divided unevenly, and advice on how to divide it evenly."""
    size, data = batch.train_batch_size, batch.data
    if batch.shares is not None:
        return f"train_batch_size {size} in shares {batch.shares}", "leave shares out, or make them equal"
    nearest = nearest_even(size, batch.micro_batch_limit, data)
    return (
        f"train_batch_size {size} over data={data}",
        f"use a train_batch_size of {nearest}, or a data size that divides {size}",
    )


def available_bytes() -> int:
    """Return the number of bytes that this process can still allocate within the limits of the system, its control
    group and the process itself."""
    found = [_kilobytes(Path("/proc/meminfo"), "MemAvailable")]
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # there is no control group of version 2
        pass
    for kind, key in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append(soft - _kilobytes(Path("/proc/self/status"), key, absent=0))
    return max(0, min(found))


def check_memory(member: int, needs: Needs, nodes: Mapping[int, str]) -> None:
    """Raise SwitchRefused if the members of this node together, or this member on its accelerator, need more memory
    than is free.

    needs: bytes that each member allocates for the switch on each device. Members of a node share its host memory, but
        not their accelerators.
    """
    mine = needs.get((member, HOST.type), 0)
    here = [need for (other, device), need in needs.items() if device == HOST.type and nodes[other] == nodes[member]]
    free = available_bytes()
    if max(sum(here), mine) > free:
        raise SwitchRefused(
            f"the members on node {nodes[member]!r} need {sum(here)} bytes for the new state and staging (member "
            f"{member} {mine}), and {free} are available",
            "choose a layout with more ranks or a higher ZeRO stage, or lower dynatrain.memory_budget_bytes",
        )
    for (other, device), need in needs.items():
        if other == member and device != HOST.type and need > (left := free_bytes()):
            raise SwitchRefused(
                f"member {member} needs {need} bytes on {device} for the new state, with training beside it if the "
                f"switch is late, and {left} are free there",
                "choose a layout with more ranks or a higher ZeRO stage, offload states to the host, or leave late out",
            )


def _kilobytes(file: Path, key: str, absent: int = 1 << 62) -> int:
    """Return the value of a key in a Linux status file, converted to bytes.

    absent: the result if the file does not have the key; the default is so large that no check fails.
    """
    try:
        for line in file.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return absent
