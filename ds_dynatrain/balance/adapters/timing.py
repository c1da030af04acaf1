"""The clock with which a rank's layers are timed, and the timer of a model without pipeline stages.

On a CPU the clock is the CPU time of this thread, because wall time says little when cores are shared. The time for
which the thread was ready to run while another one had its core is recorded separately: it makes a member slow, not a
layer. On an accelerator a time is an event on the current stream, which is read once the device has reached it.

A pass is recorded as a list of marks (a layer and a time): from a mark on, time is attributed to the mark's layer. In a
model without stages, the layers are the named modules, followed by the rest of the model. In a forward pass, a module's
time is that of its call. In a backward pass, a module's time begins when the gradient of its output arrives, and ends
when that of its input does. A module whose inputs need no gradient gets the remainder of the pass, until another
module's time begins. Modules have hooks only in the forward passes of a window. If no module is named, the time for
which an accelerator's stream waits for messages within a pass counts as well.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_dynatrain.adapters.groups.device import is_accelerated, synchronize
from ds_dynatrain.adapters.versions.compiled import compiled_by_wrapping, compiled_in_place
from ds_dynatrain.errors import ConfigError

Mark = tuple[int, Any]
"""The number of a layer, and the time from which time is attributed to that layer. The last mark ends the pass."""


@dataclass(frozen=True, eq=False)
class StageTimes:
    """The timings of one rank.

    forward: [passes, layers of the stage], the seconds of each forward pass.
    backward: [passes, layers of the stage], the seconds of each backward pass.
    step_seconds: the seconds in which the optimizer steps `stepped` elements, without norms and messages.
    stepped: the number of elements that the optimizer stepped.
    output_bytes: the bytes of each layer's output for one micro-batch.
    kept_bytes: the bytes that each layer's forward pass keeps for its backward pass. With activation checkpointing
        these are the inputs for recomputing the pass. 0 for a compiled layer.
    waits: [passes], the seconds for which another thread had the core, in the forward and in the backward passes.
    busy_seconds: the seconds of all passes, each taken to be as long as the median one, and of the optimizer.
    load_seconds: loading the samples of a micro-batch. This and the next two are times of this rank's thread, so 0 on
        accelerators.
    message_seconds: the time of one message between stages.
    beside_seconds: the rest of a step, outside passes, optimizer step, loading and messages.
    """

    forward: npt.NDArray[np.float64]
    backward: npt.NDArray[np.float64]
    step_seconds: float
    stepped: int
    output_bytes: Sequence[int]
    kept_bytes: Sequence[int]
    waits: tuple[npt.NDArray[np.float64], ...]
    busy_seconds: float
    load_seconds: float = 0.0
    message_seconds: float = 0.0
    beside_seconds: float = 0.0


def now() -> Any:
    """Return the current time of this thread's CPU clock or, on an accelerator, an event on the current stream."""
    if not is_accelerated():
        return time.thread_time()
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Return the seconds between two results of `now`.

    If they are events, the device must have reached the second one.
    """
    return end - begin if isinstance(begin, float) else 1e-3 * float(begin.elapsed_time(end))


def waited() -> float:
    """Return the seconds for which this thread has waited for a core so far.

    Returns 0 on an accelerator, whose events include such waits, and where the kernel does not count them.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return 0.0 if is_accelerated() else 1e-9 * int(os.read(file, 100).split()[1])
    finally:
        os.close(file)


