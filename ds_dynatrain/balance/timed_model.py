"""Which layers are timed: those of a pipeline's stages, or a model without stages as one, or some modules of it; and
what is known of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, cast

import numpy as np

from ds_dynatrain.adapters.pipeline import PipelineTemplate, layer_of
from ds_dynatrain.adapters.stage_module import PipelineShaper
from ds_dynatrain.balance.adapters.child_timer import ChildTimer, children_of, refuse_compiled
from ds_dynatrain.balance.adapters.pass_timer import PassTimer
from ds_dynatrain.balance.adapters.stage_timer import StageTimer
from ds_dynatrain.balance.adapters.timing import StageTimes
from ds_dynatrain.balance.averaged import Known
from ds_dynatrain.balance.profile import Floats
from ds_dynatrain.balance.window import rows_of
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.space import Layout, LogicalTensor
from ds_dynatrain.space.kind import WEIGHT

WHOLE, REST = "model", "rest"
"""The one layer of a model without stages, and what is left of it where modules are named."""


class Timer(Protocol):
    """What times the steps of a window on this rank."""

    def timing(self) -> AbstractContextManager[None]:
        """Time a whole step, where that is one call."""

    def passing(self, is_backward: bool, share: float) -> AbstractContextManager[None]:
        """Time a pass, where a step is several calls. share: of a micro-batch, as the profile counts them."""

    def updating(self) -> AbstractContextManager[None]:
        """Time the optimizer's step, where that is a call of its own."""

    def times(self) -> StageTimes:
        """Return all that was timed, once the device has done it."""


class TimedModel(Protocol):
    """The layers of one engine's model.

    is_cheap: timing costs so little that all steps are timed, and a window ends when it is due.
    """

    is_cheap: bool

    @property
    def present(self) -> Layout:
        """The layout, with its boundaries if there are stages."""

    @property
    def cut(self) -> tuple[int, ...]:
        """Layers to stages."""

    def timer(self) -> Timer:
        """Return what times the steps of a window."""

    def rows(self, times: StageTimes) -> Floats:
        """[layers of this rank's stage, COLUMNS]. The optimizer's seconds are shared out by the elements it steps."""

    def layers(self) -> list[Known]:
        """Return what is known of all layers of the model, in the present registration."""


def timed_model(engine: EngineCore) -> TimedModel:
    """The one that suits a model."""
    return TimedStages(engine) if isinstance(engine.host.shaper, PipelineShaper) else TimedWhole(engine)


def metered_model(engine: EngineCore, names: Sequence[str]) -> TimedModel:
    """A model without stages, by modules of these names; ConfigError where these cannot be timed."""
    if isinstance(engine.host.shaper, PipelineShaper):
        raise ConfigError("engine.meter: the layers of a PipelineModule are timed as they are; leave the call out")
    children_of(engine.host.module, names)
    return TimedChildren(engine, tuple(names))


class TimedStages:
    """The layers of a `PipelineModule`."""

    is_cheap = False

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    @property
    def present(self) -> Layout:
        layout = self._engine.layout
        return layout.replace(boundaries=self._template.boundaries(layout))

    @property
    def cut(self) -> tuple[int, ...]:
        return tuple(self.present.boundaries or ())

    def timer(self) -> Timer:
        return StageTimer(self._engine.deepspeed, self._engine.host.basic_optimizer)

    def rows(self, times: StageTimes) -> Floats:
        start = self.cut[self._engine.place("pipe")]
        trained = [_trained(held) for held in self._tensors()]
        return _rows(times, trained[start : start + times.forward.shape[1]])

    def layers(self) -> list[Known]:
        named = zip(self._template.names, self._tensors(), strict=True)
        return [
            _known(self._engine, f"{number}.{name or 'function'}", held) for number, (name, held) in enumerate(named)
        ]

    @property
    def _template(self) -> PipelineTemplate:
        return cast("PipelineShaper", self._engine.host.shaper).template

    def _tensors(self) -> list[list[LogicalTensor]]:
        """Return the tensors of each layer; a tied one has them at each of its places."""
        by_prefix: dict[str, list[LogicalTensor]] = {prefix: [] for prefix in self._template.prefixes()}
        for tensor in self._engine.vps.tensors:
            by_prefix[layer_of(tensor.name)].append(tensor)
        return [by_prefix[prefix] for prefix in self._template.prefixes()]


class TimedWhole:
    """A model without stages, as one layer: what its passes take tells slow members from others."""

    is_cheap = True

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    @property
    def present(self) -> Layout:
        return self._engine.layout

    @property
    def cut(self) -> tuple[int, ...]:
        return 0, 1

    def timer(self) -> Timer:
        return PassTimer(self._engine.host.basic_optimizer)

    def rows(self, times: StageTimes) -> Floats:
        return _rows(times, [_trained(self._engine.vps.tensors)])

    def layers(self) -> list[Known]:
        return [_known(self._engine, WHOLE, self._engine.vps.tensors)]


class TimedChildren:
    """A model without stages: the modules that were named, and behind them the rest."""

    is_cheap = False

    def __init__(self, engine: EngineCore, names: tuple[str, ...]) -> None:
        self._engine, self._names = engine, names

    @property
    def present(self) -> Layout:
        return self._engine.layout

    @property
    def cut(self) -> tuple[int, ...]:
        return 0, len(self._names) + 1

    def timer(self) -> Timer:
        host = self._engine.host
        refuse_compiled(host.module)
        return ChildTimer(host.basic_optimizer, children_of(host.module, self._names))

    def rows(self, times: StageTimes) -> Floats:
        return _rows(times, [_trained(held) for held in self._tensors()])

    def layers(self) -> list[Known]:
        named = zip((*self._names, REST), self._tensors(), strict=True)
        return [_known(self._engine, name, held) for name, held in named]

    def _tensors(self) -> list[list[LogicalTensor]]:
        """Return the tensors of each module, and of the rest."""
        found: list[list[LogicalTensor]] = [[] for _ in range(len(self._names) + 1)]
        for tensor in self._engine.vps.tensors:
            inside = (number for number, name in enumerate(self._names) if tensor.name.startswith(f"{name}."))
            found[next(inside, len(self._names))].append(tensor)
        return found


def _trained(tensors: Iterable[LogicalTensor]) -> int:
    """Elements that are trained."""
    return sum(tensor.numel for tensor in tensors if tensor.trainable)


def _rows(times: StageTimes, trained: list[int]) -> Floats:
    elements = np.array(trained, dtype=np.float64)
    rate = times.step_seconds / times.stepped if times.stepped else 0.0
    return rows_of(times.forward, times.backward, rate * elements[None], times.kept_bytes, times.output_bytes)


def _known(engine: EngineCore, name: str, tensors: Iterable[LogicalTensor]) -> Known:
    vps, held = engine.vps, list(tensors)
    sizes = {
        kind.name: sum(
            tensor.numel * kind.itemsize
            for tensor in held
            if kind.name == WEIGHT or (tensor.trainable and kind.is_of(tensor.group))
        )
        for kind in (vps.kind(present) for present in vps.present_kinds())
    }
    known = {kind: size for kind, size in sizes.items() if size or kind == WEIGHT}
    return Known(name, known, any(tensor.trainable for tensor in held))
