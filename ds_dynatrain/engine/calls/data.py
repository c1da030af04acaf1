"""Calls about data: loaders that follow the world, and what is dealt by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as td

from ds_dynatrain.adapters.curriculum import CurriculumOrder
from ds_dynatrain.data import EvaluationLoader, Slot, Source, TrainLoader
from ds_dynatrain.data.cursor import Cursor
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.errors import ConfigError, DataError


class DataCalls(EngineCore):
    """Loaders, what they ask of the engine, and means over what they dealt."""

    def begin_epoch(self, loader: TrainLoader) -> bool:
        """Called by a train loader where a pass over it begins."""
        return self.turns.course.begin_epoch(loader.name, loader.is_under_way)

    def begin_evaluation(self, loader: EvaluationLoader) -> bool:
        """Called by an evaluation loader where a pass over it begins."""
        return self.turns.course.arrive(f"a pass over {loader.name!r}") is not None

    def before_micro_batch(self) -> None:
        """Called by a train loader before any of its batches: in the middle of a global batch a world may end, too."""
        self.membership.before_micro_batch(self)

    def before_batch(self, loader: TrainLoader) -> None:
        """Called by a train loader before a global batch is dealt."""
        self._switcher.stand_at(loader.name, self._window_is_open)
        self.membership.open_window(self)

    def loader(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        shuffle: bool | None = None,
        evaluation: bool = False,
        batch_size: int | None = None,
        name: str | None = None,
    ) -> TrainLoader | EvaluationLoader:
        """A loader that follows the world; make it on every process, idle ones too, in the same order.

        dataset: map-style, or a torch DataLoader over one, which is taken apart. A train loader has a position and is
        where a change takes effect; an evaluation loader (`evaluation=True`, not shuffled unless asked; `batch_size` is
        its own) has neither.
        """
        order = None if evaluation else self.curriculum_order(_length(dataset))
        if order is not None and num_workers is None:
            num_workers = int(self.data_sampling_config()["num_workers"])
        drop_last = True if self.job.user_config.get("dataloader_drop_last") and not evaluation else None
        source = Source.build(
            dataset,
            collate_fn=collate_fn if collate_fn is not None else self.collate_fn,
            num_workers=num_workers,
            shuffle=bool(shuffle) if evaluation else shuffle,
            reshuffle=self.settings.data.reshuffle or None,
            drop_last=drop_last,
        )
        if evaluation:
            self._evaluation_loaders += 1
            return EvaluationLoader(source, self, batch_size, f"evaluation {self._evaluation_loaders}")
        name = name or f"train{len(self.train_loaders) or ''}"
        if name in self.train_loaders:
            raise ConfigError(f"loader {name!r} exists; give another name")
        loader = TrainLoader(source, self, name, order)
        self.train_loaders[name] = loader
        if name in self._arrived["loaders"]:
            loader.load_state_dict(self._arrived["loaders"].pop(name))
        return loader

    def training_loader(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> TrainLoader:
        """The one of `training_data`."""
        made = self.loader(dataset, collate_fn=collate_fn)
        return cast("TrainLoader", made)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> TrainLoader | EvaluationLoader:
        """DeepSpeed's call for another loader: here one that follows the world. DataError for a sampler."""
        if data_sampler is not None:
            raise DataError("a sampler of your own cannot follow the world; leave data_sampler out, or use shuffle=")
        evaluation = route != "train"
        if batch_size is not None and not evaluation:
            raise DataError("the micro-batch follows from train_batch_size and the world; leave batch_size out")
        return self.loader(
            dataset,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            evaluation=evaluation,
            batch_size=batch_size,
        )

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: dict[str, Callable[[int], Any]]) -> None:
        """DeepSpeed's; call it on every process before the first batch, or the ConfigError says that it is too late."""
        for loader in self._curriculum_loaders():
            if loader.cursor > Cursor() or loader.mid_window:
                raise ConfigError(
                    f"set_custom_curriculum_learning_schedule: loader {loader.name!r} has dealt batches by another "
                    "schedule; call it before the first batch, on every process"
                )
            loader.order.set_schedule(schedule_func_dict)  # type: ignore[attr-defined]

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """DeepSpeed's: with a curriculum, `function(batch, state of the sampler)` gives the batch to train on."""
        for loader in self._curriculum_loaders():
            loader.post_process = post_process_func

    def _curriculum_loaders(self) -> list[TrainLoader]:
        return [loader for loader in self.train_loaders.values() if isinstance(loader.order, CurriculumOrder)]

    def close_loaders(self) -> None:
        """End the worker processes of all train loaders; their positions stay."""
        for loader in self.train_loaders.values():
            loader.close()

    def deal(self, slot: Slot, first: bool, last: bool) -> None:
        """Called by a train loader with the slot of the micro-batch that it is about to return."""
        self.slot_weight = slot.weight
        self.slot_is_borrowed = slot.samples == 0
        self._dealt, self._last_dealt = True, last
        if slot.weight:
            self._window_samples = round(slot.samples * self.batch.slots / slot.weight)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers, from 0, of the epochs that remain of `count` for the job, on whichever member."""
        while self.job_epoch < count:
            yield self.job_epoch
            self.job_epoch += 1

    def mean(self, value: torch.Tensor | float, samples: int) -> torch.Tensor:
        """The mean of `value` (one number) over the data axis, weighted by each rank's `samples`; fp32, on the CPU.

        With sequence parallelism it is over sequence ranks too: each has the mean over its part of the same samples.
        A collective of the working members. If the world is torn in it, or the global batch is void, or this member
        came late and the others are elsewhere, it is the value of this rank alone. DataError if nobody has a sample.
        """
        plain = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
        pair = torch.tensor([plain * samples if samples else 0.0, float(samples)], dtype=torch.float64)
        alone = torch.tensor([plain, 1.0], dtype=torch.float64)
        if self.is_void or not (self.is_in_epoch or self.turns.course.arrive("a mean") is not None):
            pair = alone
        else:
            pair = self.membership.surviving(self, lambda: self._add_up(pair), lambda: alone)
        if not pair[1]:
            raise DataError("mean over no samples: every rank gave samples=0")
        return (pair[0] / pair[1]).to(torch.float32)

    def _add_up(self, pair: torch.Tensor) -> torch.Tensor:
        if self.world is not None and self.world.data.size() > 1:
            td.all_reduce(pair, group=self.world.data)
        return pair


def _length(data: Any) -> int:
    """Samples of a data set, or of the one that a torch loader reads; 0 if it does not say (`Source` refuses it)."""
    dataset = getattr(data, "dataset", data)
    return len(dataset) if hasattr(dataset, "__len__") else 0
