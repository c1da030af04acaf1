"""Which `deepspeed.zero.GatheredParameters` blocks are open: a switch must not happen inside of one.

An evaluation may leave ZeRO-3's parameters gathered by DeepSpeed's own hooks: nobody relies on them, and a switch puts
them back. A `GatheredParameters` block of the user's is another thing: what he reads in it would vanish
under his hands, and its end would partition into memory that is gone. DeepSpeed keeps no list of them, so the class's
`__init__`, `__enter__` and `__exit__` are wrapped while an engine lives, and put back when it is destroyed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

_WRAPPED = ("__init__", "__enter__", "__exit__")
_ASKED = "_dynatrain_asked"


class GatherWatch:
    """The `GatheredParameters` blocks that are open over `parameters`, at whatever stage."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._mine = {id(parameter) for parameter in parameters}
        self._open: set[int] = set()
        self._own = {name: getattr(GatheredParameters, name) for name in _WRAPPED}
        for name in _WRAPPED:
            setattr(GatheredParameters, name, getattr(self, f"_{name.strip('_')}")(self._own[name]))

    @property
    def count(self) -> int:
        """Number of open blocks."""
        return len(self._open)

    def stop(self) -> None:
        """Put DeepSpeed's own methods back; a second call does nothing."""
        for name, own in self._own.items():
            setattr(GatheredParameters, name, own)
        self._own = {}
        self._open.clear()

    def _init(self, own: Any) -> Any:
        """Note which blocks ask for one of our parameters: below stage 3 DeepSpeed makes nothing of them."""

        @functools.wraps(own)
        def wrapped(block: Any, params: Any, *arguments: Any, **named: Any) -> None:
            listed = [params] if isinstance(params, torch.Tensor) else params
            listed = list(listed) if isinstance(listed, Iterable) else listed
            own(block, listed, *arguments, **named)
            asked = arguments[2] if len(arguments) > 2 else named.get("enabled", True)
            block.__dict__[_ASKED] = bool(asked) and any(id(each) in self._mine for each in listed)

        return wrapped

    def _enter(self, own: Any) -> Any:
        @functools.wraps(own)
        def wrapped(block: Any) -> Any:
            entered = own(block)
            if block.__dict__.get(_ASKED, False):
                self._open.add(id(block))
            return entered

        return wrapped

    def _exit(self, own: Any) -> Any:
        @functools.wraps(own)
        def wrapped(block: Any, *error: Any) -> Any:
            self._open.discard(id(block))
            return own(block, *error)

        return wrapped
