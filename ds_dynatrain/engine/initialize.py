"""Implementation of `initialize`: DeepSpeed's call, with the same arguments and results, which returns an engine that
can switch."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import deepspeed
import torch
import torch.distributed as td
from torch import nn

from ds_dynatrain.adapters.deepspeed.start import (
    OptimizerForwarder,
    engine_around,
    import_what_is_lazy,
    start_without_compiler,
    tell_of_compilers,
)
from ds_dynatrain.adapters.deepspeed.support_checks import check_elastic_launch, refuse_unsupported
from ds_dynatrain.adapters.groups.communicators import is_watched
from ds_dynatrain.adapters.groups.device import take_own
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import (
    WorldSpec,
    build_world,
    drop,
    install,
    installed,
    is_ours_installed,
    stand_in_world,
)
from ds_dynatrain.adapters.model.pipeline_layers import is_pipeline, refuse_stage_of_another
from ds_dynatrain.adapters.model.shaper import ModelFactory, Shaper
from ds_dynatrain.adapters.model.shaping import features_of, shaper_of, start_size
from ds_dynatrain.adapters.model.stage_module import put_together
from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes, layout_config
from ds_dynatrain.adapters.zero.incoming import Incoming, ParamInit, Row, install_zero_init
from ds_dynatrain.config import DynatrainConfig, split_config
from ds_dynatrain.config_file import Config, read_config
from ds_dynatrain.descriptors import raise_descriptors
from ds_dynatrain.elastic.environment import WorkerPlace, local_rank, settle_watchdog, worker_place
from ds_dynatrain.elastic.worker_process import at_exit
from ds_dynatrain.engine.checkpoints.restore import first_state
from ds_dynatrain.engine.dynatrain_engine import DynatrainEngine
from ds_dynatrain.engine.entry import Early, Entry, begin, enter_again, start_alone, with_launch, with_members
from ds_dynatrain.engine.first import check_axes, check_start, first_layout, take_in
from ds_dynatrain.engine.pipeline_engine import DynatrainPipelineEngine
from ds_dynatrain.errors import ConfigError, ElasticError
from ds_dynatrain.extension import Extension, check, made
from ds_dynatrain.membership.destinations import rule_of
from ds_dynatrain.report import show_by_default
from ds_dynatrain.reshard.context import Candidates, Context, Job, OnIdle, OwnGroups
from ds_dynatrain.reshard.feasible import dealt
from ds_dynatrain.reshard.process import PROCESS, refuse_beside_plain, refuse_idle, refuse_module_of_another
from ds_dynatrain.reshard.registration import space_of
from ds_dynatrain.space import Layout, is_partitioned
from ds_dynatrain.support import usage

DEFAULT_PORT = 29500
"""DeepSpeed's default for `distributed_port`."""

FREE = ("dynatrain.report.", "dynatrain.timeout_seconds")
"""Keys of the configuration whose values may differ between processes."""

Results = tuple[Any, Any, Any, Any]

