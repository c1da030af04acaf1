"""The user's model without its memory: what a rank's module is built from when its local shapes change.

Parameters are on the meta device. Buffers are real copies: a rotary table that is in no checkpoint is made in a
constructor, which is not run again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_dynatrain.errors import UnsupportedError

ModelFactory = Callable[[], nn.Module]
WAY_OUT = "pass `model_factory=`, a function that builds the model anew"

HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)
"""Those that a module calls in a step. They are left out of a template: they may hold anything, an engine say."""


@dataclass(frozen=True, eq=False)
class Template:
    """A module as it was before DeepSpeed altered it; it is never trained, and nobody else holds it.

    Tied parameters are tied, modules that stand in two places are one object, and the parameters' own attributes
    (DeepSpeed's flags for optimizers are such) are there. Hooks that a step calls are not.
    """

    module: nn.Module

    @classmethod
    def of(cls, module: nn.Module, factory: ModelFactory | None = None) -> Template:
        """The template of a module that DeepSpeed has not altered, other than by `zero.Init`.

        factory: builds the module anew, for one that cannot be copied.

        UnsupportedError, naming the part, for a module that cannot be copied or a factory of another one.
        """
        if factory is None:
            return cls(_copied(module))
        made = factory()
        wanted, found = _shapes(module), _shapes(made)
        different = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
        if different:
            name = different[0]
            raise UnsupportedError(
                f"initialize(model_factory=...) builds another model: {name!r} is {found.get(name)} in it and "
                f"{wanted.get(name)} in the one that initialize was given; build the same model in both"
            )
        return cls(_copied(made))

    def copy(self) -> nn.Module:
        """A module of its own: parameters on the meta device, buffers real."""
        return _copied(self.module)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(held, "ds_shape", held.shape)) for name, held in module.named_parameters()}


def _copied(module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for name, held in module.named_parameters():
        memo[id(held)] = _meta(name, held)
    for part in module.modules():
        memo.update({id(table): type(table)() for key in HOOKS if (table := part.__dict__.get(key)) is not None})
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise UnsupportedError(
            f"a template of {type(module).__name__} cannot be made: {_culprit(module, memo)} cannot be copied "
            f"({type(error).__name__}: {error}); {WAY_OUT}"
        ) from error


def _meta(name: str, held: nn.Parameter) -> nn.Parameter:
    if type(held) is not nn.Parameter:
        raise UnsupportedError(f"parameter {name!r} is a {type(held).__name__}, not a plain nn.Parameter; {WAY_OUT}")
    shape = getattr(held, "ds_shape", held.shape)
    made = nn.Parameter(torch.empty(shape, dtype=held.dtype, device="meta"), requires_grad=held.requires_grad)
    for key, value in held.__dict__.items():
        if not callable(value) and not key.startswith("ds_"):
            setattr(made, key, value)
    return made


def _culprit(module: nn.Module, memo: dict[int, Any]) -> str:
    """The innermost part of a module that does not let itself be copied, for a message."""
    for name, part in reversed(list(module.named_modules())):
        for key, value in part.__dict__.items():
            if key != "_modules":
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    return f"{key!r} of {name or 'the model'!r} ({type(part).__name__})"
    return "the model"
