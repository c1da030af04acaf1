"""Parameters on the meta device: drawn when the engine is built, module by module, the same on every member.

Each module's own parameters are made real, its `reset_parameters()` is called (torch's FSDP does so too) under a seed
that follows from the job's and the module's name, and only the shard of what was drawn is kept.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from ds_dynatrain.adapters.rng import further_streams, restore_further_streams, seed_accelerator
from ds_dynatrain.errors import UnsupportedError

ParamInit = Callable[[nn.Module], object]
WAY_OUT = "give its class a `reset_parameters()`, or pass `param_init_fn=` to initialize"


def drawing_modules(model: nn.Module, meta: set[int]) -> list[tuple[str, nn.Module, list[nn.Parameter]]]:
    """(name, module, its own parameters that are drawn in it) of each module that draws; a shared one is drawn once.

    meta: ids of the parameters that are, or were, on the meta device.
    """
    found, taken = [], set[int]()
    for name, module in model.named_modules():
        own = [held for held in module.parameters(recurse=False) if id(held) in meta - taken]
        if own:
            taken.update(id(held) for held in own)
            found.append((name, module, own))
    return found


def refuse_meta_buffers(model: nn.Module) -> None:
    """UnsupportedError, naming it, for a buffer on the meta device."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UnsupportedError(
                f"buffer {name!r} is on the meta device: make it real before initialize (a rotary table, running "
                "statistics)"
            )


def refuse_undrawable(model: nn.Module, param_init_fn: ParamInit | None) -> None:
    """UnsupportedError, naming it, for a parameter on the meta device that cannot be drawn."""
    meta = {id(held) for held in model.parameters() if held.is_meta}
    for name, module, own in drawing_modules(model, meta):
        mine = dict(module.named_parameters(recurse=False))
        first = next(key for key, held in mine.items() if held is own[0])
        title = f"{name}.{first}" if name else first
        if param_init_fn is None and not callable(getattr(module, "reset_parameters", None)):
            raise UnsupportedError(
                f"{title!r} is on the meta device, and {type(module).__name__} has no reset_parameters: {WAY_OUT}"
            )
        real = [key for key, held in mine.items() if not held.is_meta]
        if real:
            raise UnsupportedError(
                f"{title!r} is on the meta device and {real[0]!r} beside it is not: make both real, or none"
            )


def swap_in(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter data of another device and keep the object: optimizers and modules go on holding it."""
    other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)


def draw(
    seed: str,
    module: nn.Module,
    own: list[nn.Parameter],
    types: dict[int, torch.dtype],
    init: ParamInit | None,
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each of `own` with its value, flat; afterwards the module's parameters have no memory again.

    seed: what the draw follows from. types: element types of the values, by the parameters' ids. UnsupportedError where
    the module does not set one of them.
    """
    stand_ins = [(held, held.data) for held in module.parameters(recurse=False)]
    try:
        for held, stand_in in stand_ins:
            value = torch.empty(stand_in.shape, dtype=types.get(id(held), stand_in.dtype), device=stand_in.device)
            held.data = value.fill_(torch.nan) if value.is_floating_point() else value.zero_()
        with seeded(f"meta {seed}"), torch.no_grad():
            module.reset_parameters() if init is None else init(module)  # type: ignore[operator]
        titles = {id(held): key for key, held in module.named_parameters(recurse=False)}
        for held in own:
            value = held.data.reshape(-1)
            if value.is_floating_point() and value.isnan().any():
                raise UnsupportedError(
                    f"initialize: {titles[id(held)]!r} of {type(module).__name__} is on the meta device and was not "
                    f"set; {WAY_OUT}"
                )
            yield held, value
    finally:
        for held, stand_in in stand_ins:
            held.data = stand_in


@contextmanager
def seeded(what: str) -> Iterator[None]:
    """The default generators of torch, of DeepSpeed's accelerator, of numpy and Python are seeded in the block, and as
    they were after it. Those of other devices are let alone.
    """
    seed = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little") >> 1
    before = torch.get_rng_state(), np.random.get_state(), random.getstate(), further_streams()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds all devices
    seed_accelerator(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
        restore_further_streams(before[3])