tell_of_compilers()


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
    extensions: Iterable[Extension] = (),
) -> Results:
    """Initialize as `deepspeed.initialize` does, and return (engine, optimizer, training loader, scheduler).

    Without a `dynatrain` block in the configuration this is `deepspeed.initialize`. With one, call it on every process
    of the launch: `dynatrain.layout` gives the layout to start with, and processes that are not needed for it start
    idle.

    on_idle: called repeatedly, as `on_idle(engine)`, on a member that waits for work.

    param_init_fn: for a model on the meta device. Called as `param_init_fn(module)` on each module that has parameters
        of its own, instead of the module's `reset_parameters()`.

    model_factory: builds the same model again. Needed for a model that cannot be copied and whose layers are to be
        divided among stages.

    extensions: your own extensions, in the same order on every process; see `Extension`.

    Raises ConfigError for an invalid block or a model that differs between processes.

    Raises UnsupportedError for a feature that a switch would not handle correctly.

    Raises CheckpointError if `dynatrain.resume` names a checkpoint that cannot be loaded.
    """
    given = {"args": args, "model": model, "optimizer": optimizer, "model_parameters": model_parameters}
    given |= {"lr_scheduler": lr_scheduler, "collate_fn": collate_fn}
    start = {"distributed_port": distributed_port, "dist_init_required": dist_init_required}
    own, settings = _split(args, config, config_params)
    extensions = [*extensions]
    check(extensions)
    if settings is None:
        if extensions:
            raise ConfigError(
                f"{len(extensions)} extensions were given, and the configuration has no dynatrain block, so that "
                'nothing would call them; add "dynatrain": {}'
            )
        configured = {"config": config, "config_params": config_params, "mpu": mpu, "mesh_param": mesh_param}
        plain: Results = deepspeed.initialize(training_data=training_data, **given, **start, **configured)
        return plain
    show_by_default()
    raise_descriptors()
    if model is None:
        raise ConfigError("initialize was called without a model; give model=")
    settings = settings.in_launch(is_elastic=worker_place() is not None)
    if worker_place() is not None:
        _settle_elastic_launch()
        if not isinstance(own.get("train_batch_size"), int):
            micro, steps = (own.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
            raise ConfigError(
                f"train_batch_size is {own.get('train_batch_size')!r}, train_micro_batch_size_per_gpu {micro!r} and "
                f"gradient_accumulation_steps {steps!r}: in a launch whose nodes come and go the global batch would "
                'change with their number; give "train_batch_size", which is divided among the present ranks'
            )
    refuse_unsupported(own, model, optimizer, mpu, mesh_param)
    added = [*made(settings), *extensions]
    for extension in added:
        extension.check_job(own, model, mpu)
    if isinstance(model_parameters, tuple):
        given["model_parameters"] = list(model_parameters)
    engine = _joined(_Given(own, settings, given, on_idle, param_init_fn, mpu, model_factory, tuple(added)), start)
    loader = None if training_data is None else engine._training_loader(training_data, collate_fn)
    try:
        engine.resumed = first_state(engine._parts, engine._parts.load)
    except BaseException:
        engine.destroy()
        raise
    return engine, OptimizerForwarder(engine._host), loader, engine.lr_scheduler


def init_distributed(*arguments: Any, **named: Any) -> bool:
    """Call `deepspeed.init_distributed` with the same arguments. In an elastic job, join the job or form its world
    first.

    Call this in the first line of a script. Processes that start a job wait for each other, and then all of them are in
    `torch.distributed`, RANK and WORLD_SIZE. A process that joins a running job is in the world of its own node until
    `initialize`, because the others are training and cannot take part in anything else. Returns whether this process
    joins a running job. Models may be built under `deepspeed.zero.Init` after this call.

    Raises SystemExit(0) if the job ends before that, TimeoutError or PeerRefused under the same conditions as
    `Member.start`.
    """
    show_by_default()
    raise_descriptors()
    place = worker_place()
    joins = False
    join_at_zero_init()
    take_own(local_rank())
    if place is not None and not (td.is_initialized() and is_ours_installed()):
        _settle_elastic_launch()
        early: Early | None = PROCESS.found_early()
        if early is None:
            early = PROCESS.early = begin(place)
        joins = early.joins
    deepspeed.init_distributed(*arguments, **named)
    return joins


def join_at_zero_init() -> None:
    """Make the first `deepspeed.zero.Init` of an elastic launch call `init_distributed`, unless the script has already
    done so.

    Needed by frameworks that build a model under `zero.Init` themselves. Does nothing in a launch of fixed size.
    """
    if worker_place() is not None:
        install_zero_init(_join_before_engines, read_config)


def _join_before_engines() -> bool:
    if PROCESS.engines:
        raise usage("zero.Init beside an engine where members come and go").error()
    joins = init_distributed()
    if PROCESS.early is not None:
        PROCESS.early.connect()  # DeepSpeed sends parameters from device to device
    return joins


def _settle_elastic_launch() -> None:
    """Check that an elastic launch can survive a death, and disable torch's watchdog. Called before anything else.

    Raises UnsupportedError or ConfigError if the launch could not survive a death.
    """
    check_elastic_launch()
    if is_watched():
        settle_watchdog()


@dataclass(frozen=True)
class _Given:
    """The arguments that the caller has passed to `initialize`.

    own: DeepSpeed's part of the configuration.
    arguments: arguments of DeepSpeed's constructor.
    """

    own: dict[str, Any]
    settings: DynatrainConfig
    arguments: dict[str, Any]
    on_idle: OnIdle | None
    param_init_fn: ParamInit | None
    mpu: Any
    model_factory: ModelFactory | None
    extensions: tuple[Extension, ...]


def _joined(given: _Given, start: dict[str, Any]) -> DynatrainEngine:
    """Join the job, or start it together with the other processes, and return the engine.

    start: arguments of `deepspeed.init_distributed`.
    """
    start_without_compiler()
    take_own(local_rank())
    place = worker_place()
    PROCESS.begin()
    rule_of(given.settings.raw_layouts)  # refuse wrong layouts before this process joins
    others = PROCESS.engines
    if others and place is not None and is_pipeline(given.arguments["model"]):
        raise usage("a pipeline beside another engine where members come and go").error()
    stood = [other.job.number for other in others if other.has_stood]
    if place is not None and stood:  # newcomers would not know of a new engine
        raise ConfigError(
            f"engine {stood[0]} of this process has dealt a batch already, and members that come would not know of a "
            "new engine; make all engines before the first batch of any of them"
        )
    for extension in given.extensions:
        extension.check_launch(place is not None)
    for other in others:
        for extension in (*given.extensions, *other.job.extensions):
            extension.check_beside(given.settings, other.settings, other.job.number)
    early: Early | None = PROCESS.found_early()
    if place is not None and early is None and not others:
        start_alone()
    deepspeed.init_distributed(**start)
    with PROCESS.joining():
        return _build(given, place, early)


def _build(given: _Given, place: WorkerPlace | None, early: Early | None) -> DynatrainEngine:
    """Enter the job, and return the engine of this working or idle member."""
    own, settings, arguments, mpu = given.own, given.settings, given.arguments, given.mpu
    model, block = arguments["model"], settings.layout
    asked = block.pipe if block is not None and "pipe" in block.model_fields_set else None
    pipe = start_size("pipe", model, own, asked)
    import_what_is_lazy()
    entry = _enter(settings, place, early)
    PROCESS.membership = entry.membership
    try:
        lists, said = lists_of(arguments), described(own, settings)
        entry.membership.refuse(settings, model)
        cuts = (extension.stage_cut(own, entry.exchange) for extension in given.extensions if is_pipeline(model))
        cut = next(filter(None, cuts), None)
        owners = put_together(model, lists, lambda record: entry.exchange("stages", record))
        for extension in given.extensions:
            extension.check_model(own, model, mpu)
        in_leaves = any(extension.has_leaves for extension in given.extensions)
        if entry.record is not None:
            words = "here", "in the running job", ": start it with the same configuration"
            if differs := differing(said, entry.record["described"], *words):
                raise ConfigError(f"this process cannot join the job: {differs}")
            layout, sizes = Layout.from_dict(entry.record["layout"]), BatchSizes(**entry.record["batch_sizes"])
        else:
            layout = first_layout(model, own, settings, entry.size, mpu, pipe, place is not None, in_leaves)
            refuse_beside_plain(layout, entry.size)
            refuse_module_of_another(model, layout)
            if PROCESS.engines:
                refuse_idle(layout, entry.size)
                refuse_stage_of_another(model, entry.mine)
            sizes = BatchSizes.of(own, layout.data, in_leaves)
        zero = {**(own.get("zero_optimization") or {}), "stage": layout.zero_stage}
        own = {**own, "zero_optimization": zero}
        for extension in given.extensions:
            own = extension.deepspeed_config(own)
        features = features_of(model, own, mpu)
        shaper = shaper_of(model, own, entry.launch.member, lists, given.model_factory, owners, cut)
        values = {**owners, **shaper.owners}
        incoming = Incoming(model, entry.launch, given.param_init_fn, values, entry.joins)
        if early is not None and early.joins and incoming.draws and not entry.joins:
            raise ElasticError(
                "the job that this process came to join has ended, and its model was built without values; start this "
                "process again"
            )
        rows = rows_of(entry, incoming)
        mine = {"extensions": ", ".join(type(each).__name__ for each in given.extensions) or "none"}
        for extension in given.extensions:
            mine |= extension.described(own)
        records = introduce(entry, rows, mine)
        seed = int((entry.record or records[0])["seed"])
        alike = {"described": said, "machine": mine, "rows": rows, "batch_sizes": asdict(sizes), "seed": seed}
        parts = (settings, own, sizes, seed, features, alike, given.extensions, given.on_idle)
        job = Job(*parts, entry.number)
        nodes = {member: str(record["node"]) for member, record in records.items()}
        context = Context(entry.launch, Candidates(entry.mine, nodes), entry.control, entry.background)
        return _make(job, entry, context, layout, arguments, incoming, shaper)
    except BaseException:
        entry.membership.could_not_build()
        raise


def _enter(settings: DynatrainConfig, place: WorkerPlace | None, early: Early | None) -> Entry:
    """Enter the job: complete an entry begun by `init_distributed`, or enter together with the launch, in an elastic
    job, or with a further engine of this process.

    early: the entry begun by `init_distributed`; None if there is none.
    """
    if early is not None:
        PROCESS.early = None
        return early.take_over(settings)
    known = PROCESS.membership if PROCESS.engines else None
    if place is None:
        return with_launch(settings.timeout_seconds, known)
    return with_members(place, settings) if known is None else enter_again(known, settings, 1 + len(PROCESS.engines))


def _split(
    args: Any, config: Config | None, config_params: Config | None
) -> tuple[dict[str, Any], DynatrainConfig | None]:
    """Separate the configuration into DeepSpeed's part and our `dynatrain` block, and return both. The second is None
    if there is no block.

    Raises ConfigError if several configurations are given and the first has a `dynatrain` block. All other mistakes are
    left for DeepSpeed to report.
    """
    given = [each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each is not None]
    own, settings = split_config(given[0]) if given else ({}, None)
    if settings is not None and len(given) > 1:
        raise ConfigError(
            f"{len(given)} DeepSpeed configurations were given (config, config_params, args.deepspeed_config); give one"
        )
    return own, settings


def _make(
    job: Job,
    entry: Entry,
    context: Context,
    layout: Layout,
    arguments: dict[str, Any],
    incoming: Incoming,
    shaper: Shaper,
) -> DynatrainEngine:
    """Make the engine and prepare it for work. If this raises an error, everything made so far is released.

    layout: the current layout of the job.
    arguments: arguments of DeepSpeed's constructor.
    """
    check_start(layout, arguments["model"], shaper, job, max(entry.size, layout.world_size))
    ties = check_axes(shaper, layout) if is_partitioned(layout) else ()
    members = tuple(range(layout.world_size)) if entry.record is None else tuple(entry.record["members"])
    config = copy.deepcopy(job.user_config)
    uncut = layout.replace(data=layout.data * layout.tensor, tensor=1)  # AutoTP's layers come with the first shape
    shaper.configure(config, uncut)
    whole = incoming.is_whole and not is_partitioned(layout)
    settings = layout_config(config, layout, dealt(job.batch_sizes, layout, job.has_stages))
    if not whole:
        incoming.take_apart(settings[1])
    given = {"settings": settings, "job": job, "context": context, "layout": layout, "members": members}
    given |= {"whole": whole, "shaper": shaper, **arguments}
    if entry.mine in members:
        engine = _working(entry, ties, given)
    else:  # an idle member has no world
        stand_in = stand_in_world(0, layout, ties)
        with installed(stand_in, entry.launch):
            engine = _engine_in(None, stand_in, given)
        engine._host.leave_world()
    space = space_of(engine._parts, layout, members)
    if entry.joins:
        incoming.held.clear()
    elif not whole:
        try:
            take_in(engine._parts, incoming, space)
        except BaseException:
            engine._host.let_module_go()
            entry.launch.install()
            if engine._parts.world is not None:
                drop(engine._parts.world).join(job.settings.timeout_seconds)
            raise
    engine._parts.begin_work(space)
    for extension in job.extensions:
        engine.on_change(extension.on_change)
        if hasattr(extension, "state_dict"):
            engine.register_for_checkpointing(extension.name, extension)
    parts = engine._parts
    if entry.world is not None and entry.alone is not None and not entry.joins:  # leave the start group
        parts.context = replace(parts.context, launch=entry.alone)
        if parts.idle:
            entry.alone.install()
        parts.control.teardowns.add(entry.launch.retire())
        entry.membership.begin(entry.world, parts.members)
    at_exit(_close, weakref.ref(engine))
    return engine


def _working(entry: Entry, ties: Sequence[tuple[int, ...]], given: dict[str, Any]) -> DynatrainEngine:
    """Make the engine of a working member, together with the process groups of the member's first world.

    ties: the sets of stages that share a tensor.
    given: arguments of the engine's constructor.
    """
    job, layout, members = given["job"], given["layout"], given["members"]
    seconds = job.settings.timeout_seconds
    with entry.membership.building_first(entry.generation, entry.number):
        status = entry.membership.new_status()
        of_all = OwnGroups(each.group for each in job.extensions if each.group)
        own = of_all.kinds(layout, members, {}, entry.mine)
        spec = WorldSpec(1, entry.mine, members, members, layout, ties, own, job.number, job.has_sequence)
        world = build_world(entry.background.store, spec, seconds, status)
    try:
        world.connect(seconds, stop=entry.stop)
        install(world)
        return _engine_in(world, world, given)
    except BaseException:
        entry.launch.install()
        drop(world, is_broken=True).join(seconds)  # wait, since the caller may try again at once
        raise


def _engine_in(world: World | None, groups: World, arguments: dict[str, Any]) -> DynatrainEngine:
    """Return an engine of the class that the model and the extensions need.

    world: the world of this member; None if it is idle.
    groups: the groups of the installed world, which is a placeholder on an idle member.
    """
    has_stages = is_pipeline(arguments["model"])
    kind: type[DynatrainEngine] = DynatrainPipelineEngine if has_stages else DynatrainEngine
    for extension in arguments["job"].extensions:
        kind = extension.engine_class(kind)
    given = {"groups": groups} if has_stages else {"mpu": groups.mpu}
    return engine_around(kind, world=world, **given, **arguments)


def _close(reference: weakref.ref[DynatrainEngine]) -> None:
    engine = reference()
    if engine is not None:
        engine.close()


def lists_of(arguments: Mapping[str, Any]) -> list[list[nn.Parameter]]:
    """Return the lists of parameters that the caller has passed: those of the optimizer's groups, or of
    `model_parameters`."""
    given = getattr(arguments["optimizer"], "param_groups", arguments["model_parameters"])
    if not isinstance(given, list):
        return []
    groups = [group for group in given if isinstance(group, dict)]
    for group in groups:
        if not isinstance(group["params"], torch.Tensor | list):
            group["params"] = list(group["params"])
    return [group["params"] for group in groups if isinstance(group["params"], list)] if groups else [given]


def rows_of(entry: Entry, incoming: Incoming) -> list[Row]:
    """Return a description of each parameter. The descriptions must be equal on all processes.

    A process that joins a running job gets all values from that job. In this case the job's own descriptions say how
    parameters arrive.
    """
    rows = incoming.rows
    if entry.record is None:
        return rows
    forms = {name: form for name, _, _, form, _ in entry.record["rows"]}
    return [(name, shape, dtype, forms.get(name, form), trained) for name, shape, dtype, form, trained in rows]


def introduce(entry: Entry, rows: Sequence[Row], machine: dict[str, str]) -> dict[int, dict[str, Any]]:
    """Exchange descriptions with the other members, and check that all have the same model. Return the description of
    each member.

    rows: the result of `rows_of`.
    machine: further values that must be equal on all members.

    Raises ConfigError on all processes if a parameter or value differs; if this process joins a running job, only on
    this process. The error names the first difference.
    """
    mine = {"node": entry.membership.node, "seed": torch.initial_seed(), "machine": machine, "rows": rows}
    if entry.record is not None and (
        differs := differing_members(entry.record, json.loads(json.dumps(mine)), "in the running job", "here")
    ):
        raise ConfigError(f"this process cannot join the job: {differs}")
    records = entry.exchange("member", mine)
    first, *others = sorted(records)
    for other in others:
        differs = differing_members(records[first], records[other], f"on member {first}", f"on member {other}")
        if differs:
            raise ConfigError(differs)
    return records


# ---- comparison of processes -----------------------------------------------------------------------------------------


def described(own: Mapping[str, Any], settings: DynatrainConfig) -> dict[str, str]:
    """Return all values of a configuration as a flat map from path to value, such as {"optimizer.params.lr": "0.1"}."""
    found: dict[str, str] = {}
    _flatten({**own, "dynatrain": settings.model_dump()}, "", found)
    return {path: value for path, value in found.items() if not path.startswith(FREE)}


def differing_members(one: Mapping[str, Any], two: Mapping[str, Any], of_one: str, of_two: str) -> str:
    """Return a description of the first difference between the records of two processes; "" if there is none.

    one, two: the records, as read from JSON. "machine" maps names to values that extensions require to be equal, and
        "rows" describe the parameters.
    of_one, of_two: names of the two processes, for the description.
    """
    model = " (name, shape, type, form, requires_grad): build the same model on every process"
    first, other = ({f"parameter {place}": row for place, row in enumerate(each["rows"])} for each in (one, two))
    differs = differing(one["machine"], two["machine"], of_one, of_two, ": make them equal")
    return differs or differing(first, other, of_one, of_two, model)


def differing(first: Mapping[str, Any], other: Mapping[str, Any], of_first: str, of_other: str, way_out: str) -> str:
    """Return a description of the first value that differs between two maps; "" if none differs.

    of_first, of_other: names of the owners of the maps, for the description.
    way_out: advice for the user, for the description.
    """
    for name in {**first, **other}:
        one, two = first.get(name, "not given"), other.get(name, "not given")
        if one != two:
            return f"{name} is {one} {of_first} and {two} {of_other}{way_out}"
    return ""


def _flatten(value: Any, path: str, found: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            _flatten(part, f"{path}.{key}" if path else str(key), found)
    else:
        found[path] = json.dumps(value, default=str)
