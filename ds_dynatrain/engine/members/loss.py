"""The loss that `engine(batch)` returns where members come and go: its own `backward` survives a death, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from ds_dynatrain.engine.members.engine_view import EngineView
    from ds_dynatrain.engine.members.membership import Membership


class Loss(torch.Tensor):
    """One number with a graph. What is computed from it is a plain tensor, of which `backward` raises WorldChanged."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _engine: EngineView
    _membership: Membership

    def backward(
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> None:
        """torch's; in a global batch that is void it does nothing."""
        engine = self._engine
        if engine.is_void:
            return
        given: Any = (gradient, retain_graph, create_graph, inputs)
        self._membership.surviving(engine, lambda: super(Loss, self).backward(*given), lambda: None)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain tensor: the engine does not travel."""
        return plain(self).__reduce_ex__(protocol)


def plain(value: torch.Tensor) -> torch.Tensor:
    """The tensor as torch knows it."""
    return value.as_subclass(torch.Tensor) if isinstance(value, Loss) else value


def guarded(output: Any, engine: EngineView, membership: Membership) -> Any:
    """What a forward pass returned, with each number that has a graph as a `Loss`."""

    def guard(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.grad_fn is None or value.numel() != 1:
            return value
        loss = value.as_subclass(Loss)
        loss._engine, loss._membership = engine, membership
        return loss

    return pytree.tree_map(guard, output)
