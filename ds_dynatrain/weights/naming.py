"""Names, shapes and order of the output tensors.

Names are converted in three steps. Experts that DeepSpeed has converted become the tensors of the user's model again.
Layers that LoRA has wrapped become the original layers. Names in memory become those of a transformers checkpoint, in
which, for example, each expert has a tensor of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ds_dynatrain.weights.outputs import AFTER, BEFORE, Delta, Names, Output, TensorRun

MOST_NUMBERS = 1 << 22
"""Maximum number of elements in one call of transformers' conversion."""


def outputs_of(
    module: nn.Module, shaper: Any, tensors: Sequence[LogicalTensor], has_stages: bool, names: Names
) -> list[Output]:
    """Return the output tensors of a model, ordered by layer. The result is the same on every rank.

    module: this rank's module.
    shaper: the engine's shaper, which knows the experts that DeepSpeed has converted.
    has_stages: whether the module has only the layers of one pipeline stage.
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
        return adapters(module, found)
    if names != "hf":
        raise ConfigError(f'names={names!r}; give "hf", "adapters", "module", a mapping or a function')
    if hasattr(shaper, "user_tensors"):
        found = by_user(found, shaper.user_tensors())
    model = base_of(module)
    return in_checkpoint(model, untied(model, merged(module, found)))


def renamed(name: str, names: Mapping[str, str] | Callable[[str], str]) -> str:
    """Return the output name of a logical tensor. Raises ConfigError if a mapping has no entry for the name."""
    if not isinstance(names, Mapping):
        return names(name)
    if name not in names:
        raise ConfigError(f"names= has no name for {name!r}; give one for each parameter of the model")
    return names[name]


# ---- the order -------------------------------------------------------------------------------------------------------


def in_order(tensors: Sequence[LogicalTensor], order: Sequence[str]) -> list[tuple[int, str]]:
    """Return (tensor number, layer name) of all logical tensors, ordered by layer.

    The name of a layer is the part of a parameter's name up to the first number. Tensors outside the layers come before
    all layers or, if they follow the first layer in the model, after all layers.

    order: the names of the parameters in the order of the model.
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
    """Return the name of the layer to which a parameter belongs; "" if it belongs to no layer.

    It ends with the first number in the parameter's name that is not the number of an expert.
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit() and not (at and parts[at - 1].endswith("experts")):
            return ".".join(parts[: at + 1])
    return ""


# ---- the user's model ------------------------------------------------------------------------------------------------


def by_user(outputs: Sequence[Output], user: Iterable[Any]) -> list[Output]:
    """Return the outputs, with the user's original tensors instead of the tensors into which DeepSpeed converted them.

    user: the original tensors; see `UserTensor` in `adapters.model.auto_ep`.
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
    """Return the outputs with each tied tensor renamed to the name under which transformers saves it."""
    ties, found = getattr(model, "all_tied_weights_keys", {}), list(outputs)
    names = {each.name for each in found}
    return [
        replace(each, name=kept) if (kept := ties.get(each.name, each.name)) not in names else each for each in found
    ]


def in_checkpoint(model: nn.Module, outputs: Sequence[Output]) -> list[Output]:
    """Return the outputs in the form of a transformers checkpoint. For other models, the result equals `outputs`.

    Raises UnsupportedError, naming the tensor, if transformers' conversion does more than rearrange runs of elements.
    """
    classes = {f"{each.__module__}.{each.__qualname__}" for each in type(model).__mro__}
    if "transformers.modeling_utils.PreTrainedModel" not in classes:  # importing transformers takes seconds
        return list(outputs)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5, names in memory and in the checkpoint are the same
        return list(outputs)
    found, together = list[Output](), list[Output]()
    # several layers per call, because each call walks over all modules
    for _, layer in groupby(outputs, lambda each: each.layer):
        together += layer
        if sum(math.prod(_thin(each.shape)) for each in together) > MOST_NUMBERS:
            found += _converted(together, partial(revert_weight_conversion, model))
            together = []
    return found + _converted(together, partial(revert_weight_conversion, model))


def _converted(
    outputs: list[Output], convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> list[Output]:
    """Return the output tensors that `convert` makes from the given ones.

    The conversion is applied to tensors filled with distinct numbers, two per row of a matrix, which show where each
    row goes.
    """
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
    """Return a shape with at most two columns. Conversions keep rows whole, so two numbers identify a row."""
    return (*shape[:-1], 2) if len(shape) > 1 and shape[-1] > 2 else shape


def _traced(name: str, held: torch.Tensor, outputs: Sequence[Output], bases: Ints) -> Output:
    """Return the output that corresponds to `held`, a converted tensor whose numbers show where its elements come from.

    bases: the first number in each of `outputs`, followed by the end of the last one.
    """
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


# ---- LoRA of peft ----------------------------------------------------------------------------------------------------

BASE, SAVED, ORIGINAL = ".base_layer.", ".modules_to_save.", ".original_module."
PAIRS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}