class Timer:
    """Base class of the timers, which time this rank's layers during a window (a number of timed steps).

    optimizer: the optimizer inside ZeRO's optimizer, which steps the elements.
    layers: the number of layers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layers: int) -> None:
        self._optimizer, self._layers = optimizer, layers
        self._passes: tuple[list[tuple[list[Mark], float, float]], ...] = [], []
        """The forward passes and the backward passes, each as (its marks, its samples as a fraction of a micro-batch,
        the seconds for which it waited for a core)."""
        self._marks: list[Mark] | None = None
        """The marks of the current pass; None between passes."""
        self._updates: list[tuple[Any, Any]] = []
        self._began: Any = None
        self._stepped = 0
        """Number of elements stepped, over all steps of the optimizer."""

    def timing(self) -> AbstractContextManager[None]:
        """Return a context manager that times a whole step, if a step is one call."""
        return nullcontext()

    def passing(self, is_backward: bool, share: float) -> AbstractContextManager[None]:
        """Return a context manager that times one pass, if a step is several calls.

        share: the samples of this pass, divided by those of a micro-batch of the profile.
        """
        return nullcontext()

    def updating(self) -> AbstractContextManager[None]:
        """Return a context manager that times the optimizer's step, if that is a separate call."""
        return nullcontext()

    def times(self) -> StageTimes:
        """Return all timings once the device has finished. Bytes are 0 for a model without stages."""
        synchronize()
        none, updates = (0,) * self._layers, sum(between(*each) for each in self._updates)
        waits = tuple(np.array([wait / share for _, share, wait in passes if share]) for passes in self._passes)
        forward, backward = found = tuple(map(self._seconds, self._passes))
        shares = (sum(share for _, share, _ in passes) for passes in self._passes)
        busy = updates + sum(
            share * float(np.median(each.sum(axis=1))) for share, each in zip(shares, found, strict=True) if len(each)
        )
        return StageTimes(forward, backward, updates, self._stepped, none, none, waits, busy)

    @contextmanager
    def _timed_pass(self, layer: int, is_backward: bool, share: float = 1.0) -> Iterator[None]:
        """Context manager that times a pass. Time before the first and after the last layer is attributed to this
        layer.
        """
        waited_before, marks = waited(), [(layer, now())]
        self._marks = marks
        try:
            yield
            self._at(layer)
            self._passes[is_backward].append((marks, share, waited() - waited_before))
        finally:
            self._marks = None

    def _at(self, layer: int, _: Any = None) -> None:
        """Attribute time to the layer with this number from now on."""
        if self._marks is not None:
            self._marks.append((layer, now()))

    def _seconds(self, passes: list[tuple[list[Mark], float, float]]) -> npt.NDArray[np.float64]:
        """Return [passes, layers]: the seconds of each layer, scaled to a whole micro-batch.

        Passes in which this rank has no samples are left out.
        """
        counted = [(marks, share) for marks, share, _ in passes if share]
        found = np.zeros((len(counted), self._layers))
        for row, (marks, share) in zip(found, counted, strict=True):
            for (layer, begin), (_, end) in itertools.pairwise(marks):
                row[layer] += between(begin, end) / share
        return found

    @contextmanager
    def _timed_updates(self) -> Iterator[None]:
        """Context manager that times the optimizer's steps."""
        with ExitStack() as stack:
            stack.callback(self._optimizer.register_step_pre_hook(self._before_update).remove)
            stack.callback(self._optimizer.register_step_post_hook(self._after_update).remove)
            yield

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = [each for group in optimizer.param_groups for each in group["params"]]
        self._stepped += sum(each.numel() for each in held if each.grad is not None)
        self._began = now()

    def _after_update(self, *_: Any) -> None:
        self._updates.append((self._began, now()))


def children_of(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return a map from each name to the module of that name.

    Raises ConfigError if a name is missing or given twice, if two modules overlap, or if any part of the model is
    compiled.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    found = {name: known[name] for name in names if name in known and name}
    if not names or len(found) < len(names):
        strange = next((name for name in names if name not in found or names.count(name) > 1), "")
        raise ConfigError(
            f"engine.meter: {strange!r} is no module of the model, or is named twice; name each "
            f"once, of {', '.join(name for name in known if name)[:300]}"
        )
    owners: dict[nn.Module, str] = {}
    for other, part in [(name, part) for name, module in found.items() for part in module.modules()]:
        if (one := owners.setdefault(part, other)) != other:
            raise ConfigError(
                f"engine.meter: {one!r} and {other!r} share a module, so time would count twice; name one of the two"
            )
    if compiled := compiled_in_place(model) or compiled_by_wrapping(model):
        raise ConfigError(
            f"engine.meter: {compiled[0]!r} is compiled, and hooks would compile it again; leave it out of "
            "engine.meter, or do not compile it"
        )
    return found


class ModuleTimer(Timer):
    """Timer of a model without stages: it times some modules and the rest of the model, or the whole model."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> None:
        super().__init__(optimizer, len(modules) + 1)
        self._modules, self._rest = modules, len(modules)
        self._given: list[torch.Tensor] = []
        """Outputs of the modules in the current forward pass."""

    @contextmanager
    def passing(self, is_backward: bool, share: float) -> Iterator[None]:
        """Context manager that times a forward or backward pass. In a forward pass, the modules have hooks."""
        with self._timed_pass(self._rest, is_backward, share), nullcontext() if is_backward else self._hooked():
            yield

    def updating(self) -> AbstractContextManager[None]:
        """Return a context manager that times the optimizer's step."""
        return self._timed_updates()

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._given.clear)
            for number, module in enumerate(self._modules):
                before = module.register_forward_pre_hook(partial(self._begin, number), with_kwargs=True)
                after = module.register_forward_hook(partial(self._end, number))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _begin(self, number: int, module: nn.Module, inputs: Any, named: Any) -> None:
        self._hook_gradients((inputs, named), self._rest)  # unless another module's time begins with this gradient
        self._at(number)

    def _end(self, number: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._at(self._rest)
        self._given += self._hook_gradients(outputs, number)

    def _hook_gradients(self, tensors: Any, whose: int) -> list[torch.Tensor]:
        """Hook the gradients of tensors, except those that a module has returned before, and return the hooked tensors.

        whose: the number of the layer to which time is attributed once such a gradient arrives.
        """
        known = {id(each) for each in self._given}
        found = [each for each in with_gradients(tensors) if id(each) not in known]
        for tensor in found:
            tensor.register_hook(partial(self._at, whose))
        return found


def with_gradients(given: Any) -> list[torch.Tensor]:
    """Return the tensors in a value that will receive a gradient and are not parameters."""
    return [each for each in tensors_in(given) if each.requires_grad and not isinstance(each, nn.Parameter)]


def tensors_in(given: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value.

    Lists, tuples and dictionaries, such as the outputs of transformers, are searched.
    """
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from tensors_in(tuple(given.values()))
    elif isinstance(given, list | tuple):
        for part in given:
            yield from tensors_in(part)
