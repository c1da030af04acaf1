"""AutoEP in a pipeline: DeepSpeed finds layers with experts by their names in a `PipelineModule`, and replaces them.

`moe_layer_pattern` is about names as "3.mlp", of the layer's number in the whole model, whatever the number of stages.
So all layers are converted together, in one module with these names, without memory: once for each expert size to learn
what it cuts, and for a rank's place when its stage is built. Plain DeepSpeed converts each stage by itself and raises
where it finds nothing; here a stage may be without experts.

DeepSpeed partitions the module before it converts it: what a layer counts for does not depend on the expert size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_dynatrain.adapters import experts
from ds_dynatrain.adapters.expert_groups import layers_with_experts
from ds_dynatrain.adapters.no_alloc import is_stand_in, stand_in
from ds_dynatrain.adapters.pipeline import PipelineTemplate, layer_of
from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.space import AxisCuts, Layout


class StageExperts:
    """How AutoEP deals out the layers of a pipeline.

    template: of all layers, converted, with all experts. owners: which process has the first value of a parameter, by
    its id, where that is not process 0.
    """

    def __init__(
        self,
        model: PipelineModule,
        source: PipelineTemplate,
        config: Mapping[str, Any],
        listed: bool,
        owners: Mapping[int, int],
    ) -> None:
        """Take a module with all layers over: it has DeepSpeed's layers from now on, and its values.

        source: its template. listed: whether the caller has lists of its parameters. owners: see `put_together`.
        ConfigError for what DeepSpeed refuses; UnsupportedError, naming the part, for a module that cannot be followed.
        """
        experts.refuse_parts(model)
        native = next((name for name, part in model.named_modules() if isinstance(part, MoE)), None)
        if native is not None:
            raise UnsupportedError(
                f"{native!r} is a layer of deepspeed.moe, and expert_parallel is on; set expert_parallel.enabled to "
                "false, or build the layer without deepspeed.moe"
            )
        self._block, self._config, self._source = dict(config["expert_parallel"]), config, source
        self._named: Any = getattr(model, "config", None)  # of a model of transformers: AutoEP reads it
        self._cuts: dict[int, dict[str, AxisCuts]] = {}
        first = {layer_of(name): owners[id(held)] for name, held in model.named_parameters() if id(held) in owners}
        empty = {layer_of(name) for name, held in model.named_parameters() if is_stand_in(held)}
        try:
            experts.validate(config, Layout(data=self.start_size, expert=self.start_size, zero_stage=0))
            self.template = self._dealt(1, 0)
            self._replaced = experts.replace_layers(
                model, self._block, 1, 0, listed, lambda made: _empty(model, made, empty)
            )
        except ValueError as error:
            raise ConfigError(
                f"expert_parallel: {error}; change the key that this names, or set expert_parallel.enabled to false"
            ) from error
        shared = next((key for key, tied in model.tied_modules.items() if layers_with_experts(tied)), None)
        if shared is not None:
            raise UnsupportedError(
                f"tied_modules.{shared} has experts: stages would share what each rank has a part of; put them into a "
                "layer of their own"
            )
        for name, number in model.fwd_map.items():
            model.forward_funcs[number] = model._modules[name]  # a layer may be one of experts altogether
        for held in model.parameters():
            held.ds_pipe_replicated = False  # as DeepSpeed marks what it builds; ties are not known yet
        self.owners = {
            id(held): first[layer_of(name)] for name, held in model.named_parameters() if layer_of(name) in first
        }

    @property
    def start_size(self) -> int:
        """The expert size of the configuration."""
        return experts.start_size(self._config)

    def take_replaced(self) -> Any:
        """See `AutoEPShaper.take_replaced`."""
        replaced, self._replaced = self._replaced, None
        return replaced

    def cuts(self, size: int) -> Mapping[str, AxisCuts]:
        """The part of an expert index of each tensor, by name; errors as `AutoEPShaper.cuts`."""
        if size not in self._cuts:
            self._cuts[size] = experts.cuts_of(self._dealt(size, 0).whole)
        return self._cuts[size]

    def make(self, layout: Layout, rank: int) -> nn.Module:
        """All layers as a rank has them, by DeepSpeed's names, on the meta device."""
        return self._dealt(layout.expert, layout.expert_place(rank)[0]).whole

    def _dealt(self, size: int, index: int) -> PipelineTemplate:
        def convert(whole: nn.Module) -> None:
            whole.config = self._named
            experts.convert(whole, self._block, size, index)

        return self._source.converted(convert)


def _empty(model: nn.Module, made: nn.Module, layers: set[str]) -> None:
    """Let new experts of a layer that had no memory have none, one layer after the other."""
    name = next(name for name, part in model.named_modules() if part is made)
    if layer_of(name) in layers:
        for held in made.parameters():
            held.data = stand_in(held.shape, held.dtype, held.device)
