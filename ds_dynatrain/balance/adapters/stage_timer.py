"""What each layer of a pipeline stage takes, pass by pass, in the steps that are timed.

The stage's callables and DeepSpeed's forward and backward instructions are replaced for that time. No module gets a
hook and nothing is compiled again. A pass is a row of marks: from this moment on, the time is that layer's. Forward, a
mark is where a layer is called. Backward, it is where the gradient of a layer's output arrives, by a hook on that
tensor, or where a layer is called again to recompute its activations. So all of a pass is some layer's: the loss is the
last one's, and what waits for other stages is between passes. A stage that does not go backward takes no time for it.
What the thread does beside passes is kept apart: the samples, messages, and the rest of a step.

On a CPU torch makes both passes in the thread that is timed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)
from torch import nn

from ds_dynatrain.adapters.compiled import compiled_by_wrapping, compiled_in_place
from ds_dynatrain.adapters.device import is_accelerated, synchronize
from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.balance.adapters.timing import Floats, StageTimes, UpdateTimer, between, now

Layer = Callable[[Any], Any]
MESSAGES = (SendActivation, RecvActivation, SendGrad, RecvGrad)

_Mark = tuple[int, Any]
"""A layer, and the moment from which on time is its; the last mark of a pass ends it."""


class StageTimer:
    """The clock of the present stage of a pipeline engine. optimizer: the one that steps the elements, without ZeRO."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self._engine, self._module, self._updates = engine, engine.module, UpdateTimer(optimizer)
        self._count = len(self._module.forward_funcs)
        self._forward: list[list[_Mark]] = []
        self._backward: list[list[_Mark]] = []
        self._marks: list[_Mark] | None = None
        """The marks of the pass that is under way."""
        self._is_backward = False
        self._hooked: Sequence[torch.Tensor] = ()
        """Inputs of the layer that was called last."""
        self._output_bytes, self._kept_bytes = [0] * self._count, [0] * self._count
        self._kept: set[int] = set()
        self._wholes, self._loads, self._messages = list[float](), list[float](), list[float]()
        """Seconds of the thread: of each step, of a micro-batch's samples, and of each message."""

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the engine's steps in this block."""
        layers = [self._timed_layer(number, layer) for number, layer in enumerate(self._module.forward_funcs)]
        known = self._engine._INSTRUCTION_MAP
        passes = {
            ForwardPass: self._timed_pass(known[ForwardPass], self._forward, 0),
            BackwardPass: self._timed_pass(known[BackwardPass], self._backward, self._count - 1),
        }
        beside = {each: _adding(known[each], self._messages) for each in MESSAGES}
        beside[LoadMicroBatch] = _adding(known[LoadMicroBatch], self._loads)
        with ExitStack() as stack:
            stack.enter_context(replaced(self._module, "forward_funcs", layers))
            stack.enter_context(replaced(self._engine, "_INSTRUCTION_MAP", {**known, **passes, **beside}))
            stack.enter_context(self._updates.timing())
            begin = time.thread_time()
            yield
            self._wholes.append(time.thread_time() - begin)

    def passing(self, is_backward: bool, share: float) -> AbstractContextManager[None]:
        """Do nothing: a pass is timed within its step."""
        return nullcontext()

    def updating(self) -> AbstractContextManager[None]:
        """Do nothing: the optimizer is timed within its step."""
        return nullcontext()

    def times(self) -> StageTimes:
        """Return the times of all passes so far, once the device has done them."""
        synchronize()
        forward, backward = self._seconds(self._forward), self._seconds(self._backward)
        found = StageTimes(
            forward,
            backward if self._backward else np.zeros((len(self._forward), self._count)),
            self._updates.seconds,
            self._updates.stepped,
            tuple(self._output_bytes),
            tuple(self._kept_bytes),
        )
        if is_accelerated() or not self._wholes:  # there the thread runs ahead
            return found
        known = forward.sum() + backward.sum() + self._updates.seconds + sum(self._loads) + sum(self._messages)
        load, message = (float(np.median(each)) if each else 0.0 for each in (self._loads, self._messages))
        rest = max(0.0, (sum(self._wholes) - float(known)) / len(self._wholes))
        return replace(found, load_seconds=load, message_seconds=message, beside_seconds=rest)

    def _seconds(self, passes: Sequence[list[_Mark]]) -> Floats:
        found = np.zeros((len(passes), self._count))
        for row, marks in zip(found, passes, strict=True):
            for (layer, begin), (_, end) in itertools.pairwise(marks):
                row[layer] += between(begin, end)
        return found

    # ---- a pass ------------------------------------------------------------------------------------------------------

    def _timed_pass(self, run: Callable[..., None], passes: list[list[_Mark]], first: int) -> Callable[..., None]:
        """Wrap one of DeepSpeed's instructions, which begins with a layer."""

        def timed(engine: Any, buffer_id: int) -> None:
            self._is_backward = passes is self._backward
            self._marks = [(first, now())]
            try:
                run(engine, buffer_id)
                self._at(first)
                passes.append(self._marks)
                if not self._is_backward:
                    self._hook(_tensors(engine.pipe_buffers["outputs"][buffer_id]), self._count - 1)
            finally:
                self._marks, self._hooked = None, ()

        return timed

    def _at(self, layer: int, _: Any = None) -> None:
        """Count time for a layer from now on."""
        if self._marks is not None:
            self._marks.append((layer, now()))

    def _hook(self, tensors: Sequence[torch.Tensor], maker: int) -> None:
        """Count time for the layer that made these tensors once their gradients are there.

        What that layer was given, too, and handed on, was made before it. A stage's outputs have hooks as well: where
        there are several DeepSpeed goes back from one after the other.
        """
        wanted = [each for each in tensors if each.requires_grad and not isinstance(each, nn.Parameter)]
        for tensor in wanted:
            if not any(tensor is other for other in self._hooked):
                tensor.register_hook(partial(self._at, maker))
        self._hooked = wanted

    # ---- a layer -----------------------------------------------------------------------------------------------------

    def _timed_layer(self, number: int, layer: Layer) -> Layer:
        """A layer, called for a forward pass or to recompute what one made."""
        may_count = not _is_compiled(layer)

        def timed(inputs: Any) -> Any:
            if self._marks is None:
                return layer(inputs)
            self._at(number)
            self._hook(_tensors(inputs), max(number - 1, 0))
            if self._is_backward:
                return layer(inputs)
            with self._counting(number, inputs) if may_count and not self._forward else nullcontext():
                outputs = layer(inputs)
            self._output_bytes[number] = sum(tensor.nbytes for tensor in _tensors(outputs))
            if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in _tensors(outputs)):
                self._kept_bytes[number] = 0  # there is no graph
            return outputs

        return timed

    # ---- what is kept ------------------------------------------------------------------------------------------------

    def _counting(self, number: int, inputs: Any) -> AbstractContextManager[Any]:
        """Count what autograd keeps in this block for a layer, each piece of memory once."""
        interval = int(self._module.activation_checkpoint_interval)
        if interval:
            if number % interval == 0:
                self._kept_bytes[number] = sum(tensor.nbytes for tensor in _tensors(inputs))
            return nullcontext()
        if not self._kept:
            self._kept = {held.untyped_storage().data_ptr() for held in self._module.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._kept:
                self._kept.add(storage.data_ptr())
                self._kept_bytes[number] += storage.nbytes()
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)


def _adding(run: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
    """Wrap one of DeepSpeed's instructions; what the thread takes for it is added."""

    def timed(engine: Any, **given: Any) -> None:
        begin = time.thread_time()
        run(engine, **given)
        seconds.append(time.thread_time() - begin)

    return timed


def _tensors(given: Any) -> list[torch.Tensor]:
    """A tensor, or those of a tuple."""
    parts = given if isinstance(given, tuple | list) else (given,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _is_compiled(layer: Layer) -> bool:
    """Whether anything of it is: hooks on what autograd keeps would compile it again."""
    parts = [layer, *layer.args] if isinstance(layer, partial) else [layer]
    if any(hasattr(part, "_torchdynamo_orig_callable") for part in parts):
        return True
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return any(compiled_in_place(module) or compiled_by_wrapping(module) for module in modules)
