"""Layers before the first one that is trained have no backward pass, and no gradient is sent to them.

Which layers these are follows from what is registered as trained, which every member knows of the whole model: so two
stages agree without a message on whether one waits for a gradient and the other one sends it.

DeepSpeed's engine wants a gradient on every stage: what comes in requires one, and what goes out waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import BackwardPass, RecvGrad, SendGrad

from ds_dynatrain.adapters.pipeline import layer_of
from ds_dynatrain.adapters.replaced import replaced


def frozen_layers(prefixes: Sequence[str], trained: Collection[str]) -> int:
    """How many layers there are before the first one that is trained; all of them if none is.

    prefixes: of all layers, see `PipelineTemplate.prefixes`. trained: names of what requires a gradient. A tied layer
    counts as trained wherever it stands.
    """
    layers = set(map(layer_of, trained))
    return next((number for number, prefix in enumerate(prefixes) if prefix in layers), len(prefixes))


def needless(start: int, stop: int, frozen: int) -> tuple[type, ...]:
    """The instructions that a stage of layers `start` to `stop` - 1 leaves out, where the first `frozen` are frozen.

    Two neighbours have one boundary, so one does not receive exactly what the other one does not send.
    """
    ends_within = (BackwardPass, RecvGrad) if stop <= frozen else ()
    return (*ends_within, SendGrad) if start <= frozen else ends_within


@dataclass(frozen=True)
class Shortened:
    """A schedule of DeepSpeed's without some of its instructions."""

    schedule: Any
    without: tuple[type, ...]

    def __iter__(self) -> Iterator[list[Any]]:
        """The instructions of each step."""
        for commands in self.schedule:
            yield [each for each in commands if not isinstance(each, self.without)]

    def num_pipe_buffers(self) -> int:
        """As many as DeepSpeed's has."""
        return int(self.schedule.num_pipe_buffers())


class FrozenPrefixEngine(PipelineEngine):  # type: ignore[misc]
    """DeepSpeed's pipeline engine, for a model whose first layers may be frozen."""

    _frozen = 0
    """Layers of the whole model before the first trained one, in the batch that is under way."""

    def _frozen_layers(self) -> int:
        """See `frozen_layers`; the same on all stages."""
        raise NotImplementedError

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """DeepSpeed's, without what the frozen layers need not."""
        self._frozen = self._frozen_layers()
        without = needless(self.module._local_start, self.module._local_stop, self._frozen)
        super()._exec_schedule(Shortened(pipe_schedule, without))

    def _exec_forward_pass(self, buffer_id: int) -> None:
        """DeepSpeed's; what comes into a frozen layer, or to the first trained one, requires no gradient."""
        held = self._frozen - self.module._local_start
        if not self._frozen or held < 0:
            super()._exec_forward_pass(buffer_id)
            return
        for tensor in _tensors(self.pipe_buffers["inputs"][buffer_id]):
            tensor.requires_grad_(False)
        with _checkpointed_behind(self.module, held):
            super()._exec_forward_pass(buffer_id)


@contextmanager
def _checkpointed_behind(module: PipelineModule, frozen: int) -> Iterator[None]:
    """In it activations of a stage's first `frozen` layers are not recomputed: nothing goes backward there.

    A reentrant checkpoint sees no parameters: it has a backward pass if one of its inputs requires a gradient. So the
    first one behind these layers is given such inputs.
    """
    interval, checkpoint = module.activation_checkpoint_interval, module.activation_checkpoint_func

    def seeing_inputs(run: Callable[..., Any], *inputs: Any) -> Any:
        if torch.is_grad_enabled() and not any(each.requires_grad for each in _tensors(inputs)):
            inputs = tuple(map(_requiring, inputs))
        return checkpoint(run, *inputs)

    with ExitStack() as stack:
        if interval > 0:
            segments = enumerate(module.is_checkpointable_results)
            kept = [is_one and min((at + 1) * interval, len(module.forward_funcs)) > frozen for at, is_one in segments]
            stack.enter_context(replaced(module, "is_checkpointable_results", kept))
            if checkpoint is not non_reentrant_checkpoint:
                stack.enter_context(replaced(module, "activation_checkpoint_func", seeing_inputs))
        yield


def _requiring(value: Any) -> Any:
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_real else value


def _tensors(given: Any) -> list[torch.Tensor]:
    """A tensor, or those of a tuple."""
    parts = given if isinstance(given, tuple) else (given,)
    return [part for part in parts if isinstance(part, torch.Tensor)]
