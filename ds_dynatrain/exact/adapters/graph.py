"""One graph of autograd in all stages of an exact job.

ZeRO-3 lets what goes into a module, and what comes out of it, pass through nodes of its own. Where a tensor is used
twice in a module and once beside it, as by Llama's norm and the residual connection around it, its gradient is then a
sum of two, and of that and the third; without the nodes it is a sum of all three, in the order in which they come. So
stages 1 and 2 have such nodes, too, on the same modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.utils import apply_to_tensors_only
from deepspeed.utils import z3_leaf_module
from torch import nn


class _Node(torch.autograd.Function):
    """Changes nothing: it is there.

    A view (`value[...]`) would be a node in C++, and sooner, but with it deepspeed.checkpointing that partitions
    activations, and so empties tensors and fills them again, had other gradients (measured).
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        """As DeepSpeed's, without a `setup_context`, for which torch binds the arguments anew in every call."""
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """As they come."""
        return gradients


class GraphNodes:
    """Nodes on the modules of a model, until `stop`."""

    def __init__(self, model: nn.Module) -> None:
        self._handles = []
        for module in _with_hooks(model):
            self._handles.append(module.register_forward_hook(lambda module, inputs, output: _passed(output)))
            self._handles.append(module.register_forward_pre_hook(lambda module, inputs: _passed(inputs)))

    def stop(self) -> None:
        """Take them away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _with_hooks(module: nn.Module) -> Iterator[nn.Module]:
    """The modules on which ZeRO-3 has hooks; one that is in several others has them several times."""
    if not z3_leaf_module(module):
        for child in module.children():
            yield from _with_hooks(child)
    yield module


def _passed(values: Any) -> Any:
    return apply_to_tensors_only(_Node.apply, values)
