"""The engine of a `PipelineModule`: a whole global batch a call, and the boundary is where that call begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from ds_dynatrain.adapters.pipeline_host import PipelineHost, RepeatingLoader
from ds_dynatrain.data import EvaluationLoader, Pass, TrainLoader
from ds_dynatrain.engine.engine import DynatrainEngine
from ds_dynatrain.engine.members.voiding import surviving
from ds_dynatrain.engine.turns import in_turn
from ds_dynatrain.errors import DataError


@in_turn("train_batch", "eval_batch")
class DynatrainPipelineEngine(DynatrainEngine, PipelineHost):
    """DeepSpeed's pipeline engine whose stages, world and ZeRO stage change between two `train_batch` calls."""

    _feed: Pass | None = None
    """The pass that `train_batch()` goes on with."""

    def speak(self) -> None:
        """As with any engine; and of its stage."""
        super().speak()
        self.speak_of_stage()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """DeepSpeed's; a pending change takes effect before anything else, and an idle member waits here.

        data_iter: of one of our loaders, such as `iter(loader)`, which ends with the epoch (StopIteration on all
        members), or `RepeatingLoader(loader)`; or an iterator of the user's own, whose position no switch carries.
        Without it the first loader is read, epoch after epoch.
        """
        return surviving(self, lambda: self._train_batch(data_iter), lambda: self.train_batch(data_iter))

    def _train_batch(self, data_iter: Iterator[Any] | None) -> torch.Tensor:
        samples = self._pass_of(data_iter)
        if samples is not None:
            samples.stand()
        else:
            self.boundary()
        before = int(self.global_samples)
        loss: torch.Tensor = super().train_batch(data_iter if samples is None else samples)
        if samples is not None and not self.reads_data:
            samples.skip()
        self.micro_steps += int(self.gradient_accumulation_steps())
        self._end_window(before)
        return loss

    def eval_batch(self, data_iter: Iterator[Any], *arguments: Any, **named: Any) -> Any:
        """DeepSpeed's; on the members that work. data_iter may also be an evaluation loader."""
        given = iter(data_iter) if isinstance(data_iter, EvaluationLoader) else data_iter
        return super().eval_batch(given, *arguments, **named)

    def set_dataloader(self, loader: Any) -> None:
        """DeepSpeed's: what `train_batch()` reads from now on."""
        if isinstance(loader, TrainLoader):
            self._feed = iter(loader)
        else:
            super().set_dataloader(loader)

    def loader(self, dataset: Any, **arguments: Any) -> TrainLoader | EvaluationLoader:
        """As with any engine; DataError for a short last global batch, which a pipeline cannot run."""
        made = super().loader(dataset, **arguments)
        if isinstance(made, EvaluationLoader):
            return made
        last, full = made.order.samples(made.order.steps - 1), self.global_batch_size
        if last < full:
            del self.train_loaders[made.name]
            raise DataError(
                f"loader {made.name!r}: the last global batch of an epoch has {last} of {full} samples, and a pipeline "
                "sends buffers of one size; set dataloader_drop_last to true"
            )
        return made

    def training_loader(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> TrainLoader:
        """DeepSpeed's pipeline engine reads `training_data` in its own order; any other loader shuffles."""
        says_itself = isinstance(dataset, DataLoader) or self.settings.data.reshuffle
        made = self.loader(dataset, collate_fn=collate_fn, shuffle=None if says_itself else False)
        return cast("TrainLoader", made)

    def _pass_of(self, data_iter: Any) -> Pass | None:
        """The pass over a loader of ours that `train_batch` was given, or goes on with; None if it is no such thing."""
        if isinstance(data_iter, Pass):
            return data_iter
        if isinstance(data_iter, RepeatingLoader) and isinstance(data_iter.loader, TrainLoader):
            data_iter.data_iter = self._endless(data_iter.loader, data_iter.data_iter)
            return self._feed
        if data_iter is not None:
            return None
        if self._feed is None and not self.train_loaders:
            raise DataError("train_batch() without data: pass an iterator, or training_data to initialize")
        loader = next(iter(self.train_loaders.values())) if self._feed is None else self._feed.loader
        return self._endless(loader, self._feed)

    def _endless(self, loader: TrainLoader, at: Pass | None) -> Pass:
        """The pass to go on with: `at`, or where that is over a new one; it stands at a global batch."""
        self._feed = iter(loader) if at is None else at
        try:
            self._feed.stand()
        except StopIteration:
            self._feed = iter(loader)
            self._feed.stand()
        return self._feed
