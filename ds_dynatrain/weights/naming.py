"""Output tensors: the names, shapes and order in which weights leave the trainer, and what they are made of.

An output tensor is made of runs of logical tensors. Most are one logical tensor under its own name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.space import LogicalTensor

BEFORE, AFTER = "before all layers", "after all layers"


@dataclass(frozen=True)
class TensorRun:
    """Elements [start, stop) of logical tensor number `tensor`, which lie from element `at` in an output tensor."""

    tensor: int
    start: int
    stop: int
    at: int = 0


@dataclass(frozen=True)
class Output:
    """An output tensor. layer: the name of the layer that it belongs to; outputs of one layer follow one another."""

    name: str
    shape: tuple[int, ...]
    runs: tuple[TensorRun, ...]
    layer: str = BEFORE

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Numbers of the logical tensors that the output is made of."""
        return tuple(run.tensor for run in self.runs)


Names = str | Mapping[str, str] | Callable[[str], str]
"""How outputs are named: "hf", a name for each logical tensor, or a function from one name to the other."""


def outputs_of(tensors: Sequence[LogicalTensor], order: Iterable[str], names: Names) -> list[Output]:
    """Return the output tensors of a model, layer after layer; the same on every rank.

    order: names of parameters in the order of the model.
    """
    numbers = in_order(tensors, list(order))
    outputs = []
    for number, layer in numbers:
        tensor = tensors[number]
        outputs.append(Output(renamed(tensor.name, names), tensor.shape, (TensorRun(number, 0, tensor.numel),), layer))
    return outputs


def renamed(name: str, names: Names) -> str:
    """Return the output name of a logical tensor; raise ConfigError for a name that a mapping lacks."""
    if isinstance(names, str):
        return name
    if callable(names):
        return names(name)
    if name not in names:
        raise ConfigError(f"names= has no name for {name!r}; give one for each parameter of the model")
    return names[name]


def in_order(tensors: Sequence[LogicalTensor], order: Sequence[str]) -> list[tuple[int, str]]:
    """Return (number, layer) of all logical tensors, layer after layer.

    A layer is named by the path up to the first number in a name. Tensors outside of layers come before all layers, or
    after them where the model has them after its first layer.
    """
    names = list(dict.fromkeys((*order, *(tensor.name for tensor in tensors))))
    place = {name: at for at, name in enumerate(names)}
    layers = list(dict.fromkeys(filter(None, map(layer_of, names))))
    first = next((place[name] for name in names if layer_of(name)), len(names))
    ranked = {BEFORE: -1, AFTER: len(layers), **{layer: at for at, layer in enumerate(layers)}}
    found = []
    for number, tensor in enumerate(tensors):
        layer = layer_of(tensor.name) or (BEFORE if place[tensor.name] < first else AFTER)
        found.append((ranked[layer], place[tensor.name], number, layer))
    return [(number, layer) for _, _, number, layer in sorted(found)]


def layer_of(name: str) -> str:
    """Return the path of the layer that a parameter belongs to, by its first number that numbers no expert; "" if it
    belongs to none.
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit() and not (at and parts[at - 1].endswith("experts")):
            return ".".join(parts[: at + 1])
    return ""
