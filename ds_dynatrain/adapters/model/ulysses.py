"""Ulysses sequence parallelism: layers that exchange heads for sequence parts, and the state of DeepSpeed's engine for
it.

Each sequence rank has its part of the same samples. ZeRO partitions and reduces over data x sequence, so sequence ranks
hold shards in the same way as data ranks. An attention layer exchanges over the group in its attribute `spg`; in a
group of one rank the exchange is a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as td
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.space import Layout
from ds_dynatrain.support import usage

GETTERS = ("get_sequence_parallel_group", "get_sequence_parallel_rank", "get_sequence_parallel_world_size")
"""Methods that an `mpu` for sequence parallelism must have."""


def spread_layers(module: nn.Module) -> Iterator[tuple[str, DistributedAttention]]:
    """Yield (name, layer) for each layer that exchanges heads for sequence parts, even if it is no registered
    submodule.
    """
    for name, part in module.named_modules():
        if isinstance(part, DistributedAttention):
            yield name, part
        for key, held in vars(part).items():
            if isinstance(held, DistributedAttention):
                yield f"{name}.{key}" if name else key, held


def refuse_sequence(module: nn.Module, mpu: Any) -> None:
    """Raise UnsupportedError if the sequence size cannot change, or if an `mpu` has any other axis."""
    if mpu is not None:
        missing = [name for name in GETTERS if not hasattr(mpu, name)]
        if missing:
            raise usage("mpu").error(f"mpu without {missing[0]}")
        other = [axis for axis in ("tensor_model", "pipeline_model") if _size(mpu, axis) > 1]
        if other:
            raise usage("mpu").error(f"mpu with get_{other[0]}_parallel_world_size() = {_size(mpu, other[0])}")
    for name, part in module.named_modules():
        if type(part).__module__ == "deepspeed.sequence.fpdt_layer":
            raise usage("FPDT").error(f"{name!r} is a {type(part).__name__}")
    utilities: Any = sys.modules.get("transformers.modeling_utils")
    for function in dict(getattr(utilities, "ALL_ATTENTION_FUNCTIONS", None) or {}).values():
        if getattr(function, "__module__", "") == "deepspeed.runtime.sequence_parallel.ulysses_sp":
            raise usage("UlyssesSPAttentionHF").error()


def first_size(mpu: Any, wanted: int | None) -> int:
    """Return the initial sequence size: the configured one, otherwise that of an initialized `mpu`, otherwise 1."""
    if wanted is not None:
        return wanted
    return _size(mpu, "sequence") if mpu is not None and td.is_initialized() else 1


def enter(engine: Any, world: World, layout: Layout) -> None:
    """Set in the engine what DeepSpeed's constructor sets for the sequence axis, and give the layers their group."""
    for _, layer in spread_layers(engine.module):
        layer.spg = world.group("sequence")
    engine.sequence_parallel_size = layout.sequence
    engine.__dict__.pop("seq_parallel_group", None)
    if layout.sequence > 1:
        engine.seq_parallel_group = world.group("sequence")
        engine.communication_data_type = engine._config.seq_parallel_communication_data_type


def leave(engine: Any) -> None:
    """Release the process group of the sequence axis, on a member that no longer holds a rank."""
    for _, layer in spread_layers(engine.module):
        layer.spg = None
    engine.__dict__.pop("seq_parallel_group", None)


def _size(mpu: Any, axis: str) -> int:
    """Return the size of an axis; 1 if the `mpu` does not know the axis, or was not set up for it."""
    try:
        return int(getattr(mpu, f"get_{axis}_parallel_world_size")())
    except (AttributeError, AssertionError, RuntimeError, ValueError):
        return 1
