"""A `PipelineModule` that was built in stages, as DeepSpeed's own scripts build it: a process has one stage's layers.

It gets all layers, so that it is like one of `num_stages=1`; those of other stages are built from their specs and have
no memory, but for buffers. What counts for a layer is what its owner has, the first process of the first stage with it:
values, `requires_grad`, buffers. Lists of parameters, which each process has made of its own stage's, are put together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as td
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynatrain.adapters.children import without_memory
from ds_dynatrain.adapters.device import HOST, compute_device
from ds_dynatrain.adapters.meta import seeded
from ds_dynatrain.adapters.pipeline import giving, is_pipeline, layer_of
from ds_dynatrain.adapters.stage_module import build_layers
from ds_dynatrain.errors import ConfigError, UnsupportedError

Exchange = Callable[[Any], Mapping[int, Any]]
"""Posts a record of this process, plain JSON, and gives those of all, by their numbers in the launch."""
Lists = Sequence[list[nn.Parameter]]


def start_stages(model: Any, named: int | None) -> int:
    """The number of stages to start with: `named` by `dynatrain.layout`, else that of the module.

    ConfigError if the module was built in stages, and in another number of them.
    """
    built = int(model.num_stages) if is_pipeline(model) else 1
    if built > 1 and named not in (None, built):
        raise ConfigError(
            f"dynatrain.layout.pipe is {named} and the PipelineModule was built with num_stages={built}; leave "
            "dynatrain.layout.pipe out, or build the module with num_stages=1"
        )
    return named or built


def put_together(model: Any, lists: Lists, exchange: Exchange) -> dict[int, int]:
    """Give a module that was built in stages all its layers; which process has the first value of each parameter.

    By the parameter's id; nothing for another module, which is left as it is. lists: of parameters that the caller has,
    of an optimizer's groups say; each process has listed those of its own stage, and they get those of all, in place.
    `parts` stays as the user's module had it.

    ConfigError where processes have other numbers of lists; UnsupportedError for what cannot be put together.
    """
    if not is_pipeline(model) or model.num_stages == 1:
        return {}
    record = _record(model, lists)
    first_of = [min(model._topo.filter_match(pipe=stage)) for stage in range(model.num_stages)]
    owners = {title: first_of[stage] for title, stage in _first_stages(model).items()}
    _complete(model)
    record["buffers"] = {name: _mark(held) for name, held in model.named_buffers()}
    records = exchange(record)
    _list_all(model, lists, records)
    _equal_buffers(model, owners, records)
    found = {}
    for name, held in model.named_parameters():
        found[id(held)] = owners.get(layer_of(name), 0)
        held.requires_grad_(name not in records[found[id(held)]]["frozen"])
    return found


def _record(model: PipelineModule, lists: Lists) -> dict[str, Any]:
    """What this process knows of its own stage."""
    names = {id(held): name for name, held in model.named_parameters()}
    return {
        "lists": [[names[id(held)] for held in listed if id(held) in names] for listed in lists],
        "frozen": [name for name, held in model.named_parameters() if not held.requires_grad],
    }


def _first_stages(model: PipelineModule) -> dict[str, int]:
    """The first stage that has each layer, by what its parameters' names begin with."""
    found: dict[str, int] = {}
    for number, spec in enumerate(model._layer_specs):
        title = f"tied_modules.{spec.key}" if isinstance(spec, TiedLayerSpec) else str(number)
        found.setdefault(title, model.stage_owner(number))
    return found


def _complete(model: PipelineModule) -> None:
    """Build the layers of other stages, without values, and let go of the groups that share ties."""
    dtype = next((held.dtype for held in model.parameters() if held.is_floating_point()), None)
    tied = dict(model.tied_modules.items())
    specs = []
    for number, spec in enumerate(model._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in tied:
                tied[spec.key] = _built(spec, number, dtype)
            specs.append(giving(spec, partial(_same, tied[spec.key])))
        elif isinstance(spec, LayerSpec):
            here = model._modules.get(str(number))
            specs.append(giving(spec, partial(_same, _built(spec, number, dtype) if here is None else here)))
        else:
            specs.append(spec)
    for tie in model.tied_comms.values():
        td.destroy_process_group(tie["group"])
    parts, model._layer_specs, model.tied_comms = model.parts, specs, {}
    build_layers(model, [0, len(specs)], 0)
    model.parts = parts


def _built(spec: LayerSpec, number: int, dtype: torch.dtype | None) -> nn.Module:
    """A layer of another stage in the type that those of this one have; the process's random streams stay."""
    with seeded(f"layer {number}"):
        layer: nn.Module = spec.build()
    first = next((held.dtype for held in layer.parameters() if held.is_floating_point()), None)
    return without_memory(layer if first in (None, dtype) else layer.to(dtype))


def _same(layer: nn.Module) -> nn.Module:
    return layer


def _list_all(model: nn.Module, lists: Lists, records: Mapping[int, Any]) -> None:
    """Put into each list what any process has in the list of that number, in the module's order."""
    for member, record in sorted(records.items()):
        if len(record["lists"]) != len(records[0]["lists"]):
            raise ConfigError(
                f"{len(record['lists'])} optimizer groups on member {member} and {len(records[0]['lists'])} on member "
                "0: give every process all groups, also those of which its stage has no parameter"
            )
    place: dict[str, int] = {}
    for member, record in sorted(records.items()):
        for number, listed in enumerate(record["lists"]):
            for name in listed:
                if place.setdefault(name, number) != number:
                    raise ConfigError(
                        f"{name!r} is in optimizer group {number} on member {member} and in group {place[name]} on "
                        "another: group parameters alike on every process"
                    )
    named = dict(model.named_parameters())
    known = set(map(id, named.values()))
    for number, listed in enumerate(lists):
        others = [held for held in listed if id(held) not in known]
        listed[:] = [*(held for name, held in named.items() if place.get(name) == number), *others]


def _equal_buffers(model: nn.Module, owners: Mapping[str, int], records: Mapping[int, Any]) -> None:
    """Every process takes the owner's value of a buffer that differs: one that a constructor draws, say.

    All of them are on the device then, as DeepSpeed has put those of the process's own stage.
    """
    for name, held in model.named_buffers():
        marks = [record["buffers"][name] for record in records.values()]
        if any(mark[:2] != marks[0][:2] for mark in marks):
            raise UnsupportedError(
                f"buffer {name!r} has another shape or type where another stage builds its layer; register it with "
                "one shape and type on all stages"
            )
        if any(mark != marks[0] for mark in marks):
            value = held.detach().to(HOST, copy=True)  # some have it on the device by now, others do not
            td.broadcast(value, owners.get(layer_of(name), 0))
            held.copy_(value)
        held.data = held.data.to(compute_device())


def _mark(held: torch.Tensor) -> list[str]:
    """Shape, type and digest of a buffer."""
    flat = held.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return [str(tuple(held.shape)), str(held.dtype), hashlib.blake2b(flat.numpy().tobytes()).hexdigest()]
