"""Names, shapes and order of the output tensors.

Names pass three stations. Experts that DeepSpeed has converted go back to the tensors of the user's model. LoRA's
layers go back to the layers in them. transformers' own conversion leads from its names in memory to those of a
checkpoint, such as one tensor for each expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.space import LogicalTensor
from ds_dynatrain.space.interval import Ints, chains
from ds_dynatrain.weights import lora
from ds_dynatrain.weights.outputs import AFTER, BEFORE, Names, Output, TensorRun

MOST_NUMBERS = 1 << 22
"""Numbers that stand for elements in one call of transformers' conversion."""


def outputs_of(
    module: nn.Module, shaper: Any, tensors: Sequence[LogicalTensor], has_stages: bool, names: Names
) -> list[Output]:
    """Return the output tensors of a model, layer after layer; the same on every rank.

    module: this rank's. shaper: the engine's, which knows the experts that DeepSpeed has converted. has_stages: whether
    the module has the layers of a pipeline stage alone.
    """
    order = [] if has_stages else [name for name, _ in module.named_parameters()]
    found = [
        Output(tensors[number].name, tensors[number].shape, (TensorRun(number, 0, tensors[number].numel),), layer)
        for number, layer in in_order(tensors, order)
    ]
    if not isinstance(names, str):
        return [replace(each, name=renamed(each.name, names)) for each in found]
    if names == "module":
        return found
    if names == "adapters":
        return lora.adapters(module, found)
    if names != "hf":
        raise ConfigError(f'names={names!r}; give "hf", "adapters", "module", a mapping or a function')
    if hasattr(shaper, "user_tensors"):
        found = by_user(found, shaper.user_tensors())
    model = lora.base_of(module)
    return in_checkpoint(model, untied(model, lora.merged(module, found)))


def renamed(name: str, names: Mapping[str, str] | Callable[[str], str]) -> str:
    """Return the output name of a logical tensor; raise ConfigError for a name that a mapping lacks."""
    if not isinstance(names, Mapping):
        return names(name)
    if name not in names:
        raise ConfigError(f"names= has no name for {name!r}; give one for each parameter of the model")
    return names[name]


# ---- the order -------------------------------------------------------------------------------------------------------


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


# ---- the user's model ------------------------------------------------------------------------------------------------


def by_user(outputs: Sequence[Output], user: Iterable[Any]) -> list[Output]:
    """Return the outputs with the user's tensors in place of those that DeepSpeed has converted.

    user: see `UserTensor` in `adapters.model.auto_ep`.
    """
    known, made = {each.name: each for each in outputs}, dict[str, list[Output]]()
    replaced = set[str]()
    for tensor in user:
        runs = (run for name, start, stop, at in tensor.parts for run in known[name].runs_of(start, stop, at))
        first = tensor.parts[0][0]
        made.setdefault(first, []).append(Output(tensor.name, tensor.shape, tuple(runs), known[first].layer))
        replaced |= {name for name, *_ in tensor.parts}
    found = []
    for each in outputs:
        found += made.get(each.name, [] if each.name in replaced else [each])
    return found


# ---- the checkpoint of transformers ----------------------------------------------------------------------------------


def untied(model: nn.Module, outputs: Iterable[Output]) -> list[Output]:
    """Return the outputs with each tied tensor under the name that transformers saves it by."""
    ties, found = getattr(model, "all_tied_weights_keys", {}), list(outputs)
    names = {each.name for each in found}
    return [
        replace(each, name=kept) if (kept := ties.get(each.name, each.name)) not in names else each for each in found
    ]


def in_checkpoint(model: nn.Module, outputs: Sequence[Output]) -> list[Output]:
    """Return the outputs as transformers' checkpoint of a model has them; the same list for any other model.

    Raise UnsupportedError, naming the tensor, for a conversion that is not made of runs of elements.
    """
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 the names in memory are those of the checkpoint
        return list(outputs)
    if not isinstance(model, PreTrainedModel):
        return list(outputs)
    found, together = list[Output](), list[Output]()
    for _, layer in groupby(outputs, lambda each: each.layer):  # many layers in one call, which walks over all modules
        together += layer
        if sum(math.prod(_thin(each.shape)) for each in together) > MOST_NUMBERS:
            found += _converted(together, partial(revert_weight_conversion, model))
            together = []
    return found + _converted(together, partial(revert_weight_conversion, model))


def _converted(
    outputs: list[Output], convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> list[Output]:
    """Return what a conversion makes of outputs, by giving it tensors of numbers: two for each row of a matrix."""
    shapes = [_thin(each.shape) for each in outputs]
    bases = np.cumsum([0, *(math.prod(shape) + 1 & ~1 for shape in shapes)])
    state = {
        each.name: torch.arange(int(base), int(base) + math.prod(shape)).view(shape)
        for each, shape, base in zip(outputs, shapes, bases[:-1], strict=True)
    }
    known, made = {each.name: each for each in outputs}, list[Output]()
    for name, held in convert(dict(state)).items():
        made.append(known[name] if state.get(name) is held else _traced(name, held, outputs, bases))
    order = {number: at for at, each in enumerate(outputs) for number in each.tensors}
    return sorted(made, key=lambda each: min((order[number] for number in each.tensors), default=0))


def _thin(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with two columns in place of more; conversions keep rows whole, so two numbers tell them apart."""
    return (*shape[:-1], 2) if len(shape) > 1 and shape[-1] > 2 else shape


def _traced(name: str, held: torch.Tensor, outputs: Sequence[Output], bases: Ints) -> Output:
    """Return the output of which a conversion has made `held`, by the numbers in it."""
    numbers = held.reshape(-1).numpy()
    first = np.searchsorted(bases, numbers, side="right") - 1
    parts: list[Output] = [outputs[number] for number in np.unique(first).tolist()]
    whole, is_thin = parts[0], _thin(parts[0].shape) != parts[0].shape
    if len(parts) == 1 and held.shape == _thin(whole.shape) and (np.diff(numbers) == 1).all():
        return replace(whole, name=name)
    unit, width = (2, whole.shape[-1]) if is_thin else (1, 1)
    rows, owners = numbers.reshape(-1, unit), first.reshape(-1, unit)[:, 0]
    are_whole = unit == 1 or bool(((rows[:, 1] - rows[:, 0] == 1) & (rows[:, 0] % 2 == 0)).all())
    if not are_whole or any(each.deltas or each.shape[-1] != whole.shape[-1] for each in parts):
        raise UnsupportedError(
            f"{name!r}: transformers converts it in another way than by rows; "
            'give names="module" for the names of the module that is trained'
        )
    begins, ends = chains((np.diff(rows[:, 0]) == unit) & (np.diff(owners) == 0), len(rows))
    runs = list[TensorRun]()
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        row = (int(rows[begin, 0]) - int(bases[owners[begin]])) // unit
        runs += outputs[int(owners[begin])].runs_of(row * width, (row + end - begin + 1) * width, begin * width)
    shape = (*held.shape[:-1], width) if is_thin else tuple(held.shape)
    return Output(name, shape, tuple(runs), whole.layer)
