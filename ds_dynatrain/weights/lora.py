"""LoRA of peft: base weights with the adapters added, or the adapters alone, by the names of peft's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.weights.outputs import Delta, Output

BASE, SAVED, ORIGINAL = ".base_layer.", ".modules_to_save.", ".original_module."
PAIRS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}


def is_peft(module: nn.Module) -> bool:
    """Return whether a module is a model of peft."""
    return hasattr(module, "peft_config") and hasattr(module, "base_model")


def base_of(module: nn.Module) -> nn.Module:
    """Return the model inside of peft's; the module itself if it is none of peft's."""
    found: nn.Module = module.get_base_model() if is_peft(module) else module  # type: ignore[operator]
    return found


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a map from name to persistent buffer of a model. A peft wrapper is removed first."""
    model = base_of(module)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    named = ((name.replace(BASE, "."), held) for name, held in model.state_dict().items() if name not in parameters)
    return {name: held for name, held in named if isinstance(held, torch.Tensor)}


def adapters(module: nn.Module, outputs: Sequence[Output]) -> list[Output]:
    """Return the outputs that belong to the active adapter, by the names of peft's checkpoints.

    Raise ConfigError for a model without an adapter, or with several that are active.
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
    """Return the outputs of the model inside of peft's, with the active adapter added; the same ones without peft.

    Raise UnsupportedError for adapters other than low-rank terms of linear layers and embeddings.
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
    """Yield the layers that peft has wrapped, with their paths.

    Raise UnsupportedError for other ones than LoRA's, and for LoRA's own around a bare parameter.
    """
    for path, part in module.named_modules():
        if hasattr(part, "base_layer"):
            if not hasattr(part, "lora_A") or hasattr(part, "parameter_name"):
                raise UnsupportedError(
                    f'{path}: adapters of {type(part).__name__} cannot be merged here; give names="adapters"'
                )
            yield path, part


def _deltas(path: str, part: Any, name: str, known: dict[str, Output]) -> Iterator[Delta]:
    """Yield the low-rank term of a layer, if the adapter has one there that peft has not merged."""
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
    """Return the name of the active adapter."""
    names = list(module.active_adapters)
    if len(names) != 1:
        raise ConfigError(f"{len(names)} adapters are active: {', '.join(names)}; activate one with set_adapter")
    return str(names[0])
