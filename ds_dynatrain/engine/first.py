"""The first layout of a model whose parameters come in one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.incoming import Incoming, fill
from ds_dynatrain.adapters.memory import provide, zeros
from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.space import VirtualParameterSpace, row_of
from ds_dynatrain.transfer import digest

DRAW_SECONDS = 1800.0
"""Longest wait for members that draw a large model's parameters: as long as DeepSpeed waits for a collective."""


def take_in(engine: EngineCore, incoming: Incoming, space: VirtualParameterSpace) -> None:
    """Put the first layout together from parameters that come in one by one; all processes take part."""
    engine.adopt_space(space)
    values = incoming.values(engine.launch, engine.job.job_seed, works=engine.world is not None)
    numbers = {id(parameter): number for number, parameter in enumerate(engine.host.model_map.parameters)}
    buffers: Buffers = {}
    if engine.world is None:
        for _ in values:
            pass  # an idle member gives what it has, and keeps nothing
        _compare_draws(engine, incoming)
        return
    try:
        buffers, drawn = _fill(engine, incoming, values, numbers)
    except ConfigError as error:  # the others would wait
        _compare_draws(engine, incoming, {"failed": str(error)})
        raise
    _compare_draws(engine, incoming, {"values": drawn})
    engine.take_shape(space, engine.layout, engine.rank)
    engine.host.attach_first(engine.layout, engine.world, engine.config_for(engine.layout), buffers)


def _fill(
    engine: EngineCore,
    incoming: Incoming,
    values: Iterator[tuple[nn.Parameter, torch.Tensor]],
    numbers: dict[int, int],
) -> tuple[Buffers, dict[str, int]]:
    """Return the buffers of the first layout, and the digests of what this member drew for itself, by name."""
    drawn: dict[str, int] = {}

    def noted() -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for parameter, value in values:
            if incoming.is_drawn(parameter):
                drawn[engine.deepspeed.param_names[parameter]] = digest(value)
            yield parameter, value

    memory = {kind: made_of for kind, made_of in engine.memory_in(engine.layout).items() if not row_of(kind).is_moment}
    buffers = provide(engine.vps.local(engine.layout, engine.rank), memory, set(), {}, zeros)
    fill(buffers, engine.vps, engine.rank, noted(), numbers)
    return buffers, drawn


def _compare_draws(engine: EngineCore, incoming: Incoming, mine: dict[str, Any] | None = None) -> None:
    """Raise ConfigError on all processes, naming the parameter, unless all working members drew the same values."""
    if not incoming.draws:
        return
    if mine is not None:
        engine.control.post(f"drawn/{engine.control.member}", mine)
    deadline = time.monotonic() + DRAW_SECONDS
    records = engine.control.gather("drawn", engine.members, "drawing the parameters", deadline)
    failed = [record["failed"] for record in records.values() if "failed" in record]
    if failed:
        raise ConfigError(failed[0])
    first = records[engine.members[0]]["values"]
    for member, record in sorted(records.items()):
        differs = [name for name, value in record["values"].items() if value != first[name]]
        if differs:
            raise ConfigError(
                f"{differs[0]!r} was drawn with other values on member {member} than on member {engine.members[0]}; "
                "let its initialization depend on the random generators alone"
            )
