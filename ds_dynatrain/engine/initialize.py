"""`initialize`: DeepSpeed's call with the same arguments and the same four results, and an engine that can switch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from ds_dynatrain.adapters.incoming import Incoming
from ds_dynatrain.adapters.kinds import features_of
from ds_dynatrain.adapters.meta import ParamInit
from ds_dynatrain.adapters.pipeline import is_pipeline, refuse_stage_of_another
from ds_dynatrain.adapters.settings import BatchSizes
from ds_dynatrain.adapters.shaping import first_owners, shaper_of
from ds_dynatrain.adapters.staged import put_together, start_stages
from ds_dynatrain.adapters.start import import_what_is_lazy, start_without_compiler, telling_of_locks
from ds_dynatrain.adapters.support import refuse_unsupported
from ds_dynatrain.adapters.template import ModelFactory
from ds_dynatrain.config import Config, DynatrainConfig, split_config
from ds_dynatrain.elastic.environment import WorkerPlace, worker_place
from ds_dynatrain.engine.checkpoints.resume import resume
from ds_dynatrain.engine.construction import Construction
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.engine import DynatrainEngine
from ds_dynatrain.engine.first_layout import first_layout
from ds_dynatrain.engine.forward import OptimizerForwarder
from ds_dynatrain.engine.introduction import introduce, lists_of, of_running_job
from ds_dynatrain.engine.job import Job
from ds_dynatrain.engine.members.description import described
from ds_dynatrain.engine.members.early import Early, found_early
from ds_dynatrain.engine.members.entry import Entry, beside, stand_alone, with_launch, with_members
from ds_dynatrain.engine.members.policy import rule_of
from ds_dynatrain.engine.switcher import OnIdle
from ds_dynatrain.engine.turns import Turns, refuse_idle
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.support import practice

DEFAULT_PORT = 29500
"""DeepSpeed's own default for `distributed_port`."""

Results = tuple[Any, Any, Any, Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: Any = None,
    config_params: Config | None = None,
    on_idle: OnIdle | None = None,
    param_init_fn: ParamInit | None = None,
    model_factory: ModelFactory | None = None,
) -> Results:
    """What `deepspeed.initialize` takes and returns: (engine, optimizer, training loader, scheduler).

    Without a `dynatrain` block in the configuration it is `deepspeed.initialize`. With one, call it on every process
    of the launch: `dynatrain.layout` says which layout to start with, and processes that it does not need start idle.

    on_idle: called again and again as `on_idle(engine)` on a member that waits for work.
    param_init_fn: for a model on the meta device, called as `param_init_fn(module)` on each module with parameters of
    its own, in place of its `reset_parameters()`.
    model_factory: builds the same model anew, for one that cannot be copied and whose layers are to be dealt out.

    Raises ConfigError for a wrong block or a model that differs between processes, UnsupportedError for a feature
    that a switch would get wrong, CheckpointError if `dynatrain.resume` names what cannot be loaded.
    """
    given = {
        "args": args,
        "model": model,
        "optimizer": optimizer,
        "model_parameters": model_parameters,
        "lr_scheduler": lr_scheduler,
        "collate_fn": collate_fn,
    }
    start = {"distributed_port": distributed_port, "dist_init_required": dist_init_required}
    own, settings = _split(args, config, config_params)
    if settings is None:
        configured = {"config": config, "config_params": config_params, "mpu": mpu, "mesh_param": mesh_param}
        plain: Results = deepspeed.initialize(training_data=training_data, **given, **start, **configured)
        return plain
    if model is None:
        raise ConfigError("initialize needs a model")
    refuse_unsupported(own, model, optimizer, mpu, mesh_param)
    if isinstance(model_parameters, tuple):
        given["model_parameters"] = list(model_parameters)
    engine = _joined(own, settings, given, _Extras(on_idle, param_init_fn, mpu, model_factory), start)
    loader = None if training_data is None else engine.training_loader(training_data, collate_fn)
    if settings.resume is not None:
        try:
            engine.resumed = resume(engine, settings.resume)
        except BaseException:
            engine.destroy()
            raise
    return engine, OptimizerForwarder(engine), loader, engine.lr_scheduler


