"""What some modules of a model without stages take on this rank, in the steps that are timed, and all the rest.

A pass is a row of marks: from this moment on, the time is that module's, or the rest's. Forward, a module's time is
that of its call. Backward it begins when the gradient of what the module gave arrives, and ends when that of what it
was given does; a module whose inputs need no gradient has what is left of the pass, until another one's begins. Hooks
are on the modules in the forward passes of a window alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_dynatrain.adapters.compiled import compiled_by_wrapping, compiled_in_place
from ds_dynatrain.adapters.device import synchronize
from ds_dynatrain.balance.adapters.timing import Floats, StageTimes, UpdateTimer, between, now
from ds_dynatrain.errors import ConfigError

_Mark = tuple[int, Any]
"""A module, and the moment from which on time is its; the last mark of a pass ends it."""


def children_of(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of these names; ConfigError for none, one that is not there, is in another one, or is compiled."""
    known = dict(model.named_modules(remove_duplicate=False))
    found = {name: known[name] for name in names if name in known and name}
    if not names or len(found) < len(names):
        strange = next((name for name in names if name not in found or names.count(name) > 1), "")
        raise ConfigError(
            f"engine.meter: {strange!r} is no module of the model, or is named twice; name each "
            f"once, of {', '.join(name for name in known if name)[:300]}"
        )
    parts = [(name, part) for name, module in found.items() for part in module.modules()]
    for (one, part), (other, same) in itertools.combinations(parts, 2):
        if part is same:
            raise ConfigError(
                f"engine.meter: {one!r} and {other!r} share a module, so time would count twice; name one of the two"
            )
    refuse_compiled(model)
    return found


def refuse_compiled(model: nn.Module) -> None:
    """ConfigError if anything of it is compiled."""
    if names := compiled_in_place(model) or compiled_by_wrapping(model):
        raise ConfigError(
            f"engine.meter: {names[0]!r} is compiled, and hooks would compile it again; leave it out of engine.meter, "
            "or do not compile it"
        )


class ChildTimer:
    """The clock of some modules of an engine's model. optimizer: the one that steps the elements, without ZeRO."""

    def __init__(self, optimizer: torch.optim.Optimizer, children: Mapping[str, nn.Module]) -> None:
        self._updates, self._children, self._rest = UpdateTimer(optimizer), tuple(children.values()), len(children)
        self._passes: tuple[list[tuple[list[_Mark], float]], ...] = [], []
        self._marks: list[_Mark] | None = None
        """The marks of the pass that is under way."""
        self._given: list[torch.Tensor] = []
        """What the modules have given in the forward pass that is under way."""

    def timing(self) -> AbstractContextManager[None]:
        """Do nothing: a step is several calls."""
        return nullcontext()

    @contextmanager
    def passing(self, is_backward: bool, share: float) -> Iterator[None]:
        """Time a pass. share: its samples, by those of a micro-batch as the profile counts them."""
        marks = self._marks = [(self._rest, now())]
        try:
            with nullcontext() if is_backward else self._hooked():
                yield
            self._at(self._rest)
            self._passes[is_backward].append((marks, share))
        finally:
            self._marks, self._given = None, []

    def updating(self) -> AbstractContextManager[None]:
        """Time the optimizer's step."""
        return self._updates.timing()

    def times(self) -> StageTimes:
        """Return the times of all passes so far, the rest behind the modules, once the device has done them."""
        synchronize()
        forward, backward = (self._seconds(each) for each in self._passes)
        none = (0,) * (self._rest + 1)
        return StageTimes(forward, backward, self._updates.seconds, self._updates.stepped, none, none)

    def _seconds(self, passes: list[tuple[list[_Mark], float]]) -> Floats:
        """[passes, modules and the rest] of a whole micro-batch each; those without a sample of their own count
        nothing.
        """
        counted = [(marks, share) for marks, share in passes if share]
        found = np.zeros((len(counted), self._rest + 1))
        for row, (marks, share) in zip(found, counted, strict=True):
            for (whose, begin), (_, end) in itertools.pairwise(marks):
                row[whose] += between(begin, end) / share
        return found

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number, child in enumerate(self._children):
                before = child.register_forward_pre_hook(partial(self._begin, number), with_kwargs=True)
                after = child.register_forward_hook(partial(self._end, number))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _begin(self, number: int, child: nn.Module, inputs: Any, named: Any) -> None:
        self._hook_gradients((inputs, named), self._rest)  # but where another one's begins with this gradient
        self._at(number)

    def _end(self, number: int, child: nn.Module, inputs: Any, outputs: Any) -> None:
        self._at(self._rest)
        self._given += self._hook_gradients(outputs, number)

    def _hook_gradients(self, tensors: Any, whose: int) -> list[torch.Tensor]:
        """Hook the gradients of those tensors that no module has given so far, and return them."""
        leaves = [each for each in _tensors(tensors) if each.requires_grad]
        known = {id(each) for each in self._given}
        found = [each for each in leaves if id(each) not in known and not isinstance(each, nn.Parameter)]
        for tensor in found:
            tensor.register_hook(partial(self._at, whose))
        return found

    def _at(self, whose: int, _: Any = None) -> None:
        """Count time for a module, or for the rest, from now on."""
        if self._marks is not None:
            self._marks.append((whose, now()))


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    """A tensor, or those in lists, tuples and dictionaries, such as the outputs of transformers."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from _tensors(tuple(given.values()))
    elif isinstance(given, list | tuple):
        for part in given:
            yield from _tensors(part)
