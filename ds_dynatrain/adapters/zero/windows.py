"""Records that are checked between two steps: which parameters got a gradient, and which gather blocks are open.

ZeRO-3 steps a parameter that got no gradient with the last gradient that it had, so a hook records the parameters that
get one.

An evaluation may leave ZeRO-3's parameters gathered by DeepSpeed's own hooks. No code relies on these, and a switch
partitions them again. A user's own `GatheredParameters` block is different: the values that it reads would vanish
during a switch, and its end would partition into memory that is gone. DeepSpeed keeps no list of open blocks, so the
class's `__init__`, `__enter__` and `__exit__` are wrapped while an engine lives, and restored when the engine is
destroyed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.adapters.zero.logical_model import ModelMap

_ASKED = "_dynatrain_asked"


class GatherWatch:
    """A watch on the `GatheredParameters` blocks that contain some of these parameters, at any stage.

    open: ids of the open blocks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        mine = {id(parameter) for parameter in parameters}
        self.open: set[int] = set()
        self._wrapped = ExitStack()
        init, enter, leave = GatheredParameters.__init__, GatheredParameters.__enter__, GatheredParameters.__exit__

        @functools.wraps(init)
        def note(block: Any, params: Any, *arguments: Any, **named: Any) -> None:
            """Record whether a block asks for one of our parameters. Below stage 3, DeepSpeed ignores such a block."""
            listed = [params] if isinstance(params, torch.Tensor) else params
            listed = list(listed) if isinstance(listed, Iterable) else listed
            init(block, listed, *arguments, **named)
            asked = arguments[2] if len(arguments) > 2 else named.get("enabled", True)
            block.__dict__[_ASKED] = bool(asked) and any(id(each) in mine for each in listed)

        @functools.wraps(enter)
        def opened(block: Any) -> Any:
            entered = enter(block)
            if block.__dict__.get(_ASKED, False):
                self.open.add(id(block))
            return entered

        @functools.wraps(leave)
        def closed(block: Any, *error: Any) -> Any:
            self.open.discard(id(block))
            return leave(block, *error)

        for name, own in {"__init__": note, "__enter__": opened, "__exit__": closed}.items():
            self._wrapped.enter_context(replaced(GatheredParameters, name, own))

    def stop(self) -> None:
        """Put DeepSpeed's own methods back. A second call does nothing."""
        self._wrapped.close()
        self.open.clear()


class GradientWatch:
    """Hooks on the trainable parameters that record which parameters get a gradient.

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
