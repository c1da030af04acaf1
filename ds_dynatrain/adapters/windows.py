"""A watch on open `deepspeed.zero.GatheredParameters` blocks: a switch must not happen inside one.

An evaluation may leave ZeRO-3's parameters gathered by DeepSpeed's own hooks: no code relies on them, and a switch puts
them back. A user's own `GatheredParameters` block is different: the values that it reads would vanish during a switch,
and its end would partition into memory that is gone. DeepSpeed keeps no list of open blocks, so the class's
`__init__`, `__enter__` and `__exit__` are wrapped while an engine lives, and put back when it is destroyed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

from ds_dynatrain.adapters.replaced import replaced

_ASKED = "_dynatrain_asked"


class GatherWatch:
    """A watch on the `GatheredParameters` blocks over some parameters, at whatever stage.

    open: ids of the open blocks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        mine = {id(parameter) for parameter in parameters}
        self.open: set[int] = set()
        self._wrapped = ExitStack()
        init, enter, leave = GatheredParameters.__init__, GatheredParameters.__enter__, GatheredParameters.__exit__

        @functools.wraps(init)
        def note(block: Any, params: Any, *arguments: Any, **named: Any) -> None:
            """Note blocks that ask for one of our parameters, which DeepSpeed itself ignores below stage 3."""
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
        """Put DeepSpeed's own methods back; a second call does nothing."""
        self._wrapped.close()
        self.open.clear()
