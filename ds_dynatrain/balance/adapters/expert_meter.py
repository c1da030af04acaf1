"""The meter of AutoEP's experts on one rank: tokens from the layers' own counters, and the times of the experts'
passes.

During a window of timed steps `forward` of each layer's experts is replaced. A backward pass begins when the gradient
of the experts' output arrives, and ends when that of their input does. A pass that recomputes activations counts as
part of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ds_dynatrain.adapters.groups.device import synchronize
from ds_dynatrain.adapters.versions.compiled import compiled_by_wrapping, compiled_in_place
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.balance.adapters.timing import between, now
from ds_dynatrain.errors import ConfigError

Floats = npt.NDArray[np.float64]
Span = tuple[Any, Any]
"""The beginning and the end of a pass, measured by the clock of `timing`."""


class ExpertMeter:
    """The tokens of each expert since the meter was made, and the seconds of the passes in its `timing` blocks."""

    def __init__(self, model: nn.Module) -> None:
        """Start counting tokens. Raises ConfigError if a part of the model is compiled."""
        if compiled := compiled_in_place(model) or compiled_by_wrapping(model):
            raise ConfigError(
                f"dynatrain.balance.experts: {compiled[0]!r} is compiled, and timing its experts would compile it "
                "again; set dynatrain.balance.experts to false, or do not compile it"
            )
        parts = ((name, part) for name, part in model.named_modules() if getattr(part, "_is_autoep_layer", False))
        self._layers: dict[str, Any] = dict(parts)
        self._counted = {name: layer.tokens_per_expert.clone() for name, layer in self._layers.items()}
        self._spans: dict[str, tuple[list[Span], list[list[Span]]]] = {name: ([], []) for name in self._layers}
        """For each layer: its forward passes, and its backward passes, each of these with its recomputed forward
        passes."""

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Context manager that times the experts in all passes of its block."""
        with ExitStack() as stack:
            for name, layer in self._layers.items():
                whole = layer.experts.forward
                stack.enter_context(replaced(layer.experts, forward=self._timed(whole, *self._spans[name])))
            yield

    def times(self) -> dict[str, tuple[Floats, Floats]]:
        """Return (median seconds of the forward and backward pass, tokens of each expert), keyed by the layer's name.

        Waits until the device has finished.
        """
        synchronize()
        return {name: self._times(name, layer) for name, layer in self._layers.items()}

    def _times(self, name: str, layer: Any) -> tuple[Floats, Floats]:
        forward, backward = self._spans[name]
        passes = [[between(*span) for span in forward], [sum(between(*span) for span in each) for each in backward]]
        tokens: Floats = (layer.tokens_per_expert - self._counted[name]).double().cpu().numpy()
        return np.array([np.median(each) if each else 0.0 for each in passes], dtype=np.float64), tokens

    @staticmethod
    def _timed(
        whole: Callable[..., torch.Tensor], forward: list[Span], backward: list[list[Span]]
    ) -> Callable[..., torch.Tensor]:
        again = list[Span]()

        def timed(tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            begin, arrived = now(), list[Any]()
            made = whole(tokens, counts)
            (forward if torch._C._current_graph_task_id() == -1 else again).append((begin, now()))
            if tokens.requires_grad and made.requires_grad:
                made.register_hook(lambda _: arrived.append(now()))
                tokens.register_hook(lambda _: end(arrived))
            return made

        def end(arrived: list[Any]) -> None:
            backward.append([(arrived[-1], now()), *again])
            again.clear()

        return timed
