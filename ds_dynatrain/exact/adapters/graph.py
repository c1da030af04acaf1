"""Additional autograd nodes that make the graph of an exact job the same in all ZeRO stages.

ZeRO-3 passes the inputs and outputs of a module through nodes of its own. Consider a tensor that is used twice inside a
module and once outside, as with Llama's norm and the residual connection around it. With the nodes, its gradient is the
sum of two, plus the third. Without them, it is one sum of all three, in the order in which they arrive. Stages 1 and 2
therefore get such nodes on the same modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.utils import apply_to_tensors_only
from deepspeed.utils import z3_leaf_module
from torch import nn


class _Node(torch.autograd.Function):
    """An identity operation that adds a node to the autograd graph.

    A view (`value[...]`) would be a node in C++, and faster. But measurements showed that gradients then differed when
    deepspeed.checkpointing partitions activations, which empties tensors and fills them again.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        """Return the detached value, the way DeepSpeed's node does.

        There is no `setup_context`, because torch would then bind the arguments again in every call.
        """
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Return the gradients unchanged."""
        return gradients


class GraphNodes:
    """Identity nodes on the modules of a model, which stay until `stop` is called."""

    def __init__(self, model: nn.Module) -> None:
        self._handles = []
        for module in _with_hooks(model):
            self._handles.append(module.register_forward_hook(lambda module, inputs, output: _passed(output)))
            self._handles.append(module.register_forward_pre_hook(lambda module, inputs: _passed(inputs)))

    def stop(self) -> None:
        """Remove the nodes from the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _with_hooks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules on which ZeRO-3 has hooks. A module inside several others is yielded several times."""
    if not z3_leaf_module(module):
        for child in module.children():
            yield from _with_hooks(child)
    yield module


def _passed(values: Any) -> Any:
    return apply_to_tensors_only(_Node.apply, values)
