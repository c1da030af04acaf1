"""The timer of a pipeline stage: the seconds of each layer, for each pass, in the steps of a window.

During a window the stage's callables and DeepSpeed's forward and backward instructions are replaced. No module gets a
hook, and nothing is compiled again. A pass is recorded as a list of marks (a layer and a time): from a mark on, time is
attributed to the mark's layer. In a forward pass, a mark is set when a layer is called. In a backward pass, a mark is
set when the gradient of a layer's output arrives (by a hook on that tensor), or when a layer is called again to
recompute its activations. All time of a pass is therefore attributed to some layer; that of the loss goes to the last
layer. Waiting for other stages falls between passes. The thread's time outside passes is recorded separately: loading
samples, messages, and the rest of a step.

On a CPU, torch runs both passes in the thread that is timed.
"""

from __future__ import annotations

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

from ds_dynatrain.adapters.groups.device import is_accelerated
from ds_dynatrain.adapters.versions.compiled import compiled_by_wrapping, compiled_in_place
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.balance.adapters.timing import StageTimes, Timer, tensors_in, with_gradients

Layer = Callable[[Any], Any]
MESSAGES = (SendActivation, RecvActivation, SendGrad, RecvGrad)


class StageTimer(Timer):
    """The timer of this rank's stage in a pipeline engine."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self._engine, self._module = engine, engine.module
        super().__init__(optimizer, len(self._module.forward_funcs))
        self._is_backward = False
        self._hooked: Sequence[torch.Tensor] = ()
        """The input tensors of the layer that was called last."""
        self._output_bytes, self._kept_bytes = [0] * self._layers, [0] * self._layers
        self._kept: set[int] = set()
        self._wholes, self._loads, self._messages = list[float](), list[float](), list[float]()
        """Seconds of this rank's thread: for each step, for loading each micro-batch, and for each message."""

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Context manager that times the engine's steps."""
        layers = [self._timed_layer(number, layer) for number, layer in enumerate(self._module.forward_funcs)]
        known = self._engine._INSTRUCTION_MAP
        passes = {
            ForwardPass: self._timed_run(known[ForwardPass], False, 0),
            BackwardPass: self._timed_run(known[BackwardPass], True, self._layers - 1),
        }
        beside = {each: _adding(known[each], self._messages) for each in MESSAGES}
        beside[LoadMicroBatch] = _adding(known[LoadMicroBatch], self._loads)
        with ExitStack() as stack:
            stack.enter_context(replaced(self._module, forward_funcs=layers))
            stack.enter_context(replaced(self._engine, _INSTRUCTION_MAP={**known, **passes, **beside}))
            stack.enter_context(self._timed_updates())
            begin = time.thread_time()
            yield
            self._wholes.append(time.thread_time() - begin)

    def times(self) -> StageTimes:
        """Return the timings of all passes so far. Waits until the device has finished."""
        found = replace(super().times(), output_bytes=tuple(self._output_bytes), kept_bytes=tuple(self._kept_bytes))
        if not len(found.backward):  # a stage that does not go backward takes no time for it
            found = replace(found, backward=np.zeros_like(found.forward))
        if is_accelerated() or not self._wholes:  # on accelerators the thread runs ahead
            return found
        known = found.forward.sum() + found.backward.sum() + found.step_seconds + sum(self._loads) + sum(self._messages)
        load, message = (float(np.median(each)) if each else 0.0 for each in (self._loads, self._messages))
        rest = max(0.0, (sum(self._wholes) - float(known)) / len(self._wholes))
        return replace(found, load_seconds=load, message_seconds=message, beside_seconds=rest)

    # ---- a pass ------------------------------------------------------------------------------------------------------

    def _timed_run(self, run: Callable[..., None], is_backward: bool, first: int) -> Callable[..., None]:
        """Wrap one of DeepSpeed's instructions so that the pass it runs is timed.

        first: the layer to which the time before the first layer's call and after the last layer's return is
        attributed.
        """

        def timed(engine: Any, buffer_id: int) -> None:
            self._is_backward = is_backward
            with self._timed_pass(first, is_backward):
                run(engine, buffer_id)
            if not is_backward:
                self._hook(engine.pipe_buffers["outputs"][buffer_id], self._layers - 1)
            self._hooked = ()

        return timed

    def _hook(self, tensors: Any, maker: int) -> None:
        """Hook these tensors so that, once their gradients arrive, time is attributed to the layer that made them.

        If a layer returns an input unchanged, an earlier layer made it. A stage's outputs get hooks as well: if there
        are several, DeepSpeed runs their backward passes one after the other.
        """
        wanted = with_gradients(tensors)
        for tensor in wanted:
            if not any(tensor is other for other in self._hooked):
                tensor.register_hook(partial(self._at, maker))
        self._hooked = wanted

    # ---- a layer -----------------------------------------------------------------------------------------------------

    def _timed_layer(self, number: int, layer: Layer) -> Layer:
        """Wrap a layer so that its calls are timed, in a forward pass and when its activations are recomputed."""
        may_count = not _is_compiled(layer)

        def timed(inputs: Any) -> Any:
            if self._marks is None:
                return layer(inputs)
            self._at(number)
            self._hook(inputs, max(number - 1, 0))
            if self._is_backward:
                return layer(inputs)
            with self._counting(number, inputs) if may_count and not self._passes[False] else nullcontext():
                outputs = layer(inputs)
            self._output_bytes[number] = sum(tensor.nbytes for tensor in tensors_in(outputs))
            if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors_in(outputs)):
                self._kept_bytes[number] = 0  # without a graph nothing is kept
            return outputs

        return timed

    # ---- what is kept ------------------------------------------------------------------------------------------------

    def _counting(self, number: int, inputs: Any) -> AbstractContextManager[Any]:
        """Return a context manager that counts the bytes that autograd keeps for a layer, with each storage once."""
        interval = int(self._module.activation_checkpoint_interval)
        if interval:
            if number % interval == 0:
                self._kept_bytes[number] = sum(tensor.nbytes for tensor in tensors_in(inputs))
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
    """Wrap one of DeepSpeed's instructions so that each call appends its seconds in this thread to `seconds`."""

    def timed(engine: Any, **given: Any) -> None:
        begin = time.thread_time()
        run(engine, **given)
        seconds.append(time.thread_time() - begin)

    return timed


def _is_compiled(layer: Layer) -> bool:
    """Return whether any part of the layer is compiled.

    In a compiled layer, hooks on the tensors that autograd saves would cause a recompilation.
    """
    return any(
        hasattr(part, "_torchdynamo_orig_callable")
        or (isinstance(part, nn.Module) and bool(compiled_in_place(part) or compiled_by_wrapping(part)))
        for part in ([layer, *layer.args] if isinstance(layer, partial) else [layer])
    )
