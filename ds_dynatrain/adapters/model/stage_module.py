"""A `PipelineModule` that stays the same object while its layers and its position in the world change.

AutoEP in a pipeline: `moe_layer_pattern` matches names like "3.mlp", which contain the layer's number in the whole
model, for every number of stages. All layers are therefore converted together, in one module with these names and
without storage: once for each expert size, to learn its cuts, and again for a rank's position when its stage is built.
Plain DeepSpeed converts each stage by itself and raises if it finds no layer to convert; here a stage may have no
experts. DeepSpeed partitions the module before it converts it, so a layer's weight in the partition does not depend on
the expert size.

If a module was built in stages, as in DeepSpeed's own scripts, each process has the layers of one stage. The module is
then given all layers, like a module with `num_stages=1`; layers of other stages are built from their specs and have no
storage except for buffers. A layer's owner, the first process of the first stage that has the layer, determines its
values, `requires_grad` and buffers. Lists of parameters, which each process has made for its own stage, are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as td
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import topology
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from torch import nn

from ds_dynatrain.adapters.groups.device import HOST, compute_device
from ds_dynatrain.adapters.groups.process_groups import is_known
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.model import auto_ep as experts
from ds_dynatrain.adapters.model import moe
from ds_dynatrain.adapters.model.auto_ep import Conversion
from ds_dynatrain.adapters.model.moe import enter_layers, leave_groups
from ds_dynatrain.adapters.model.pipeline_layers import (
    PARAMETERS,
    Cut,
    PipelineTemplate,
    is_pipeline,
    layer_of,
    refuse_tied_experts,
    with_builder,
)
from ds_dynatrain.adapters.model.shaper import Cuts, Lists, Made, Shaper, with_memory, without_memory
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.adapters.zero.incoming import seeded
from ds_dynatrain.adapters.zero.no_alloc import is_stand_in, stand_in
from ds_dynatrain.errors import ConfigError, LayoutError, SwitchRefused, UnsupportedError
from ds_dynatrain.space import Layout
from ds_dynatrain.support.row import Config


class StageGrid(PipelineParallelGrid):  # type: ignore[misc]
    """DeepSpeed's grid for one rank of a world, made of existing groups. Building it involves no collective.

    Ranks are ordered by pipe first, then data, as in DeepSpeed's grid.
    """

    def __init__(self, world: World, rank: int) -> None:
        layout, self.world = world.layout, world
        groups = {frozenset(world.ranks(kind)): world.group(kind) for kind in ("pipe", "data")}
        given = SimpleNamespace(
            get_rank=lambda: rank,
            get_world_size=lambda: layout.world_size,
            new_group=lambda ranks: groups.get(frozenset(ranks)),
        )
        with replaced(topology, dist=given, print=lambda *_: None):
            super().__init__(PipeDataParallelTopology(num_pp=layout.pipe, num_dp=layout.data))


class PipelineShaper(Shaper):
    """The shaper of a `PipelineModule` (see `shaping`): stages have whole layers, and ranks some experts of each layer.

    owners: a map from a parameter's id to the process that holds its initial value; see `moe.complete`.
    autoep: AutoEP's conversion of the layers, if AutoEP is on.
    """

    def __init__(
        self,
        model: PipelineModule,
        config: Config,
        member: int = 0,
        lists: Lists = (),
        owners: Mapping[int, int] | None = None,
        cut: Cut | None = None,
    ) -> None:
        """Take over a user's model, give it all experts (by `moe.complete` or AutoEP), and keep a template of it.

        config: DeepSpeed's configuration. Its `pipeline.partition` determines how layers are assigned to stages,
            because DeepSpeed does not keep the method with which the module was built.
        owners: the result of `put_together`.
        cut: the function that partitions the layers for the method "profile".
        """
        method, owners = (config.get("pipeline") or {}).get("partition", "best"), owners or {}
        first = {layer_of(name): owners[id(held)] for name, held in model.named_parameters() if id(held) in owners}
        index = {} if experts.is_on(config) else moe.complete(model, member, lists)
        named = [(layer_of(name), held) for name, held in model.named_parameters() if id(held) in index]
        # if a process has built one stage only, that stage's processes have the other experts
        self.owners = {id(held): first.get(layer, 0) + index[id(held)] for layer, held in named}
        self.template = PipelineTemplate.of(model, PARAMETERS if method == "best" else method, cut)
        self._dtype = torch.float32
        if experts.is_on(config):
            self.autoep = StageExperts(model, self.template, config, bool(lists), first)
            self.template, self.owners = self.autoep.template, self.autoep.owners

    def cuts(self, layout: Layout) -> Cuts:
        """Return a map from each tensor's name to the stages that hold it, and to the expert index that holds it there.

        Raises LayoutError for a tensor axis.
        """
        if layout.tensor > 1:
            raise LayoutError(f"{layout}: DeepSpeed's PipelineEngine has no tensor axis; give tensor=1")
        cuts = self.autoep.expert_cuts(layout) if self.autoep else moe.cuts_of(self.template.whole, layout.expert)
        return {name: replace(cuts[name], stages=held) for name, held in self.template.stages(layout).items()}

    def whole(self, root: nn.Module) -> nn.Module:
        """Return a module with all layers of the model, without storage, whichever stage `root` has."""
        return self.template.whole

    def refuse_to_train(self, names: Collection[str]) -> None:
        """Raise SwitchRefused for a parameter of a tied layer that is not in its `tied_weight_attr`.

        Stages would train separate copies of such a parameter.
        """
        for key in {key for key in self.template.keys if key is not None and self.template.keys.count(key) > 1}:
            tied = {f"tied_modules.{key}.{attribute}" for attribute in self.template.tied[key]}
            stray = next((name for name in names if layer_of(name) == f"tied_modules.{key}" and name not in tied), None)
            if stray is not None:
                raise SwitchRefused(
                    f"{stray!r} is in a tied layer and not in its `tied_weight_attr`: stages would train copies of it",
                    "leave it frozen, or put it into a layer of its own",
                )

    def make(self, layout: Layout, rank: int) -> Made | None:
        """Build the children of a rank if AutoEP is on. Returns None otherwise, because DeepSpeed then builds the
        layers itself.
        """
        return Made(self.autoep.dealt(layout.expert, layout.expert_place(rank)[0])) if self.autoep else None

    def reshape(self, root: nn.Module, layout: Layout, made: Made | None = None) -> None:
        """Give the root the layers of this rank's stage, without drawing random numbers."""
        held = (each.dtype for each in root.parameters() if each.is_floating_point())
        self._dtype = next(held, self._dtype)  # a stage of functions has no parameters
        rank = td.get_rank()
        specs: Any = root._layer_specs
        if self.autoep:
            found: Any = made or self.make(layout, rank)
            specs = [
                spec if layer is None else with_builder(spec, partial(self.template.layer_in, found.module, number))
                for number, (spec, layer) in enumerate(zip(specs, self.template.layers, strict=True))
            ]
        with replaced(root, _layer_specs=specs):
            reshape(root, self.template, layout, layout.coordinate(rank)["pipe"], self._dtype)

    def enter(self, engine: Any, layout: Layout) -> None:
        """Give layers with experts their groups. `pipeline_host` sets up everything else in a stage's engine."""
        if self.autoep:
            self.autoep.enter_layers(engine, layout)
        else:
            enter_layers(engine, layout.expert)

    def leave(self, engine: Any) -> None:
        """Release the groups of the engine's world."""
        leave_groups(engine.module)

    def configure(self, config: dict[str, Any], layout: Layout) -> None:
        """Write AutoEP's expert size into the configuration. The module itself determines everything else."""
        if self.autoep:
            config["expert_parallel"]["autoep_size"] = layout.expert


