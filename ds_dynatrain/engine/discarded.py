"""Discarded global batches: how DeepSpeed's calls behave after the world was aborted in the middle of a global batch.

A new world is formed at once. The unfinished global batch is discarded: its gradients are dropped, and `backward` and
`step` do nothing until the loader returns the same batch again. Until then the engine sends and receives nothing,
because other members may be at another line of the script, and newcomers have not run this part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ds_dynatrain.errors import SwitchRefused, WorldChanged
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.membership import Membership
from ds_dynatrain.space import Layout

DISCARDED = (
    "the world was aborted and formed anew in this global batch, which members that have just come do not go through",
    "ask again after the next step",
)


@dataclass(eq=False)
class DiscardableEngine(EngineCore):
    """An engine that can discard an unfinished global batch: it records where the batch begins, so that the batch can
    be trained again."""

    _loaders: dict[str, dict[str, Any]] = field(default_factory=dict)
    _streams: streams.Streams | None = None
    _output: Any = None

    def open_window(self, stays_discarded: bool = False) -> None:
        """Record the beginning of a global batch. Called before a loader returns the first micro-batch of it.

        stays_discarded: whether the first engine of the process has not yet finished the global batch in which the
            world was aborted. If so, a discarded batch of this engine stays discarded.
        """
        if self.is_discarded and stays_discarded:
            return
        self.is_discarded = False
        self.note_window()

    def note_window(self) -> None:
        """Record the current positions of the loaders and the states of the random generators as the beginning of a
        global batch."""
        self._loaders = {name: loader.state_dict() for name, loader in self.train_loaders.items()}
        self._streams = streams.capture()

    def discard_window(self) -> None:
        """Drop the gradients of the unfinished global batch, and return loaders and random generators to its
        beginning."""
        dealt = self.open_batch.is_dealt
        self.host.break_off()
        self.go_back(dealt)
        self.deepspeed.micro_steps -= self.micro_steps % self.accumulation
        self.forget_batch()
        self.host.window_tokens = None
        self.host.drop_gradients()

    def go_back(self, has_dealt: bool) -> None:
        """Return loaders and random generators to the beginning of the global batch, and mark the batch as discarded.

        has_dealt: whether a loader of this package has returned some of the batch. If not, the user's code manages the
            position in the data.
        """
        self.is_discarded = True
        if not has_dealt:
            self.note_window()
        else:
            for name, state in self._loaders.items():
                self.train_loaders[name].load_state_dict(state)
            if self._streams is not None:
                streams.restore(self._streams)

    def refuse_switch(self) -> None:
        """Raise SwitchRefused if the current global batch is discarded: newcomers do not run that batch, so they would
        not answer a request."""
        if self.is_discarded:
            raise SwitchRefused(*DISCARDED)

    def remember(self, output: Any) -> Any:
        """Return the output of a forward pass unchanged. Also keep a copy of it if computing it again would need other
        ranks."""
        if needs_peers(self.layout) and (self.host.module.training or self._output is None):
            self._output = pytree.tree_map(_leaf, output)
        return output

    def forward_again(self, forward: Callable[[], Any], needed_peers: bool) -> Any:
        """Return a replacement for the output of a forward pass that was interrupted. Training on it has no effect.

        If the pass needs no other rank, this is the real output. Otherwise it is the last output that was kept, filled
        with NaN if the module is in evaluation mode. Raises WorldChanged if no output was kept.

        forward: runs the forward pass.
        needed_peers: whether the forward pass needed other ranks in the old world.
        """
        before = streams.capture()
        try:
            if not needed_peers and not needs_peers(self.layout):
                return pytree.tree_map(_leaf, forward())
        finally:
            streams.restore(before)
        if self._output is None:
            raise WorldChanged(
                "the world was formed anew, and this global batch is discarded: go on with the loader's next"
            )
        return pytree.tree_map(_leaf if self.host.module.training else _nan_like, self._output)


def needs_peers(layout: Layout) -> bool:
    """Return whether a forward pass in this layout communicates with other ranks."""
    return layout.zero_stage == 3 or layout.pipe * layout.tensor * layout.sequence * layout.expert > 1


def _leaf(value: Any) -> Any:
    """Detach a tensor from its autograd history, and return any other value unchanged. `backward` can still be called
    on the tensor if it could before, but reaches no parameter."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _nan_like(value: Any) -> Any:
    """Replace a floating-point tensor by one filled with NaN, and return any other value unchanged."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return torch.full_like(value, float("nan"), requires_grad=value.requires_grad) if is_float else value


class Loss(torch.Tensor):
    """A scalar tensor with an autograd graph whose `backward` does not fail if the world is lost.

    Any result computed from it is a plain tensor, whose `backward` raises WorldChanged if the world is lost.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _engine: EngineCore
    _membership: Membership

    def backward(
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Run torch's backward pass. Does nothing in a discarded global batch."""
        engine = self._engine
        if engine.is_discarded:
            return
        given: Any = (gradient, retain_graph, create_graph, inputs)
        self._membership.surviving(engine, lambda: super(Loss, self).backward(*given), lambda: None)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle this object as a plain tensor, without the engine."""
        return plain(self).__reduce_ex__(protocol)


def plain(value: torch.Tensor) -> torch.Tensor:
    """Convert a `Loss` into a plain torch tensor, and return any other tensor unchanged."""
    return value.as_subclass(torch.Tensor) if isinstance(value, Loss) else value


def guarded(output: Any, engine: EngineCore, membership: Membership) -> Any:
    """Return the output of a forward pass, with every scalar tensor that has an autograd graph replaced by a `Loss`."""

    def guard(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.grad_fn is None or value.numel() != 1:
            return value
        loss = value.as_subclass(Loss)
        loss._engine, loss._membership = engine, membership
        return loss

    return pytree.tree_map(guard, output)
