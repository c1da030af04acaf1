"""Replacements for the DataLoaders that an Accelerator prepares: one that trains, and those that evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

from accelerate.utils import gather_object, send_to_device
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from ds_dynatrain.data import TrainLoader
from ds_dynatrain.errors import ConfigError, DataError
from ds_dynatrain.integrations.shared.batches import EngineBatches, is_stream

MOST_SET = 2**32 - 1
"""The largest seed that `set_seed` takes.

A larger seed is a random one, which a run that continues would not have.
"""


def is_in_order(loader: DataLoader[Any]) -> bool:
    """Return whether the loader's batches are the data set's samples in order."""
    return type(loader.sampler) is SequentialSampler and type(loader.batch_sampler) is BatchSampler


class _Prepared:
    """A replacement that passes unknown attributes on to the torch DataLoader from which it is made."""

    def __init__(self, accelerator: Any, loader: DataLoader[Any]) -> None:
        self._accelerator, self._torch = accelerator, loader

    def __getattr__(self, name: str) -> Any:
        if name == "_torch":  # the constructor has not set it yet
            raise AttributeError(name)
        return getattr(self._torch, name)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, because the order of an epoch follows from the job's position here."""


class TrainingBatches(EngineBatches, _Prepared):
    """Loader of this rank's micro-batches, one by one. The last one of a global batch sets `sync_gradients`.

    A change of the world takes effect between two global batches. The loader reads from the engine once there is one;
    see `bind`.
    """

    remainder = 0
    """Number of samples with which the last batch is padded, which is always 0."""

    def __init__(self, accelerator: Any, loader: DataLoader[Any]) -> None:
        EngineBatches.__init__(self, loader)
        _Prepared.__init__(self, accelerator, loader)
        self.end_of_dataloader = False
        self._drawn = 0

    @property
    def samples(self) -> int:
        """Number of this rank's own samples in the newest micro-batch; 0 if it repeats another rank's sample."""
        return self.loader.samples

    def bind(self, engine: Any) -> None:
        """Read from `engine`. Raises ConfigError if processes would use different orders of samples."""
        is_fixed = is_in_order(self._torch) or is_stream(self._torch.dataset)
        seed = None if is_fixed else self._seed(engine._parts.job.job_seed)
        if engine.generation == 1 and not engine.idle:
            seeds = set(gather_object([seed]))
            if len(seeds) > 1:
                raise ConfigError(
                    f"the training DataLoader has different seeds on different processes: {sorted(seeds)}; give "
                    "its generator the same one everywhere, or DataLoaderConfiguration(data_seed=...)"
                )
        reshuffle = None if seed is None else True
        self._ours = cast("TrainLoader", engine.loader(self._torch, seed=seed, reshuffle=reshuffle, name="accelerate"))

    def _seed(self, of_job: int) -> int:
        """Return the seed for the order of samples.

        Epoch k has the permutation of seed + k, as with Accelerate's seedable sampler.

        of_job: the job's seed, which comes from rank 0 at the start.
        """
        settings = self._accelerator.dataloader_config
        generator = getattr(self._torch.sampler, "generator", None)
        if settings.data_seed is not None:
            return int(settings.data_seed)
        if generator is not None and not settings.use_seedable_sampler:
            return int(generator.initial_seed())
        return of_job if of_job <= MOST_SET else 0

    def note_backward(self) -> None:
        """Record that a backward pass begins. Raises DataError if further micro-batches were fetched before it."""
        drawn, self._drawn = self._drawn, 0
        if drawn > 1:
            raise DataError(
                f"accelerator.backward: {drawn} micro-batches of the global batch were drawn since the last one, and "
                "what is known of their samples is that of the last; draw a micro-batch, and then train it"
            )

    def __len__(self) -> int:
        """Return the number of micro-batches in an epoch on this rank in the current world."""
        if self._ours is not None:
            return len(self._ours)
        return math.ceil(len(self._torch) / int(self._accelerator.num_processes))

    def __iter__(self) -> Iterator[Any]:
        accelerator, loader = self._accelerator, self.loader
        state = accelerator.gradient_state
        state._add_dataloader(self)
        try:
            is_last, self._drawn = True, 0
            for batch in loader:
                self._drawn = 1 if is_last else self._drawn + 1
                is_last = not loader.mid_window
                self.end_of_dataloader = is_last and loader.cursor.step == loader.order.steps
                state._set_sync_gradients(is_last)
                yield placed(batch, accelerator)
        finally:
            self.end_of_dataloader = False
            state._remove_dataloader(self)


class EvaluationBatches(_Prepared):
    """Evaluation loader that makes a new loader of Accelerate for each pass, cut for the world at that time.

    make: function that makes Accelerate's loader for the current world from torch's DataLoader.
    begins: function that returns whether a pass has batches on this process.
    """

    def __init__(
        self,
        accelerator: Any,
        loader: DataLoader[Any],
        name: str,
        make: Callable[[DataLoader[Any]], Any],
        begins: Callable[[EvaluationBatches], bool],
    ) -> None:
        super().__init__(accelerator, loader)
        self.name, self._make, self._begins = name, make, begins

    def stock(self) -> Any:
        """Return Accelerate's loader for the current world."""
        return self._make(self._torch)

    def __len__(self) -> int:
        """Return the number of batches on this rank in the current world."""
        return len(self.stock())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stock() if self._begins(self) else ())


def placed(batch: Any, accelerator: Any) -> Any:
    """Return a batch on the accelerator's device, moved the way Accelerate does."""
    if not accelerator.device_placement:
        return batch
    return send_to_device(batch, accelerator.device, non_blocking=accelerator.non_blocking)
