"""The first layout of a launch, and the first state of a model whose parameters arrive one by one.

The layout is taken from the `dynatrain` block or derived from DeepSpeed's configuration.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.deepspeed.support_checks import refuse_module
from ds_dynatrain.adapters.model.shaper import Shaper
from ds_dynatrain.adapters.model.shaping import start_size
from ds_dynatrain.adapters.model.ulysses import first_size
from ds_dynatrain.adapters.versions.deepspeed_versions import present
from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes
from ds_dynatrain.adapters.zero.incoming import Incoming, fill
from ds_dynatrain.adapters.zero.state import Buffers, provide, zeros
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.data import LeafArithmetic
from ds_dynatrain.errors import ConfigError, LayoutError, SwitchRefused, UnsupportedError
from ds_dynatrain.reshard import feasible
from ds_dynatrain.reshard.context import Job
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.space import Layout, VirtualParameterSpace, row_of, shared_stages
from ds_dynatrain.support import Target, refuse_layout, usage
from ds_dynatrain.support.axes import EXPERTS, NATIVE_EXPERTS
from ds_dynatrain.transfer import digest

DRAW_SECONDS = 1800.0
"""Longest wait for members that initialize a large model's parameters. It equals DeepSpeed's timeout for
collectives."""


def first_layout(
    model: nn.Module,
    own: dict[str, Any],
    settings: DynatrainConfig,
    processes: int,
    mpu: Any,
    pipe: int,
    grows: bool,
    in_leaves: bool,
) -> Layout:
    """Return the layout in which a launch with this number of processes begins.

    model: the model, with all its layers if it was built in stages.
    own: DeepSpeed's part of the configuration.
    settings: the `dynatrain` block.
    pipe: the number of pipeline stages.
    grows: whether members can join and leave, so that any number of processes may start.
    in_leaves: whether batches consist of leaves (micro-batches of fixed size). Ranks without a leaf are then idle.

    Raises ConfigError if there are too few processes, or if the axes do not divide their number.
    """
    block = settings.layout
    named = {} if block is None else {axis: getattr(block, axis) for axis in block.model_fields_set}
    sequence = first_size(mpu, own.get("sequence_parallel_size"))
    expert, tensor = (start_size(axis, model, own, named.get(axis)) for axis in ("expert", "tensor"))
    if block is None:
        wide = pipe * sequence * tensor
        if processes % wide:
            raise ConfigError(
                f"pipe={pipe} x sequence={sequence} x tensor={tensor} does not divide the {processes} processes of "
                f"this launch; start a multiple of {wide} processes, or choose smaller sizes"
            )
        stage, data = (own.get("zero_optimization") or {}).get("stage", 0), processes // wide
        if grows and in_leaves:
            sizes = BatchSizes.of(own, data, in_leaves=True)
            data = min(data, LeafArithmetic(sizes.train_batch_size, sizes.micro_batch_size, 1).leaves)
        return Layout(data=data, pipe=pipe, sequence=sequence, expert=expert, tensor=tensor, zero_stage=stage)
    axes = {"pipe": pipe, "expert": expert, "tensor": tensor}
    given = {**block.model_dump(), **axes, "zero_stage": block.zero_stage or 0}
    try:
        layout = Layout.from_dict(given if "sequence" in named else {**given, "sequence": sequence})
    except LayoutError as error:
        raise ConfigError(f"dynatrain.layout: {error}") from error
    if layout.world_size > processes:
        raise ConfigError(
            f"dynatrain.layout ({layout}) needs {layout.world_size} processes and this launch has {processes}; "
            "start more, or make it smaller"
        )
    return layout


def check_start(layout: Layout, model: nn.Module, shaper: Shaper, job: Job, processes: int) -> None:
    """Raise ConfigError if the job cannot start in this layout: the batch cannot be divided for this model, or a
    feature of the job is not possible in the layout."""
    try:
        feasible.check_combination(job.features, layout, processes)
        feasible.check_batch(layout, job.batch_sizes, shaper.whole(model), job.has_stages)
        for extension in job.extensions:
            extension.check_layout(layout, job.batch_sizes, job.has_stages)
        refuse_module(model, layout, job.user_config)
        refuse_layout(Target(job.user_config, layout))
        others = {
            "a pipeline": job.has_stages,
            "experts": not job.features.isdisjoint((EXPERTS, NATIVE_EXPERTS)),
            "a tensor axis": layout.tensor > 1,
            "DeepSpeed before 0.19.8": "zero_optimization.round_robin_gradients" in present().refused,
        }
        for name in others if job.settings.owners == "nearest" else ():  # this setting changes DeepSpeed's order
            if others[name]:
                raise usage("an order of tensors by owners").refused(f'"owners": "nearest" with {name}')
    except SwitchRefused as refusal:
        raise ConfigError(str(refusal)) from refusal


def check_axes(shaper: Shaper, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the sets of pipeline stages that share a tensor. Raises ConfigError if the layout cannot divide the
    model."""
    try:
        return shared_stages(shaper.cuts(layout).values())
    except (LayoutError, UnsupportedError) as error:
        raise ConfigError(f"dynatrain.layout: {error}") from error


# ---- parameters that arrive one by one -------------------------------------------------------------------------------


def take_in(engine: EngineCore, incoming: Incoming, space: VirtualParameterSpace) -> None:
    """Build the state of the first layout from parameters that arrive one by one. All processes take part.

    incoming: yields the parameters and their values.
    """
    engine.adopt_space(space)
    values = incoming.values(engine.job.job_seed, works=engine.world is not None)
    numbers = {id(parameter): number for number, parameter in enumerate(engine.host.model_map.parameters)}
    buffers: Buffers = {}
    if engine.world is None:
        for _ in values:
            pass  # iterating sends the values of this idle member, which keeps none
        _compare_draws(engine, incoming)
        return
    try:
        buffers, drawn = _fill(engine, incoming, values, numbers)
    except ConfigError as error:  # post it, because the others wait for this member
        _compare_draws(engine, incoming, {"failed": str(error)})
        raise
    _compare_draws(engine, incoming, {"values": drawn})
    engine.host.reshape(engine.layout, engine.rank, space.local(engine.layout, engine.rank).tensors)
    engine.host.attach_first(engine.layout, engine.world, engine.config_for(engine.layout), buffers)


def _fill(
    engine: EngineCore,
    incoming: Incoming,
    values: Iterator[tuple[nn.Parameter, torch.Tensor]],
    numbers: dict[int, int],
) -> tuple[Buffers, dict[str, int]]:
    """Fill the buffers of the first layout with parameters that arrive one by one. Return the buffers, and the digest
    of each parameter that this member initialized from random generators."""
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
    """Check that all working members have initialized parameters from random generators with the same values.

    Raises ConfigError on all processes if values differ or a member has failed. The error names a parameter.
    """
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
