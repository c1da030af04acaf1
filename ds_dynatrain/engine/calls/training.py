"""DeepSpeed's forward, backward and step, in a world that may be torn inside of them."""

from __future__ import annotations

from typing import Any

import torch

from ds_dynatrain.adapters.worlds import drop
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.members.voiding import needs_peers, plain
from ds_dynatrain.errors import DataError
from ds_dynatrain.support import practice


class TrainingCalls(EngineCore):
    """They return in the next world if this one is torn in them; see `members.voiding`."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DeepSpeed's; a micro-batch without a sample of its own leaves no trace in the module's buffers.

        Where members come and go: if the world is torn in it, it is formed anew, and what is returned trains nothing.
        """
        self.control.raise_if_lost()
        if self.is_void:
            return self._window.forward_again(lambda: self._forward(*inputs, **kwargs), needed_peers=False)
        needed_peers = needs_peers(self.layout)
        if needed_peers and not self.is_in_epoch and self.turns.course.arrive("a forward pass") is None:
            raise DataError(
                f"member {self.control.member} came late; in {self.layout} a forward pass needs the others, who are "
                "elsewhere in their scripts: loop over engine.epochs(n), which counts the job's epochs, or evaluate "
                "with engine.loader(..., evaluation=True), which has no batch here"
            )
        output = self.membership.surviving(
            self,
            lambda: self._forward(*inputs, **kwargs),
            lambda: self._window.forward_again(lambda: self._forward(*inputs, **kwargs), needed_peers),
        )
        return output if self.is_void else self.membership.returned(self, output)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not (self.slot_is_borrowed and self.module.training):
            return super().forward(*inputs, **kwargs)
        before = [(held, held.detach().clone()) for held in self.module.buffers()]
        output = super().forward(*inputs, **kwargs)
        with torch.no_grad():
            for held, value in before:
                held.copy_(value)
        return output

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, tokens: int | None = None
    ) -> torch.Tensor:
        """DeepSpeed's; see `HostEngine.backward`. In a global batch that is void it does nothing."""
        if self.is_void:
            return loss
        loss = plain(loss)
        return self.membership.surviving(
            self,
            lambda: super(TrainingCalls, self).backward(loss, retain_graph, scale_wrt_gas, tokens),
            lambda: loss,
        )

    def _backward_prologue(self) -> None:
        """DeepSpeed's, where any backward pass begins, also one of `loss.backward()`."""
        with self.turns.backward(self):
            super()._backward_prologue()

    def step(self, lr_kwargs: Any = None) -> None:
        """DeepSpeed's; a complete window opens the way to the next boundary.

        UnsupportedError for a step that the user places (by `set_gradient_accumulation_boundary(True)`, or without
        `managed_gradient_accumulation`) in the middle of a global batch: in another world that would be another set
        of samples. In a global batch that is void it does nothing.
        """
        if not self.is_void:
            self.membership.surviving(self, lambda: self._step(lr_kwargs), lambda: None)

    def _step(self, lr_kwargs: Any) -> None:
        steps, samples = int(self.gradient_accumulation_steps()), int(self.global_samples)
        by_hand = self.ends_window_by_hand
        if by_hand and self._dealt and not self._last_dealt:
            raise practice("set_gradient_accumulation_boundary").error(
                f"a boundary set by hand in the middle of a global batch of {steps} micro-batches"
            )
        super().step(lr_kwargs)
        if by_hand:  # one call for all of the window's micro-batches
            self.micro_steps += -self.micro_steps % steps
        if self.micro_steps % steps == 0:
            self._end_window(samples)

    def _take_model_step(self, *arguments: Any) -> None:
        """DeepSpeed's; from its begin to its end the state is neither that before it nor that after it."""
        self.is_stepping = True
        super()._take_model_step(*arguments)
        self.is_stepping = False

    def _end_window(self, samples: int) -> None:
        """After the optimizer's step; samples: `global_samples` before it."""
        self._switcher.note_first_step()
        if self._window_samples is not None:
            self.global_samples = samples + self._window_samples
        self._dealt, self._window_samples = False, None
        self.slot_weight, self.slot_is_borrowed = 1.0, False

    def void_window(self) -> None:
        """The world is torn: drop the gradients of the open global batch, and go back to where it began."""
        dealt = self._dealt
        self.break_off()
        self._window.void(dealt)
        self.micro_steps -= self.micro_steps % int(self.gradient_accumulation_steps())
        self._dealt, self._window_samples, self.window_tokens = False, None, None
        self.slot_weight, self.slot_is_borrowed = 1.0, False
        self.drop_gradients()

    def give_state_up(self) -> None:
        """Hold nothing any more: others have a newer state, or all of it is restored from elsewhere."""
        self.detach()
        self.is_stepping = False
        self.leave_world()
        self.launch.install()
        if self.world is not None:
            self.control.bury(drop(self.world))
            self.world = None
