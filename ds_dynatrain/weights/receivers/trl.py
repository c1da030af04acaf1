"""`TRLWeights`: the object that TRL's AsyncGRPOTrainer takes as `weight_transfer`, over any receiver of this package.

TRL's trainer walks its own parameters, one by one, which a ZeRO-3 or tensor parallel engine does not hold; on the other
ranks it does so in the method `_streaming_iter`. `attach` puts `send` in the place of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.weights.update import Receiver, Update, send


class TRLWeights:
    """TRL's `WeightTransferProtocol`; make one on each rank, and `attach` the trainer before it trains.

    receiver: where the weights go. engine: returns the engine, which the trainer makes late. delta: see `send`. pause,
    resume: functions that stop generation during an update, and continue it; a `VLLM` receiver does that itself.
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
        """Let all ranks of a trainer send by this object. Call it on every rank, after the trainer was made.

        Raises UnsupportedError for a trainer without TRL's `_streaming_iter`: its other ranks would not take part.
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
        """Connect; nothing to do before the first update."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send the present weights; called by TRL on its main process. iterator: TRL's, which is not used."""
        self.last = send(self._engine(), self.receiver, delta=self._delta)

    def _on_other_ranks(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Take part in an update. TRL iterates over this on the other ranks; on the main process nothing runs it."""
        self.send_weights(iter(()))
        yield from ()

    def destroy(self) -> None:
        """Close the connections of the receiver, if it has any."""
        if (close := getattr(self.receiver, "close", None)) is not None:
            close()
