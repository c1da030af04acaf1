"""`initialize`: DeepSpeed's call with the same arguments and the same four results, and an engine that can switch."""

from __future__ import annotations

import atexit
import copy
import gc
import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from ds_dynatrain.adapters.incoming import Incoming, refuse_cut
from ds_dynatrain.adapters.kinds import features_of
from ds_dynatrain.adapters.meta import ParamInit
from ds_dynatrain.adapters.pipeline import is_pipeline, refuse_stage_of_another
from ds_dynatrain.adapters.sequence import first_size
from ds_dynatrain.adapters.settings import BatchSizes, layout_config
from ds_dynatrain.adapters.shaping import Shaper, first_owners, shaper_of, start_expert_size, start_tensor_size
from ds_dynatrain.adapters.staged import put_together, start_stages
from ds_dynatrain.adapters.start import engine_around, import_what_is_lazy, start_without_compiler
from ds_dynatrain.adapters.support import refuse_module, refuse_unsupported
from ds_dynatrain.adapters.template import ModelFactory
from ds_dynatrain.adapters.watched import Fate
from ds_dynatrain.adapters.worlds import (
    World,
    build_world,
    drop,
    install,
    installed,
    stand_in_world,
)
from ds_dynatrain.config import Config, DynatrainConfig, split_config
from ds_dynatrain.data import BatchArithmetic
from ds_dynatrain.elastic.environment import WorkerPlace, worker_place
from ds_dynatrain.engine import feasible
from ds_dynatrain.engine.checkpoints.resume import resume
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.engine import DynatrainEngine
from ds_dynatrain.engine.first import take_in
from ds_dynatrain.engine.forward import OptimizerForwarder
from ds_dynatrain.engine.job import Job
from ds_dynatrain.engine.members.description import described, differing_key, differing_parameter
from ds_dynatrain.engine.members.early import Early, found_early
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.entry import Entry, beside, node, stand_alone, with_launch, with_members
from ds_dynatrain.engine.members.policy import rule_of
from ds_dynatrain.engine.members.roll import Roll
from ds_dynatrain.engine.pipeline import DynatrainPipelineEngine
from ds_dynatrain.engine.space import space_of
from ds_dynatrain.engine.surroundings import Surroundings
from ds_dynatrain.engine.switcher import OnIdle
from ds_dynatrain.engine.turns import Turns, refuse_idle
from ds_dynatrain.errors import ConfigError, LayoutError, SwitchRefused, UnsupportedError
from ds_dynatrain.space import Layout, is_partitioned, shared_stages
from ds_dynatrain.support import Target, practice, refuse_layout

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
    own, settings = _split(args, config, config_params)
    if settings is None:
        plain: Results = deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=config,
            mesh_param=mesh_param,
            config_params=config_params,
        )
        return plain
    if model is None:
        raise ConfigError("initialize needs a model")
    refuse_unsupported(own, model, optimizer, mpu, mesh_param)
    start_without_compiler()
    place, turns = worker_place(), Turns.of_process()
    rule_of(settings.raw_layouts)  # a wrong one is refused before this process joins anything
    _refuse_beside(turns.engines, settings, model, place)
    early = found_early()
    if place is not None and early is None and not turns.engines:
        stand_alone()
    deepspeed.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    arguments = {
        "args": args,
        "model": model,
        "optimizer": optimizer,
        "model_parameters": list(model_parameters) if isinstance(model_parameters, tuple) else model_parameters,
        "lr_scheduler": lr_scheduler,
        "collate_fn": collate_fn,
    }
    extras = _Extras(on_idle, param_init_fn, mpu, model_factory)
    with turns.joining():
        engine = _build(own, settings, arguments, extras, place, early, turns)
    loader = None
    if training_data is not None:
        loader = engine.loader(training_data, collate_fn=collate_fn)
    if settings.resume is not None:
        try:
            engine.resumed = resume(engine, settings.resume)
        except BaseException:
            engine.destroy()
            raise
    forwarder = OptimizerForwarder(engine)
    return engine, forwarder, loader, engine.lr_scheduler


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
        lists, said = _lists(arguments), described(own, settings)
        if entry.elastic is not None:
            refuse_cut(model)
            if settings.safety == "lean":
                raise practice("lean switches where members come and go").error()
        owners = put_together(model, lists, lambda record: entry.exchange("stages", record))
        if entry.record is not None:
            layout, sizes = _of_running_job(entry.record, said)
        else:
            layout = _first_layout(model, own, settings, entry.size, extras.mpu, pipe)
            if turns.engines:
                refuse_idle(layout, entry.size)
                refuse_stage_of_another(model, entry.mine)
            sizes = BatchSizes.of(own, layout.data)
        own = {**own, "zero_optimization": {**(own.get("zero_optimization") or {}), "stage": layout.zero_stage}}
        features = features_of(model, own, extras.mpu)
        shaper = shaper_of(model, own, entry.launch.member, lists, extras.model_factory, owners)
        incoming = Incoming.look(model, entry.launch, extras.param_init_fn, {**owners, **first_owners(shaper)})
        records = _introduce(entry, incoming)
        seed = int((entry.record or records[0])["seed"])
        parts = (settings, own, sizes, seed, features, incoming.rows(), said, extras.on_idle)
        job, arguments = Job(*parts, entry.elastic, entry.number), {**arguments, "turns": turns}
        return _engine_of(job, entry, entry.surroundings(records), layout, arguments, incoming, shaper)
    except BaseException:
        entry.give_up()
        raise


