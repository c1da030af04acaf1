"""The layers that the balancer times.

In a pipeline these are the layers of its stages. In a model without stages they are the modules that the user named and
the rest of the model, or the whole model if no module is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from ds_dynatrain.adapters.model.pipeline_layers import PipelineTemplate, layer_of
from ds_dynatrain.adapters.model.stage_module import PipelineShaper
from ds_dynatrain.balance.adapters.stage_timer import StageTimer
from ds_dynatrain.balance.adapters.timing import ModuleTimer, StageTimes, Timer, children_of
from ds_dynatrain.balance.profile import Floats, LayerCost
from ds_dynatrain.balance.window import rows_of
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.space import Layout, LogicalTensor
from ds_dynatrain.space.kind import WEIGHT

WHOLE, REST = "model", "rest"
"""Names of layers that are not a named module: a whole model without stages, and the rest of a model."""


class TimedModel:
    """The layers of a model without stages: the modules that the user named, then the rest of the model as one layer.

    Without names the whole model is one layer; its time is enough to find slow members.
    """

    def __init__(self, engine: EngineCore, modules: Sequence[str] = ()) -> None:
        self._engine, self._modules = engine, tuple(modules)

    @property
    def is_cheap(self) -> bool:
        """Whether timing costs so little that all steps are timed, even those before a window is due."""
        return not self._modules

    @property
    def present(self) -> Layout:
        """The current layout, with its boundaries if there are stages."""
        return self._engine.layout

    @property
    def cut(self) -> tuple[int, ...]:
        """The first layer of each stage, followed by the number of layers."""
        return 0, len(self._modules) + 1

    def timer(self) -> Timer:
        """Return the timer for the steps of a timing window."""
        host = self._engine.host
        modules = children_of(host.module, self._modules) if self._modules else {}
        return ModuleTimer(host.basic_optimizer, tuple(modules.values()))

    def rows(self, times: StageTimes) -> Floats:
        """Return [layers of this rank's stage, COLUMNS]: this rank's timings in a window.

        The optimizer's seconds are divided over the layers in proportion to the elements that it steps.
        """
        start = self.cut[self._engine.place("pipe")]
        mine = self._tensors()[start : start + times.forward.shape[1]]
        trained = [sum(tensor.numel for tensor in held if tensor.trainable) for held in mine]
        elements = np.array(trained, dtype=np.float64)
        rate = times.step_seconds / times.stepped if times.stepped else 0.0
        return rows_of(times.forward, times.backward, rate * elements[None], times.kept_bytes, times.output_bytes)

    def number(self, name: str) -> int:
        """Return the number of the layer that contains the parameter or module of this name."""
        inside = (number for number, module in enumerate(self._modules) if name.startswith(f"{module}."))
        return next(inside, len(self._modules))

    def layers(self) -> list[LayerCost]:
        """Return all layers of the model with their bytes, but without times. Only registered parameters count."""
        vps, found = self._engine.vps, list[LayerCost]()
        kinds = [vps.kind(kind) for kind in vps.present_kinds()]
        for name, tensors in zip(self._names(), self._tensors(), strict=True):
            trained = [tensor for tensor in tensors if tensor.trainable]
            sizes = {WEIGHT: 0}
            for kind in kinds:
                held = tensors if kind.name == WEIGHT else [each for each in trained if kind.is_of(each.group)]
                if held:
                    sizes[kind.name] = kind.itemsize * sum(tensor.numel for tensor in held)
            costs = LayerCost(
                name=name, forward_seconds=0.0, backward_seconds=0.0, kind_bytes=sizes, trained=bool(trained)
            )
            found.append(costs)
        return found

    def _names(self) -> Sequence[str]:
        return (*self._modules, REST) if self._modules else (WHOLE,)

    def _tensors(self) -> list[list[LogicalTensor]]:
        """Return the tensors in each layer."""
        found: list[list[LogicalTensor]] = [[] for _ in self._names()]
        for tensor in self._engine.vps.tensors:
            found[self.number(tensor.name)].append(tensor)
        return found


class TimedStages(TimedModel):
    """The layers of a `PipelineModule`, one for each layer in the model's list."""

    is_cheap = False

    @property
    def present(self) -> Layout:
        """The current layout, with the boundaries of its stages."""
        return self._engine.layout.replace(boundaries=self._template.boundaries(self._engine.layout))

    @property
    def cut(self) -> tuple[int, ...]:
        """The first layer of each stage, followed by the number of layers."""
        return tuple(self.present.boundaries or ())

    def timer(self) -> Timer:
        """Return the timer for the steps of a window."""
        return StageTimer(self._engine.deepspeed, self._engine.host.basic_optimizer)

    def number(self, name: str) -> int:
        """Return the number of the layer that contains the parameter or module of this name, at its first position."""
        return self._template.prefixes().index(layer_of(name))

    @property
    def _template(self) -> PipelineTemplate:
        return cast("PipelineShaper", self._engine.host.shaper).template

    def _names(self) -> Sequence[str]:
        return [f"{number}.{name or 'function'}" for number, name in enumerate(self._template.names)]

    def _tensors(self) -> list[list[LogicalTensor]]:
        """Return the tensors in each layer. A tied layer's tensors appear at each of its positions."""
        by_prefix: dict[str, list[LogicalTensor]] = {prefix: [] for prefix in self._template.prefixes()}
        for tensor in self._engine.vps.tensors:
            by_prefix[layer_of(tensor.name)].append(tensor)
        return [by_prefix[prefix] for prefix in self._template.prefixes()]
