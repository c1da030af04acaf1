"""An engine that adds gradients leaf by leaf, in an order that does not depend on the layout.

A *leaf* is a micro-batch of fixed size, which holds the same samples in every layout.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

from ds_dynatrain.adapters.deepspeed.host import Host
from ds_dynatrain.adapters.zero import loss_scale as scaler
from ds_dynatrain.data import MicroBatch
from ds_dynatrain.engine.dynatrain_engine import DynatrainEngine
from ds_dynatrain.exact.adapters.exact_sums import LeafSums
from ds_dynatrain.exact.adapters.graph import GraphNodes
from ds_dynatrain.exact.adapters.lines import lines_of
from ds_dynatrain.exact.adapters.refusals import refuse_inexact_optimizer
from ds_dynatrain.exact.bits.rows import usage
from ds_dynatrain.exact.bits.steps import ExactSteps


class LeafHost(Host):
    """The host of a `LeafEngine`: the state kept alongside DeepSpeed's engine.

    sums: the gradient sums of the current ZeRO optimizer; None if there is none.
    """

    sums: LeafSums | None = None
    _nodes: GraphNodes | None = None

    def look(self, basic: torch.optim.Optimizer) -> None:
        """Raise UnsupportedError if the optimizer's update of an element may depend on the element's position."""
        refuse_inexact_optimizer(basic)
        super().look(basic)

    def optimizer_made(self) -> None:
        """Make the new optimizer add gradients leaf by leaf (a leaf is a micro-batch of fixed size)."""
        order = {id(parameter): number for number, parameter in enumerate(self.module.parameters())}
        self.sums = LeafSums(self.optimizer, lines_of(self.optimizer, order), lambda: self.micro_step)
        self._take_nodes_away()
        self._nodes = GraphNodes(self.module) if int(self.engine.zero_optimization_stage()) < 3 else None

    def detach(self) -> None:
        """Detach the optimizer, and remove its gradient sums and the autograd nodes."""
        self.sums = None
        self._take_nodes_away()
        super().detach()

    def drop_gradients(self) -> None:
        """Drop the gradients, and their partial sums, of a global batch whose optimizer step has not been taken."""
        super().drop_gradients()
        if self.sums is not None:
            self.sums.forget()

    def let_module_go(self) -> None:
        """Remove all hooks from the module, including those of the additional autograd nodes."""
        self._take_nodes_away()
        super().let_module_go()

    def _take_nodes_away(self) -> None:
        if self._nodes is not None:
            self._nodes.stop()
        self._nodes = None


class LeafEngine(DynatrainEngine):
    """An engine whose gradients are bitwise identical on any number of ranks."""

    _HOST: ClassVar[type[Host]] = LeafHost

    @property
    def _steps(self) -> ExactSteps:
        steps: ExactSteps = self._parts.extension("exact").steps
        return steps

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        """Make DeepSpeed wrap the optimizer in a ZeRO optimizer in all stages.

        In stage 1 with bf16 weights and fp32 sums, DeepSpeed would choose BF16_Optimizer, which reduces and clips in an
        order of its own.
        """
        super()._do_optimizer_sanity_check(basic_optimizer)
        return ZERO_OPTIMIZATION

    def compile(self, *arguments: Any, **named: Any) -> None:
        """Raise UnsupportedError, because a compiled model may round differently under another layout."""
        raise usage("exact: torch.compile").error("engine.compile")

    def micro_batch(self, one: MicroBatch, is_divided: bool = False) -> AbstractContextManager[None]:
        """Return the context manager in which a micro-batch is trained.

        one: the micro-batch.

        Raises UnsupportedError if the loss is already divided (`is_divided`), because a leaf's loss may be multiplied
        only by its weight.
        """
        if is_divided:
            raise usage("exact: a loss that is divided").error("engine.micro_batch(is_divided=True)")
        return super().micro_batch(one)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *, tokens: int | None = None
    ) -> torch.Tensor:
        """Run the backward pass of a leaf (a micro-batch of fixed size), whose loss is multiplied only by its weight.

        Raises UnsupportedError if the micro-batch did not come from a loader of the engine.
        """
        if not self.is_discarded and self._host.micro_step is None:
            raise usage("exact: a micro-batch that is no leaf").error("engine.backward")
        return super().backward(loss, retain_graph, False, tokens=tokens)

    def _backward_prologue_per_tensor(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        scaled = super()._backward_prologue_per_tensor(grad)
        return scaled if grad is None or scaled is grad else grad * self._host.loss_weight

    def allreduce_gradients(self, bucket_size: int = MEMORY_OPT_ALLREDUCE_SIZE) -> None:
        """Add the gradients of the leaf (a micro-batch of fixed size) after every backward pass, even in stage 1."""
        self.optimizer.set_gradient_accumulation_boundary(self.is_gradient_accumulation_boundary())
        self.optimizer.overlapping_partition_gradients_reduce_epilogue()

    @property
    def _token_slots(self) -> int:
        return 1

    def _norm_said(self) -> AbstractContextManager[None]:
        return scaler.norm_before_growth(self)
