"""`TRLWeights`: an object for `weight_transfer` of TRL's AsyncGRPOTrainer; sends to any receiver of this package.

TRL's main process iterates over whole parameters, which no rank holds with ZeRO-3 or tensor parallelism. The other
ranks iterate in the trainer's method `_streaming_iter`. `attach` replaces both with `send`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.weights.update import Receiver, Update, send


class TRLWeights:
    """Implementation of TRL's `WeightTransferProtocol`. Make one on each rank, and `attach` it to the trainer before
    training begins.

    receiver: the receiver of the weights.
    engine: function that returns the engine, which the trainer makes only later.
    delta: see `send`.
    pause: function that stops generation before an update; not needed for a `VLLM` receiver.
    resume: function that continues generation after an update; not needed for a `VLLM` receiver.
    """

    def __init__(
        self,
        receiver: Receiver,
        engine: Callable[[], Any],
        *,
        delta: bool = False,
        pause: Callable[[], None] = lambda: None,
        resume: Callable[[], None] = lambda: None,
    ) -> None:
        self.receiver, self._engine, self._delta = receiver, engine, delta
        self.pause, self.resume = pause, resume
        self.last: Update | None = None
        """The last update."""

    def attach(self, trainer: Any) -> None:
        """Let a trainer send its weights with this object. Call this on every rank, after the trainer has been made.

        Raises UnsupportedError if the trainer has no `_streaming_iter`, because its other ranks would not take part.
        """
        if not hasattr(trainer, "_streaming_iter"):
            raise UnsupportedError(
                f"{type(trainer).__name__} has no _streaming_iter, by which TRL 1.16 sends weights: give an "
                "AsyncGRPOTrainer, or call ds_dynatrain.weights.send in a loop of your own"
            )
        trainer._streaming_iter = self._on_other_ranks
        if trainer.accelerator.is_main_process:
            trainer.weight_transfer = self

    def init_weight_transfer(self) -> None:
        """Do nothing, because the first update connects. Part of TRL's protocol."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send the current weights. TRL calls this on its main process.

        iterator: TRL's iterator over parameters; not used.
        """
        self.last = send(self._engine(), self.receiver, delta=self._delta)

    def _on_other_ranks(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Take part in an update, and yield nothing. TRL iterates over the result on all ranks except the main
        process.
        """
        self.send_weights(iter(()))
        yield from ()

    def destroy(self) -> None:
        """Close the connections of the receiver, if it has any."""
        if (close := getattr(self.receiver, "close", None)) is not None:
            close()
