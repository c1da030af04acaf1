"""One optimizer step of Lightning's loop: Lightning's own path through each micro-batch of a global batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.data import MicroBatch
from ds_dynatrain.errors import WorldChanged

if TYPE_CHECKING:
    from typing import Any as Below
else:
    Below = _AutomaticOptimization


class Window:
    """One batch from Lightning's point of view: this rank's micro-batches of one global batch.

    Iterating over it gives, for each micro-batch, the result of the data set and `collate_fn`. Lightning does not look
    into batches of an unknown kind.
    """

    def __init__(self, parts: tuple[MicroBatch, ...]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        return (one.data for one in self.parts)


class WindowOptimization(Below):
    """Replacement of Lightning's `automatic_optimization`, in which an item of the loop is an optimizer step."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._one: MicroBatch | None = None
        self._is_first = True

    @property
    def samples(self) -> int:
        """Number of this rank's own samples in the current micro-batch; 0 if it repeats another rank's sample."""
        return 0 if self._one is None else self._one.samples

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Train each micro-batch the way Lightning does; again, in the new world, if the global batch is discarded.

        Returns the output of the last micro-batch, with the mean loss of this rank's samples.
        """
        engine, window = self.trainer.strategy.engine, kwargs["batch"]
        while True:
            steps, found = engine.global_steps, dict[str, Any]()
            try:
                found = self._train(window, optimizer, batch_idx, kwargs)
            except WorldChanged:
                if not engine.is_discarded:
                    raise
            if not engine.is_discarded or engine.global_steps > steps:
                return found
            window, batch_idx = self._fetch_again()
            kwargs = {**kwargs, "batch_idx": batch_idx} if "batch_idx" in kwargs else kwargs

    def _fetch_again(self) -> tuple[Window, int]:
        """Return the global batch that was discarded as the new world trains it, and its number in the epoch."""
        trainer, loop = self.trainer, self.trainer.fit_loop.epoch_loop
        (window, *_), progress = next(trainer.fit_loop._data_fetcher), loop.batch_progress
        progress.is_last_batch = trainer.fit_loop._data_fetcher.done
        progress.increment_ready()
        progress.increment_started()
        return window, loop.batch_idx

    def _train(self, window: Window, optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Train each micro-batch once."""
        trainer = self.trainer
        found: dict[str, Any] = {}
        total, samples = 0.0, 0
        try:
            for number, one in enumerate(window.parts):
                self._one, self._is_first = one, number == 0
                data = self._placed(one.data)
                apart = self._logged_apart() if one.is_borrowed else nullcontext()
                with trainer.strategy.engine.micro_batch(one), apart:
                    self._announce(data)
                    outputs: dict[str, Any] = super().run(optimizer, batch_idx, {**kwargs, "batch": data})
                if not one.is_borrowed or not found:
                    found = outputs
                if "loss" in outputs:
                    total, samples = total + outputs["loss"] * one.samples, samples + one.samples
        finally:
            self._one = None
        return {**found, "loss": total / samples} if samples else found

    def _placed(self, data: Any) -> Any:
        """Return a micro-batch in the form in which `training_step` receives it."""
        trainer = self.trainer
        data = trainer.precision_plugin.convert_input(data)
        data = trainer.lightning_module._on_before_batch_transfer(data, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", data, dataloader_idx=0)

    def _announce(self, data: Any) -> None:
        """Tell `self.log` the current micro-batch, from which it takes the batch size."""
        trainer = self.trainer
        if not self._is_first:
            trainer._logger_connector.on_batch_start(data)
        trainer._results.batch, trainer._results.batch_size = data, None

    def _logged_apart(self) -> Any:
        """Return a context manager in which logged values are dropped."""
        return replaced(self.trainer.fit_loop.epoch_loop, _results=_ResultCollection(training=True))

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Any) -> Any:
        """Return Lightning's function for the first micro-batch of an optimizer step; None for the others."""
        return super()._make_zero_grad_fn(batch_idx, optimizer) if self._is_first else None

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Any) -> None:
        """Step the way Lightning does at the end of a global batch. Before the end, only call the hook."""
        if self._one is None or self._one.is_last:
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)
            return
        trainer = self.trainer
        optimizer = trainer.strategy._lightning_optimizers[0]
        call._call_lightning_module_hook(
            trainer, "optimizer_step", trainer.current_epoch, batch_idx, optimizer, train_step_and_backward_closure
        )
