"""A `PipelineModule` whose layers and place in the world change, while it stays the same object."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as td
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_dynatrain.adapters import experts, moe
from ds_dynatrain.adapters.children import Made, with_memory
from ds_dynatrain.adapters.expert_groups import enter_layers, expert_index, leave_groups
from ds_dynatrain.adapters.grid import StageGrid
from ds_dynatrain.adapters.pipeline import PARAMETERS, Cut, PipelineTemplate, giving, layer_of
from ds_dynatrain.adapters.process_groups import is_known
from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.adapters.shaper import Shaper
from ds_dynatrain.adapters.stage_experts import StageExperts
from ds_dynatrain.errors import LayoutError, SwitchRefused
from ds_dynatrain.space import AxisCuts, Layout


class PipelineShaper(Shaper):
    """The shaper of a `PipelineModule` (see `shaping`): a stage has whole layers, a rank some experts of each.

    owners: see `moe.complete`. autoep: how AutoEP deals the layers' experts out, if it is on.
    """

    def __init__(
        self,
        model: PipelineModule,
        config: Mapping[str, Any],
        member: int = 0,
        lists: Sequence[list[nn.Parameter]] = (),
        owners: Mapping[int, int] | None = None,
        cut: Cut | None = None,
    ) -> None:
        """Take a user's model over, as `moe.complete` or AutoEP does, and keep a template of it.

        config: `pipeline.partition` says how layers are dealt to stages; DeepSpeed does not keep what the module was
        built with. owners: see `staged.put_together`. cut: what the method "profile" does.
        """
        method = (config.get("pipeline") or {}).get("partition", "best")
        self.autoep: StageExperts | None = None
        self.owners = {} if experts.is_on(config) else complete(model, member, lists, owners or {})
        self.template = PipelineTemplate.of(model, PARAMETERS if method == "best" else method, cut)
        self._dtype = torch.float32
        if experts.is_on(config):
            self.autoep = StageExperts(model, self.template, config, bool(lists), owners or {})
            self.template, self.owners = self.autoep.template, self.autoep.owners

    def cuts(self, layout: Layout) -> Mapping[str, AxisCuts]:
        """Which stages hold a tensor, and which expert index there; LayoutError for a tensor axis."""
        if layout.tensor > 1:
            raise LayoutError(f"{layout}: DeepSpeed's PipelineEngine knows no tensor axis; give tensor=1")
        cuts = self.autoep.cuts(layout.expert) if self.autoep else moe.cuts_of(self.template.whole, layout.expert)
        return {name: replace(cuts[name], stages=held) for name, held in self.template.stages(layout).items()}

    def whole(self, root: nn.Module) -> nn.Module:
        """That of the template."""
        return self.template.whole

    def refuse_to_train(self, names: Collection[str]) -> None:
        """Of a tied layer what is not in its `tied_weight_attr` stays frozen: stages would train copies of it."""
        for key in {key for key in self.template.keys if key is not None and self.template.keys.count(key) > 1}:
            tied = {f"tied_modules.{key}.{attribute}" for attribute in self.template.tied[key]}
            stray = next((name for name in names if layer_of(name) == f"tied_modules.{key}" and name not in tied), None)
            if stray is not None:
                raise SwitchRefused(
                    f"{stray!r} is in a tied layer and not in its `tied_weight_attr`: stages would train copies of it",
                    "leave it frozen, or put it into a layer of its own",
                )

    def make(self, layout: Layout, rank: int) -> Made | None:
        """AutoEP's layers; nothing else ahead: DeepSpeed's module builds its layers itself."""
        return Made(self.autoep.make(layout, rank)) if self.autoep else None

    def reshape(self, root: nn.Module, layout: Layout, made: Made | None = None) -> None:
        """The layers of this rank's stage; no random number is drawn."""
        held = (each.dtype for each in root.parameters() if each.is_floating_point())
        self._dtype = next(held, self._dtype)  # a stage of functions has none
        rank = td.get_rank()
        specs: Any = root._layer_specs
        if self.autoep:
            specs = self._giving(specs, (made or Made(self.autoep.make(layout, rank))).module)
        with replaced(root, "_layer_specs", specs):
            reshape(root, self.template, layout, layout.coordinate(rank)["pipe"], self._dtype)

    def _giving(self, specs: Sequence[Any], whole: nn.Module) -> list[Any]:
        """The descriptions of layers that are in `whole`."""
        layers = (
            None if each is None else self.template.layer_in(whole, at) for at, each in enumerate(self.template.layers)
        )
        pairs = zip(specs, layers, strict=True)
        return [spec if layer is None else giving(spec, partial(_same, layer)) for spec, layer in pairs]

    def parameters(self, root: nn.Module, layout: Layout) -> dict[str, nn.Parameter]:
        """DeepSpeed's names are those of the whole model, but for numbers of experts."""
        named = moe.names(root, expert_index(layout))
        return {named[name]: held for name, held in root.named_parameters()}

    def enter(self, engine: Any, layout: Layout) -> None:
        """The groups of layers with experts; what the engine of a stage needs is in `pipeline_host`."""
        if self.autoep:
            experts.enter(engine, layout)
        else:
            enter_layers(engine, layout.expert)

    def leave(self, engine: Any) -> None:
        """Hold no group of its world."""
        if self.autoep:
            experts.leave(engine)
        leave_groups(engine.module)

    def configure(self, config: dict[str, Any], layout: Layout) -> None:
        """The expert size for AutoEP; the module says all else."""
        if self.autoep:
            config["expert_parallel"]["autoep_size"] = layout.expert