def reshape(
    root: PipelineModule,
    template: PipelineTemplate,
    layout: Layout,
    stage: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Give the module the layers of a stage, without values and without drawing random numbers.

    Layers with experts get the number of experts that a rank has. Parameters are new objects over uninitialized memory.
    """
    build_layers(root, template.boundaries(layout), stage)
    moe.resize(root, layout.expert)
    root.train(root.training)
    with_memory(root, dtype)
    if root.activation_checkpoint_interval > 0:
        root._precompute_checkpointable_values()


def build_layers(root: PipelineModule, parts: Sequence[int], stage: int) -> None:
    """Make DeepSpeed build the layers of a stage the way its constructor does. The previous layers are dropped.

    parts: the first layer of each stage, followed by the number of layers.
    """
    layers = {"tied_modules", *root.fwd_map}
    root.__dict__["_modules"] = {name: child for name, child in root._modules.items() if name not in layers}
    root.num_stages, root.stage_id, root.parts = len(parts) - 1, stage, list(parts)
    root._set_bounds(start=parts[stage], stop=parts[stage + 1])
    root.forward_funcs, root.fwd_map, root.tied_weight_attrs = [], {}, {}
    root.is_checkpointable_results, root.is_checkpointable_results_interval = [], None
    root.tied_modules = nn.ModuleDict()
    with replaced(root, seed_layers=False):
        root._build()


def place(root: PipelineModule, template: PipelineTemplate, layout: Layout, grid: StageGrid) -> None:
    """Set the module's grid, and the stages with which the module shares each tied layer.

    Only the trained attributes of a tied layer count, because DeepSpeed sums their gradients. `model_parallel` is set
    to correct the norm used for clipping gradients without ZeRO: DeepSpeed counts unmarked parameters on the first
    stage only.
    """
    take_stage(root, grid)
    root.tied_comms = {}
    for key, stages in template.ties(layout).items():
        if len(stages) == 1 or root.stage_id not in stages:
            continue
        tied = root.tied_modules[key]
        root.tied_comms[key] = {
            "ranks": [grid.stage_to_global(stage) for stage in stages],
            "group": grid.world.tie(stages),
            "weight_attr": [each for each in root.tied_weight_attrs[key] if attrgetter(each)(tied).requires_grad],
            "module": tied,
        }
        for parameter in tied.parameters():
            parameter.ds_pipe_replicated = root.stage_id != stages[0]
    for parameter in root.parameters():
        parameter.model_parallel = not parameter.ds_pipe_replicated


def take_stage(root: PipelineModule, grid: StageGrid) -> None:
    """Give the module our grid, whatever its layers are. Shuts down the groups that DeepSpeed's constructor made."""
    before = root._grid
    if before is not None and not isinstance(before, StageGrid):
        own = [before.ds_model_proc_group, before.dp_proc_group, before.pp_proc_group, before.slice_proc_group]
        for group in filter(is_known, {root.world_group, *own}):  # in an elastic job the first world may be gone
            td.destroy_process_group(group)
    root._topo, root._grid, root.world_group = grid.topology(), grid, None
    root.global_rank, root.world_size = grid.global_rank, grid.world_size


class StageExperts(Conversion):
    """AutoEP's conversion of the layers of a pipeline.

    template: the template of all layers, converted, with all experts.
    owners: a map from a parameter's id to the process that holds its initial value; process 0 if not listed.
    """

    def __init__(
        self,
        model: PipelineModule,
        source: PipelineTemplate,
        config: Config,
        listed: bool,
        first: Mapping[str, int],
    ) -> None:
        """Take over a module with all layers: convert its layers to DeepSpeed's, and copy the values of the replaced
        ones.

        source: the module's template.
        listed: whether the caller has lists of the module's parameters.
        first: a map from each layer to the process that holds its initial value.

        Raises UnsupportedError, naming the part, if the module's stages cannot be changed.
        """
        super().__init__(model, config)
        native = next((name for name, _ in moe.layers(model)), None)
        if native is not None:
            raise UnsupportedError(
                f"{native!r} is a layer of deepspeed.moe, and expert_parallel is on; set expert_parallel.enabled to "
                "false, or build the layer without deepspeed.moe"
            )
        self._source = source
        self._named: Any = getattr(model, "config", None)  # a model of transformers has it, and AutoEP reads it
        empty = {layer_of(name) for name, held in model.named_parameters() if is_stand_in(held)}

        def emptied(made: nn.Module) -> None:
            """Free the memory of the experts in the new layer `made` if the layer that it replaces had no memory."""
            name = next(name for name, part in model.named_modules() if part is made)
            for held in made.parameters() if layer_of(name) in empty else ():
                held.data = stand_in(held.shape, held.dtype, held.device)

        with experts.refused_by_deepspeed():
            self.template = self._converted(1, 0)
            self._replaced = experts.replace_layers(model, self._block, 1, 0, listed, emptied)
        refuse_tied_experts(model)
        for name, number in model.fwd_map.items():
            model.forward_funcs[number] = model._modules[name]  # the layer itself may have been replaced
        for held in model.parameters():
            held.ds_pipe_replicated = False  # DeepSpeed's mark; ties are not known yet
        self.owners = {
            id(held): first[layer_of(name)] for name, held in model.named_parameters() if layer_of(name) in first
        }

    def dealt(self, size: int, index: int) -> nn.Module:
        """Return all layers, under DeepSpeed's names and on the meta device, with one expert index's experts only."""
        return self._converted(size, index).whole

    def _converted(self, size: int, index: int) -> PipelineTemplate:
        def convert(whole: nn.Module) -> None:
            whole.config = self._named
            experts.replace_layers(whole, self._block, size, index)

        return self._source.converted(convert)


Exchange = Callable[[Any], Mapping[int, Any]]
"""Function that posts this process's record (plain JSON) and returns all records, keyed by launch number."""


def put_together(model: Any, lists: Lists, exchange: Exchange) -> dict[int, int]:
    """Give a module that was built in stages all its layers. Other modules are left unchanged.

    Returns a map from each parameter's id to the process that holds its initial value; {} for other modules. The
    module's `parts` stay as the user built them.

    lists: the caller's lists of parameters, such as those of an optimizer's groups. Each process has listed only its
        own stage's parameters; those of all stages are added in place.
    exchange: function that posts a record and returns the records of all processes.

    Raises ConfigError if processes have different numbers of lists, and UnsupportedError if the module cannot be
    merged.
    """
    if not is_pipeline(model) or model.num_stages == 1:
        return {}
    names = {id(held): name for name, held in model.named_parameters()}
    record: dict[str, Any] = {
        "lists": [[names[id(held)] for held in listed if id(held) in names] for listed in lists],
        "frozen": [name for name, held in model.named_parameters() if not held.requires_grad],
    }
    first_of = [min(model._topo.filter_match(pipe=stage)) for stage in range(model.num_stages)]
    owners: dict[str, int] = {}
    for number, spec in enumerate(model._layer_specs):
        title = f"tied_modules.{spec.key}" if isinstance(spec, TiedLayerSpec) else str(number)
        owners.setdefault(title, first_of[model.stage_owner(number)])
    _complete(model)
    record["buffers"] = {name: f"{tuple(held.shape)} {held.dtype}" for name, held in model.named_buffers()}
    records = exchange(record)
    _list_all(model, lists, records)
    _equal_buffers(model, owners, records)
    found = {}
    for name, held in model.named_parameters():
        found[id(held)] = owners.get(layer_of(name), 0)
        held.requires_grad_(name not in records[found[id(held)]]["frozen"])
    return found


def _complete(model: PipelineModule) -> None:
    """Build the layers of other stages without values, and release the groups that connect tied layers."""
    dtype = next((held.dtype for held in model.parameters() if held.is_floating_point()), None)
    tied = dict(model.tied_modules.items())
    specs = []
    for number, spec in enumerate(model._layer_specs):
        if isinstance(spec, LayerSpec):
            held, key = (tied, spec.key) if isinstance(spec, TiedLayerSpec) else ({**model._modules}, str(number))
            if key not in held:
                held[key] = _built(spec, number, dtype)
            spec = with_builder(spec, partial(held.__getitem__, key))
        specs.append(spec)
    for tie in model.tied_comms.values():
        td.destroy_process_group(tie["group"])
    parts, model._layer_specs, model.tied_comms = model.parts, specs, {}
    build_layers(model, [0, len(specs)], 0)
    model.parts = parts


def _built(spec: LayerSpec, number: int, dtype: torch.dtype | None) -> nn.Module:
    """Build a layer of another stage, in the type of this stage's layers, without advancing any random stream."""
    with seeded(f"layer {number}"):
        layer: nn.Module = spec.build()
    first = next((held.dtype for held in layer.parameters() if held.is_floating_point()), None)
    return without_memory(layer if first in (None, dtype) else layer.to(dtype))


def _list_all(model: nn.Module, lists: Lists, records: Mapping[int, Any]) -> None:
    """Extend each list with the parameters that any process has in its list of the same number, in the module's order.

    records: the records of all processes, keyed by launch number.
    """
    place: dict[str, int] = {}
    for member, record in sorted(records.items()):
        if len(record["lists"]) != len(records[0]["lists"]):
            raise ConfigError(
                f"{len(record['lists'])} optimizer groups on member {member} and {len(records[0]['lists'])} on member "
                "0: give every process all groups, also those of which its stage has no parameter"
            )
        for number, listed in enumerate(record["lists"]):
            wrong = next((name for name in listed if place.setdefault(name, number) != number), None)
            if wrong is not None:
                raise ConfigError(
                    f"{wrong!r} is in optimizer group {number} on member {member} and in group {place[wrong]} on "
                    "another: group parameters alike on every process"
                )
    named = dict(model.named_parameters())
    known = {*map(id, named.values())}
    for number, listed in enumerate(lists):
        others = [held for held in listed if id(held) not in known]
        listed[:] = [*(held for name, held in named.items() if place.get(name) == number), *others]


def _equal_buffers(model: nn.Module, owners: Mapping[str, int], records: Mapping[int, Any]) -> None:
    """Set each buffer to the value on the process that owns its layer, because a constructor may have drawn it at
    random.

    Afterwards all buffers are on the device, like those of the process's own stage.
    """
    for name, held in model.named_buffers():
        if len({record["buffers"][name] for record in records.values()}) > 1:
            raise UnsupportedError(
                f"buffer {name!r} has another shape or type where another stage builds its layer; register it with "
                "one shape and type on all stages"
            )
        # Only some processes have moved the buffer to the device.
        value = held.detach().to(HOST, copy=True, memory_format=torch.contiguous_format)
        td.broadcast(value.view(-1).view(torch.uint8), owners.get(layer_of(name), 0))
        held.detach().copy_(value)
        held.data = held.data.to(compute_device())