def _joined(
    own: dict[str, Any],
    settings: DynatrainConfig,
    arguments: dict[str, Any],
    extras: _Extras,
    start: dict[str, Any],
) -> DynatrainEngine:
    """The engine, in the job that this process has come to. start: of torch.distributed, as DeepSpeed takes it."""
    start_without_compiler()
    place, turns = worker_place(), Turns.of_process()
    rule_of(settings.raw_layouts)  # a wrong one is refused before this process joins anything
    _refuse_beside(turns.engines, settings, arguments["model"], place)
    early = found_early()
    if place is not None and early is None and not turns.engines:
        stand_alone()
    with telling_of_locks():
        deepspeed.init_distributed(**start)
    with telling_of_locks(), turns.joining():
        return _build(own, settings, arguments, extras, place, early, turns)


def _refuse_beside(
    others: list[EngineCore], settings: DynatrainConfig, model: nn.Module, place: WorkerPlace | None
) -> None:
    """UnsupportedError, ConfigError: the other engines of this process leave no room for one with these settings."""
    if others and place is not None and is_pipeline(model):
        raise practice("a pipeline beside another engine where members come and go").error()
    for other in others:
        theirs, ours = other.settings.fallback, settings.fallback
        if place is not None:
            if other.has_stood:  # members may have come, who would not know of it
                raise ConfigError("where members come and go, make all engines before the first batch of any of them")
            if (theirs is None) != (ours is None):
                raise ConfigError(
                    "dynatrain.fallback: where members come and go, all engines of a process go back together; "
                    "configure it for each of them, or for none"
                )
        if theirs is not None and ours is not None and Path(theirs.path).resolve() == Path(ours.path).resolve():
            raise ConfigError(
                f"dynatrain.fallback.path: {ours.path} is that of another engine of this process, and each would take "
                "the other's checkpoints for its own; give each engine a folder"
            )


@dataclass(frozen=True)
class _Extras:
    """What the caller gave that DeepSpeed's constructor is not told."""

    on_idle: OnIdle | None
    param_init_fn: ParamInit | None
    mpu: Any
    model_factory: ModelFactory | None


def _build(
    own: dict[str, Any],
    settings: DynatrainConfig,
    arguments: dict[str, Any],
    extras: _Extras,
    place: WorkerPlace | None,
    early: Early | None,
    turns: Turns,
) -> DynatrainEngine:
    """The engine on a working or on an idle member."""
    model, block = arguments["model"], settings.layout
    pipe = start_stages(model, block.pipe if block is not None and "pipe" in block.model_fields_set else None)
    import_what_is_lazy()
    entry = _enter(settings, place, early, turns)
    try:
        lists, said = lists_of(arguments), described(own, settings)
        entry.membership.refuse(settings, model)
        owners = put_together(model, lists, lambda record: entry.exchange("stages", record))
        if entry.record is not None:
            layout, sizes = of_running_job(entry.record, said)
        else:
            layout = first_layout(model, own, settings, entry.size, extras.mpu, pipe)
            if turns.engines:
                refuse_idle(layout, entry.size)
                refuse_stage_of_another(model, entry.mine)
            sizes = BatchSizes.of(own, layout.data)
        own = {**own, "zero_optimization": {**(own.get("zero_optimization") or {}), "stage": layout.zero_stage}}
        features = features_of(model, own, extras.mpu)
        shaper = shaper_of(model, own, entry.launch.member, lists, extras.model_factory, owners)
        incoming = Incoming.look(model, entry.launch, extras.param_init_fn, {**owners, **first_owners(shaper)})
        records = introduce(entry, incoming)
        seed = int((entry.record or records[0])["seed"])
        parts = (settings, own, sizes, seed, features, incoming.rows(), said, extras.on_idle)
        job, arguments = Job(*parts, entry.membership, entry.number), {**arguments, "turns": turns}
        around = entry.surroundings(records)
        return Construction(job, entry, around, layout, arguments, incoming, shaper).make()
    except BaseException:
        entry.membership.could_not_build()
        raise


def _enter(settings: DynatrainConfig, place: WorkerPlace | None, early: Early | None, turns: Turns) -> Entry:
    """Into the job, in whichever way this process comes."""
    if early is not None:
        return early.take_over(settings)
    others = [engine.membership for engine in turns.engines]
    if place is None:
        return with_launch(settings.timeout_seconds, others)
    return beside(others[0], settings, 1 + len(others)) if others else with_members(place, settings)


def _split(
    args: Any, config: Config | None, config_params: Config | None
) -> tuple[dict[str, Any], DynatrainConfig | None]:
    """DeepSpeed's part and ours of the one configuration that was given; DeepSpeed itself objects to none or two."""
    given = [each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each is not None]
    own, settings = split_config(given[0]) if given else ({}, None)
    if settings is not None and len(given) > 1:
        raise ConfigError("several DeepSpeed configurations (config, config_params, args.deepspeed_config): give one")
    return own, settings