def complete(
    model: PipelineModule, member: int, lists: Sequence[list[nn.Parameter]], owners: Mapping[int, int]
) -> dict[int, int]:
    """`moe.complete`, where a process may have built one stage only: its experts' peers are processes of that stage."""
    first = {layer_of(name): owners[id(held)] for name, held in model.named_parameters() if id(held) in owners}
    index = moe.complete(model, member, lists)
    named = ((layer_of(name), held) for name, held in model.named_parameters())
    return {id(held): first.get(layer, 0) + index[id(held)] for layer, held in named if id(held) in index}


def _same(layer: nn.Module) -> nn.Module:
    return layer


def reshape(
    root: PipelineModule,
    template: PipelineTemplate,
    layout: Layout,
    stage: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Give the module the layers of a stage, without values; no random number is drawn.

    Layers with experts have as many as a rank has. Parameters are new ones over memory that nobody has written.
    """
    build_layers(root, template.boundaries(layout), stage)
    moe.resize(root, layout.expert)
    root.train(root.training)
    with_memory(root, dtype)
    if root.activation_checkpoint_interval > 0:
        root._precompute_checkpointable_values()


def build_layers(root: PipelineModule, parts: Sequence[int], stage: int) -> None:
    """Let DeepSpeed build the layers of a stage, as its constructor does; the layers of before are gone."""
    layers = {"tied_modules", *root.fwd_map}
    root.__dict__["_modules"] = {name: child for name, child in root._modules.items() if name not in layers}
    root.num_stages, root.stage_id, root.parts = len(parts) - 1, stage, list(parts)
    root._set_bounds(start=parts[stage], stop=parts[stage + 1])
    root.forward_funcs, root.fwd_map, root.tied_weight_attrs = [], {}, {}
    root.is_checkpointable_results, root.is_checkpointable_results_interval = [], None
    root.tied_modules = nn.ModuleDict()
    with replaced(root, "seed_layers", False):
        root._build()


def place(root: PipelineModule, template: PipelineTemplate, layout: Layout, grid: StageGrid) -> None:
    """Tell the module where it is: its grid, and with whom it shares each tie.

    Of a tie what is trained counts: DeepSpeed adds its gradients up. `model_parallel` makes the norm of gradients right
    that is clipped by without ZeRO: DeepSpeed's counts unmarked parameters on the first stage only.
    """
    take_stage(root, grid)
    root.tied_comms = {}
    for key, stages in template.ties(layout).items():
        if len(stages) == 1 or root.stage_id not in stages:
            continue
        tied = root.tied_modules[key]
        root.tied_comms[key] = {
            "ranks": [grid.stage_to_global(stage) for stage in stages],
            "group": grid.tied_group(stages),
            "weight_attr": [each for each in root.tied_weight_attrs[key] if attrgetter(each)(tied).requires_grad],
            "module": tied,
        }
        for parameter in tied.parameters():
            parameter.ds_pipe_replicated = root.stage_id != stages[0]
    for parameter in root.parameters():
        parameter.model_parallel = not parameter.ds_pipe_replicated


def take_stage(root: PipelineModule, grid: StageGrid) -> None:
    """Have a grid of ours, without regard to layers; the groups that DeepSpeed's constructor made are taken down."""
    before = root._grid
    if before is not None and not isinstance(before, StageGrid):
        own = [before.ds_model_proc_group, before.dp_proc_group, before.pp_proc_group, before.slice_proc_group]
        for group in filter(is_known, {root.world_group, *own}):  # an elastic job's first world is gone already
            td.destroy_process_group(group)
    root._topo, root._grid, root.world_group = grid.topology(), grid, None
    root.global_rank, root.world_size = grid.global_rank, grid.world_size


def leave(root: PipelineModule) -> None:
    """Hold no group."""
    root._grid, root.tied_comms = None, {}