def _enter(settings: DynatrainConfig, place: WorkerPlace | None, early: Early | None, turns: Turns) -> Entry:
    """Into the job, in whichever way this process comes."""
    if early is not None:
        return early.take_over(settings)
    if place is None:
        return with_launch(settings.timeout_seconds)
    elastic = turns.engines[0].job.elastic if turns.engines else None
    return with_members(place, settings) if elastic is None else beside(elastic, settings, 1 + len(turns.engines))


def _of_running_job(record: dict[str, Any], said: dict[str, str]) -> tuple[Layout, BatchSizes]:
    """The layout and batch of a job that this process joins; ConfigError if it was configured otherwise."""
    differs = differing_key(said, record["described"])
    if differs:
        raise ConfigError(f"this process cannot join the job: {differs}")
    return Layout.from_dict(record["layout"]), BatchSizes(**record["batch_sizes"])


def _lists(arguments: Mapping[str, Any]) -> list[list[nn.Parameter]]:
    """The lists of parameters that the caller has, of an optimizer's groups or in place of them."""
    given = getattr(arguments["optimizer"], "param_groups", arguments["model_parameters"])
    if not isinstance(given, list):
        return []
    groups = [group for group in given if isinstance(group, dict)]
    for group in groups:
        if not isinstance(group["params"], torch.Tensor | list):
            group["params"] = list(group["params"])
    return [group["params"] for group in groups if isinstance(group["params"], list)] if groups else [given]


def _engine_of(
    job: Job,
    entry: Entry,
    surroundings: Surroundings,
    layout: Layout,
    arguments: dict[str, Any],
    incoming: Incoming,
    shaper: Shaper,
) -> DynatrainEngine:
    """The engine in its first world, or without one."""
    launch, sizes = entry.launch, job.batch_sizes
    members = tuple(range(layout.world_size)) if entry.record is None else tuple(entry.record["members"])
    batch = BatchArithmetic(sizes.train_batch_size, sizes.micro_batch_size, layout.data)
    _check_start(layout, batch, arguments["model"], job, max(entry.size, layout.world_size))
    whole = incoming.is_whole and not is_partitioned(layout)
    ties = _check_axes(shaper, layout) if is_partitioned(layout) else ()
    config = copy.deepcopy(job.user_config)
    uncut = layout.replace(data=layout.data * layout.tensor, tensor=1)  # AutoTP's layers come with the first shape
    shaper.configure(config, uncut)
    given: dict[str, Any] = {
        "settings": layout_config(config, layout, batch),
        "job": job,
        "surroundings": surroundings,
        "layout": layout,
        "members": members,
        "whole": whole,
        "shaper": shaper,
    }
    if not whole:
        incoming.take_apart(given["settings"][1])
    if entry.mine in members:
        seconds = job.settings.timeout_seconds
        with entry.building():
            fate = None if entry.elastic is None else Fate()
            store, number = entry.background.store, job.number
            sides = members, members, seconds, layout, ties, fate
            world = build_world(store, 1, entry.mine, *sides, engine=number)
        install(world)
        try:
            engine = _engine_in(world, world, {**given, **arguments})
        except BaseException:
            launch.install()
            drop(world)
            raise
    else:
        stand_in = stand_in_world(0, layout, ties)
        with installed(stand_in, launch):
            engine = _engine_in(None, stand_in, {**given, **arguments})
        engine.leave_world()
    space = space_of(engine, layout, members)
    if entry.joins:
        incoming.held.clear()
    elif not whole:
        try:
            take_in(engine, incoming, space)
        except BaseException:
            engine.let_module_go()
            launch.install()
            if engine.world is not None:
                drop(engine.world)
            raise
    engine.open_for_work(space)
    if entry.elastic is not None:
        _settle(engine, entry, entry.elastic)
    atexit.register(_close, weakref.ref(engine))
    return engine