def is_peft(module: nn.Module) -> bool:
    """Return whether a module is a model that peft has wrapped."""
    return hasattr(module, "peft_config") and hasattr(module, "base_model")


def base_of(module: nn.Module) -> nn.Module:
    """Return the model that a peft model wraps, or the module itself if it is not a peft model."""
    found: nn.Module = module.get_base_model() if is_peft(module) else module  # type: ignore[operator]
    return found


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a map from name to persistent buffer of a model, under the names without a peft wrapper."""
    model = base_of(module)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    named = ((name.replace(BASE, "."), held) for name, held in model.state_dict().items() if name not in parameters)
    return {name: held for name, held in named if isinstance(held, torch.Tensor)}


def adapters(module: nn.Module, outputs: Sequence[Output]) -> list[Output]:
    """Return the outputs of the active adapter, under the names that peft uses in checkpoints.

    Raises ConfigError if the model has no adapter, or several active ones.
    """
    if not is_peft(module):
        raise ConfigError(f'names="adapters": {type(module).__name__} is no model of peft; give names="hf"')
    name = _only_active(module)
    found = []
    for each in outputs:
        path, there, rest = f"{each.name}.".partition(f".{name}.")
        if there:
            path = path.removesuffix(SAVED.rstrip("."))
            found.append(replace(each, name=f"{path}.{rest}".rstrip(".")))
    return found


def merged(module: nn.Module, outputs: Sequence[Output]) -> list[Output]:
    """Return the outputs of a peft-wrapped model with the active adapter merged in; without peft, return `outputs`.

    Raises UnsupportedError if an adapter is not a low-rank term of a linear layer or an embedding.
    """
    if not is_peft(module):
        return list(outputs)
    name, known = _only_active(module), {each.name: each for each in outputs}
    prefix = next(path for path, part in module.named_modules() if part is base_of(module)) + "."
    deltas = {path: tuple(_deltas(path, part, name, known)) for path, part in _layers(module)}
    found = []
    for each in outputs:
        path, is_base, rest = each.name.partition(BASE)
        whole, saved, kept = each.name.partition(f"{SAVED}{name}.")
        if is_base:
            added = deltas.get(path, ()) if rest == "weight" else ()
            found.append(replace(each, name=f"{path}.{rest}".removeprefix(prefix), deltas=added))
        elif saved:
            found.append(replace(each, name=f"{whole}.{kept}".removeprefix(prefix)))
        elif ORIGINAL not in each.name and SAVED not in each.name and ".lora_" not in each.name:
            found.append(replace(each, name=each.name.removeprefix(prefix)))
    return found


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, layer) for each layer that peft has wrapped.

    Raises UnsupportedError for adapters other than LoRA, and for LoRA around a bare parameter.
    """
    for path, part in module.named_modules():
        if hasattr(part, "base_layer"):
            if not hasattr(part, "lora_A") or hasattr(part, "parameter_name"):
                raise UnsupportedError(
                    f'{path}: adapters of {type(part).__name__} cannot be merged here; give names="adapters"'
                )
            yield path, part


def _deltas(path: str, part: Any, name: str, known: dict[str, Output]) -> Iterator[Delta]:
    """Yield the low-rank term that the adapter `name` adds to a layer, unless peft has already merged it.

    path: the path of the layer.
    part: the layer.
    known: all outputs, keyed by name.
    """
    if part.merged:
        return
    if getattr(part, "lora_variant", None) or any(getattr(part, "lora_bias", {}).values()):
        raise UnsupportedError(
            f'{path}: an adapter that is more than a low-rank term cannot be merged here; give names="adapters"'
        )
    for down, up in PAIRS.items():
        ends = [f"{path}.{each}.{name}" for each in (down, up)]
        pair = [known.get(f"{end}.weight") or known.get(end) for end in ends]
        if pair[0] is not None and pair[1] is not None:
            if f"{path}{BASE}weight" not in known or len(pair[0].shape) != 2 or len(pair[1].shape) != 2:
                raise UnsupportedError(
                    f"{path}: an adapter of {type(part).__name__} with factors of shape {pair[0].shape} and "
                    f'{pair[1].shape} cannot be merged here; give names="adapters"'
                )
            is_transposed = down == "lora_embedding_A" or bool(getattr(part, "fan_in_fan_out", False))
            yield Delta(pair[0], pair[1], float(part.scaling[name]), is_transposed)


def _only_active(module: Any) -> str:
    """Return the name of the active adapter. Raises ConfigError unless exactly one is active."""
    names = list(module.active_adapters)
    if len(names) != 1:
        raise ConfigError(f"{len(names)} adapters are active: {', '.join(names)}; activate one with set_adapter")
    return str(names[0])
