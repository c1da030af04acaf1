"""A `PipelineModule` whose layers and place in the world change, while it stays the same object."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_dynatrain.adapters.grid import StageGrid
from ds_dynatrain.adapters.pipeline import PipelineTemplate
from ds_dynatrain.space import Layout

_LAYERS = (
    *("_modules", "num_stages", "stage_id", "parts", "_local_start", "_local_stop", "forward_funcs", "fwd_map"),
    *("tied_weight_attrs", "is_checkpointable_results", "is_checkpointable_results_interval"),
)
"""What `reshape` sets."""

_PLACE = ("_topo", "_grid", "world_group", "global_rank", "world_size", "tied_comms")
"""What `place` sets."""


def remember(root: PipelineModule) -> dict[str, Any]:
    """The present layers and place, for `put_back`; nothing that changes them later changes what was remembered."""
    return {name: root.__dict__[name] for name in (*_LAYERS, *_PLACE)}


def put_back(root: PipelineModule, remembered: dict[str, Any]) -> None:
    """Have the layers and the place of an earlier time again."""
    root.__dict__.update(remembered)


def reshape(
    root: PipelineModule,
    template: PipelineTemplate,
    layout: Layout,
    stage: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Give the module the layers of a stage; no random number is drawn.

    Parameters are new ones over memory that nobody has written, of element type `dtype` if one is given (as long as the
    template has them, they are the user's own). Buffers of a layer that was here before stay.
    """
    parts = template.boundaries(layout)
    before = dict(root.named_buffers())
    layers = {"tied_modules", *root.fwd_map}
    root.__dict__["_modules"] = {name: child for name, child in root._modules.items() if name not in layers}
    root.num_stages, root.stage_id, root.parts = layout.pipe, stage, list(parts)
    root._set_bounds(start=parts[stage], stop=parts[stage + 1])
    root.forward_funcs, root.fwd_map, root.tied_weight_attrs = [], {}, {}
    root.is_checkpointable_results, root.is_checkpointable_results_interval = [], None
    root.tied_modules = nn.ModuleDict()
    reseeds, root.seed_layers = root.seed_layers, False
    try:
        root._build()
    finally:
        root.seed_layers = reseeds
    root.train(root.training)
    _give_memory(root, dtype)
    _keep_buffers(root, before)
    if root.activation_checkpoint_interval > 0:
        root._precompute_checkpointable_values()


def place(root: PipelineModule, template: PipelineTemplate, layout: Layout, grid: StageGrid) -> None:
    """Tell the module where it is: its grid, and with whom it shares each tie; after `reshape`."""
    root._topo, root._grid, root.world_group = grid.topology(), grid, None
    root.global_rank, root.world_size = grid.global_rank, grid.world_size
    root.tied_comms = {}
    for key, stages in template.ties(layout).items():
        if len(stages) == 1 or root.stage_id not in stages:
            continue
        root.tied_comms[key] = {
            "ranks": [grid.stage_to_global(stage) for stage in stages],
            "group": grid.tied_group(stages),
            "weight_attr": root.tied_weight_attrs[key],
            "module": root.tied_modules[key],
        }
        for parameter in root.tied_modules[key].parameters():
            parameter.ds_pipe_replicated = root.stage_id != stages[0]


def _give_memory(root: nn.Module, dtype: torch.dtype | None) -> None:
    """Parameters on the meta device become real ones, with the same flags and attributes."""
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, held in module._parameters.items():
            if held is None or not held.is_meta:
                continue
            if id(held) not in made:
                memory = torch.empty(held.shape, dtype=dtype if held.is_floating_point() and dtype else held.dtype)
                made[id(held)] = nn.Parameter(memory, requires_grad=held.requires_grad)
                made[id(held)].__dict__.update(held.__dict__)
            module._parameters[name] = made[id(held)]


def _keep_buffers(root: nn.Module, before: dict[str, torch.Tensor]) -> None:
    for prefix, module in root.named_modules():
        for name, held in module._buffers.items():
            earlier = before.get(f"{prefix}.{name}" if prefix else name)
            if held is not None and earlier is not None:
                module._buffers[name] = earlier