def _settle(engine: DynatrainEngine, entry: Entry, elastic: Elastic) -> None:
    """The elastic job has started: the group that all stood in has served, and each stands alone while it is idle."""
    if entry.world is None or entry.alone is None or entry.joins:
        return
    roll = Roll().extended(entry.world.members)
    engine.surroundings = replace(engine.surroundings, launch=entry.alone)
    if engine.idle:
        entry.alone.install()
    engine.control.bury(entry.launch.retire())
    if elastic.world is None:
        elastic.enter(entry.world, roll, roll.ids_of(engine.members))


def _engine_in(world: World | None, groups: World, arguments: dict[str, Any]) -> DynatrainEngine:
    """The engine of the class that the model needs.

    groups: of the world that is installed, which is a stand-in on an idle member.
    """
    if is_pipeline(arguments["model"]):
        return engine_around(DynatrainPipelineEngine, world=world, groups=groups, **arguments)
    return engine_around(DynatrainEngine, world=world, mpu=groups.mpu, **arguments)


def _close(reference: weakref.ref[DynatrainEngine]) -> None:
    engine = reference()
    if engine is not None:
        engine.close()
        if engine.job.elastic is not None:
            gc.freeze()  # else Python's end visits all that torch and DeepSpeed have: 0.8 s of a core, and a node that
            # was told to go has little time


def _first_layout(
    model: nn.Module, own: dict[str, Any], settings: DynatrainConfig, processes: int, mpu: Any, pipe: int
) -> Layout:
    """model: with all its layers, if it was built in stages; pipe: how many."""
    block = settings.layout
    named = set() if block is None else block.model_fields_set
    sequence = first_size(mpu, own.get("sequence_parallel_size"))
    expert = start_expert_size(model, own, block.expert if block is not None and "expert" in named else None)
    tensor = start_tensor_size(own, block.tensor if block is not None and "tensor" in named else None)
    if block is None:
        wide = pipe * sequence * tensor
        if processes % wide:
            raise ConfigError(
                f"pipe={pipe} x sequence={sequence} x tensor={tensor} does not divide the {processes} processes of "
                "this launch"
            )
        stage, data = (own.get("zero_optimization") or {}).get("stage", 0), processes // wide
        return Layout(data=data, pipe=pipe, sequence=sequence, expert=expert, tensor=tensor, zero_stage=stage)
    sizes = {"pipe": pipe, "expert": expert, "tensor": tensor}
    given = {**block.model_dump(), **sizes, "zero_stage": block.zero_stage or 0}
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


def _check_start(layout: Layout, batch: BatchArithmetic, model: nn.Module, job: Job, processes: int) -> None:
    """ConfigError if the first layout cannot deal the batch to this model, or cannot have what the user asks for."""
    try:
        feasible.check_combination(job.features, layout, processes)
        feasible.check_batch(layout, batch, model)
        refuse_module(model, layout, job.user_config)
        refuse_layout(Target(job.user_config, layout))
    except SwitchRefused as refusal:
        raise ConfigError(str(refusal)) from refusal


def _check_axes(shaper: Shaper, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The sets of stages that share a tensor; ConfigError if the model cannot be dealt out so."""
    try:
        return shared_stages(shaper.cuts(layout).values())
    except (LayoutError, UnsupportedError) as error:
        raise ConfigError(f"dynatrain.layout: {error}") from error


def _introduce(entry: Entry, incoming: Incoming) -> dict[int, dict[str, Any]]:
    """Tell the others about this member, and see that all have the same model.

    ConfigError, on all of them, names the first parameter that differs; in a process that joins a running job on that
    one alone.
    """
    rows = incoming.rows()
    if entry.record is not None:
        differs = differing_parameter(entry.record["rows"], rows, "in the running job")
        if differs:
            raise ConfigError(f"this process cannot join the job: {differs}")
    digest = hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()
    place = node() if entry.elastic is None else entry.elastic.member.place.node
    record = {"node": place, "seed": torch.initial_seed(), "model": digest, "parameters": rows}
    records = entry.exchange("member", record)
    for member, other in sorted(records.items()):
        first = records[min(records)]
        if other["model"] != first["model"]:
            differs = differing_parameter(first["parameters"], other["parameters"], of_other=f"on member {member}")
            raise ConfigError(differs or f"the model of member {member} differs from that of member 0")
    return records


def _split(
    args: Any, config: Config | None, config_params: Config | None
) -> tuple[dict[str, Any], DynatrainConfig | None]:
    """DeepSpeed's part and ours of the one configuration that was given; DeepSpeed itself objects to none or two."""
    given = [each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each is not None]
    own, settings = split_config(given[0]) if given else ({}, None)
    if settings is not None and len(given) > 1:
        raise ConfigError("several DeepSpeed configurations (config, config_params, args.deepspeed_config): give one")
    return own, settings
