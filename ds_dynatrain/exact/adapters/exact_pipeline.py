"""A pipeline engine whose micro-batches are leaves (micro-batches of fixed size), on any number of stages.

All columns (pipeline replicas) run the same number of micro-batches. A column without a leaf for its last micro-batch
repeats leaf 0, and multiplies its loss by 0. Before each layer of a leaf, the random generators are set by the layer's
number in the whole model, also when activations are recomputed. The output of every layer gets the memory layout of a
received message, whether it is sent or not, so a different division into stages changes no bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, cast

import deepspeed.comm as dist
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, ReduceGrads, ReduceTiedGrads

from ds_dynatrain.adapters.deepspeed.host import Host
from ds_dynatrain.adapters.deepspeed.pipeline_host import StageHost
from ds_dynatrain.adapters.model.module_state import buffers_kept, note
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.data import Leaf, Pass
from ds_dynatrain.engine.pipeline_engine import DynatrainPipelineEngine
from ds_dynatrain.exact.adapters.exact_engine import LeafEngine, LeafHost
from ds_dynatrain.exact.adapters.exact_sums import LeafSums
from ds_dynatrain.exact.adapters.refusals import unchanged_buffers
from ds_dynatrain.exact.adapters.tied import StageLines, Uses
from ds_dynatrain.exact.bits.rows import usage
from ds_dynatrain.exact.bits.sums import pairwise_sum
from ds_dynatrain.reshard import streams
from ds_dynatrain.space import Columns, Layout
from ds_dynatrain.space.leaves import MicroStep


class Leaves:
    """The micro-batches of this rank's pipeline replica in a global batch.

    passes: the micro-batches in order, those with weight 0 borrowed from another replica.
    step: the index of the micro-batch whose pass is running, and how many have begun each pass.
    """

    def __init__(self, passes: Sequence[Leaf], data: int) -> None:
        self.passes, self._data, self.now = passes, data, 0
        self._begun = {False: 0, True: 0}

    def begin(self, is_backward: bool) -> Leaf:
        """Return the next micro-batch for a forward or backward pass, and make it the current one."""
        self.now = self._begun[is_backward]
        self._begun[is_backward] += 1
        return self.passes[self.now]

    def step_of(self, leaf: Leaf) -> MicroStep:
        """Return the micro-step to which a micro-batch belongs."""
        return MicroStep(leaf.micro_step, self._data, leaf.leaves)


class LeafStageHost(LeafHost, StageHost):
    """The host of a `LeafPipelineEngine`: the state kept alongside DeepSpeed's engine.

    uses: the parameters of this stage that several layers share.
    """

    uses = Uses(())

    def optimizer_made(self) -> None:
        """Make the new optimizer add gradients leaf by leaf (a leaf is a micro-batch of fixed size)."""
        trained = self.trained()
        self.uses = Uses.of(self.module, self.shaper.template, {id(held) for held in trained.values()})
        whole = self.shaper.template.whole.named_parameters()
        numel = sum(held.numel() for name, held in whole if name in trained)
        order = {id(parameter): number for number, parameter in enumerate(self.module.parameters())}
        lines = StageLines(self.optimizer, order, self.uses, numel, self.module)
        self.sums = LeafSums(self.optimizer, lines, lambda: self.micro_step)

    def detach(self) -> None:
        """Detach the optimizer, and forget the shared parameters of this stage."""
        self.uses = Uses(())
        super().detach()


class LeafPipelineEngine(LeafEngine, DynatrainPipelineEngine):
    """A pipeline engine whose gradients are bitwise identical on any number of ranks and stages."""

    _HOST: ClassVar[type[Host]] = LeafStageHost
    _leaves: Leaves | None = None
    """The micro-batches of the global batch that is being trained; None at other times."""
    _host: LeafStageHost

    def _train_samples(self, samples: Iterator[Any]) -> torch.Tensor:
        """Train the leaves (micro-batches of fixed size) of a global batch, and return the loss.

        Raises UnsupportedError unless the samples come from a loader of the engine, and for reentrant activation
        checkpointing.
        """
        if not isinstance(samples, Pass):
            raise usage("exact: a micro-batch that is no leaf").error(f"train_batch reads a {type(samples).__name__}")
        module = self.module
        if module.activation_checkpoint_func is not non_reentrant_checkpoint and module.activation_checkpoint_interval:
            row = usage("exact: reentrant checkpointing in a pipeline")
            raise row.error(f"exact: activation_checkpoint_interval={module.activation_checkpoint_interval}")
        first = int(module._local_start)  # it may be an integer of numpy, with which seeds would differ
        layers = [partial(self._run_layer, first + at, layer) for at, layer in enumerate(module.forward_funcs)]
        dealt = self.batch.deal(self.batch.train_batch_size).rank(self.data_rank)
        leaves = Leaves(cast("tuple[Leaf, ...]", dealt), self.batch.data)
        self._host.uses.renew()
        with replaced(self, _leaves=leaves), replaced(module, forward_funcs=layers):
            loss = super()._train_samples(samples)
        if self.is_last_stage():
            self._steps.note_losses(cast("list[torch.Tensor]", self.fwd_outputs))
        return loss

    def _run_layer(self, number: int, layer: Callable[[Any], Any], inputs: Any) -> Any:
        leaves = self._leaves
        if leaves is None:
            raise usage("exact: a micro-batch that is no leaf").error("a layer runs outside of train_batch")
        streams.begin_leaf(self._parts.stream_seed, int(self.global_steps), leaves.passes[leaves.now].number, number)
        with self._host.uses.of_layer(number):
            output = layer(inputs)
        return output if number + 1 == self.module._num_layers else as_sent(output, number)

    def _enter_columns(self, layout: Layout) -> None:
        """Make all pipeline replicas run the same number of micro-batches under a layout."""
        super()._enter_columns(layout)
        count = int(self.gradient_accumulation_steps())
        self._columns = Columns(int(self.train_micro_batch_size_per_gpu()), (count,) * layout.data)
        self._divisor, self.micro_batches = self._columns.mean, count

    def _exec_forward_pass(self, buffer_id: int) -> None:
        if self._leaves is None:
            super()._exec_forward_pass(buffer_id)
            return
        note(self.module)
        is_own = self._leaves.begin(is_backward=False).weight
        with nullcontext() if is_own else buffers_kept(self.module), unchanged_buffers(self.module):
            super()._exec_forward_pass(buffer_id)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        leaves = cast("Leaves", self._leaves)
        found = leaves.begin(is_backward=True)
        if self.is_last_stage():
            DeepSpeedEngine.backward(self, self.loss * found.weight, scale_wrt_gas=False)
        else:
            super()._exec_backward_pass(buffer_id)
        self._host.micro_step = leaves.step_of(found)
        if self._host.sums is not None:
            self._host.sums.end_leaf()

    def _exec_reduce_tied_grads(self) -> None:
        """Do nothing, because `StageLines` sums the gradients of layers that share a parameter."""

    def _exec_reduce_grads(self) -> None:
        leaves = cast("Leaves", self._leaves)
        self._host.micro_step = leaves.step_of(leaves.passes[-1])
        if self._host.sums is not None:
            self._host.sums.close()

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        **DynatrainPipelineEngine._INSTRUCTION_MAP,
        ForwardPass: _exec_forward_pass,
        BackwardPass: _exec_backward_pass,
        ReduceTiedGrads: _exec_reduce_tied_grads,
        ReduceGrads: _exec_reduce_grads,
    }

    def _total_loss(self) -> torch.Tensor:
        """Return the mean loss over all samples.

        Losses are added in the order of the leaves (micro-batches of fixed size). If no global batch of leaves is being
        trained, DeepSpeed's loss is returned.
        """
        if self._leaves is None:
            return super()._total_loss()
        losses = torch.zeros(self._leaves.passes[-1].leaves, dtype=torch.float64, device="cpu")
        if self.is_last_stage():
            found: list[torch.Tensor] = self.fwd_outputs or []
            for own, loss in zip(self._leaves.passes, found, strict=True):
                losses[own.number] += own.weight * float(loss) if own.weight else 0.0
            dist.all_reduce(losses, group=self.grid.get_data_parallel_group())
        if self.is_pipe_parallel:
            last = self.grid.stage_to_global(self.num_stages - 1)
            dist.broadcast(losses, src=last, group=self.grid.get_pipe_parallel_group())
        self.dp_group_loss = torch.tensor(pairwise_sum(losses.tolist()), dtype=torch.float32, device=self.device)
        return self.dp_group_loss.clone()


def as_sent(output: Any, number: int) -> Any:
    """Return the output of a layer with the memory layout that it would have on the next stage after a message.

    Its gradient likewise gets the memory layout of a gradient that the next stage has sent back.

    number: the number of the layer, for the error.

    Raises UnsupportedError if there are several floating-point tensors, because a stage runs a backward pass for each
    of them.
    """
    parts = output if isinstance(output, tuple) else (output,)
    if sum(torch.is_tensor(part) and part.is_floating_point() for part in parts) > 1:
        row = usage("exact: several gradients between layers")
        raise row.error(f"exact: layer {number} gives {len(parts)} tensors")
    laid = tuple(_laid_out(part) for part in parts)
    return laid if isinstance(output, tuple) else laid[0]


def _laid_out(part: Any) -> Any:
    if not torch.is_tensor(part):
        return part
    made = part.contiguous()
    if made.requires_grad:
        made.register_hook(torch.Tensor.contiguous)
    return made
