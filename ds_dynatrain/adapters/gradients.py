"""A record of the parameters that got a gradient: ZeRO-3 steps the others with the last gradient they had."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_dynatrain.adapters.model import ModelMap


class GradientWatch:
    """Hooks on the trainable parameters, for the life of an engine: a set insertion per parameter and backward.

    seen: numbers of the parameters that got a gradient since the last call of `missing`.
    """

    def __init__(self, model: ModelMap) -> None:
        pairs = zip(model.tensors, model.parameters, strict=True)
        held = [(tensor.name, parameter) for tensor, parameter in pairs if tensor.trainable and tensor.numel]
        self._names = [name for name, _ in held]
        self.seen: set[int] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_mark(self.seen, number))
            for number, (_, parameter) in enumerate(held)
        ]

    def missing(self) -> tuple[str, ...]:
        """Return the names of the parameters that got no gradient since the last call."""
        names: tuple[str, ...] = ()
        if len(self.seen) < len(self._names):
            names = tuple(name for number, name in enumerate(self._names) if number not in self.seen)
        self.seen.clear()
        return names

    def stop(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _mark(seen: set[int], number: int) -> Callable[[torch.Tensor], None]:
    def mark(_: torch.Tensor) -> None:
        seen.add(number)

    return mark
