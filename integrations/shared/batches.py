"""The loader over which a framework iterates: an item is this rank's part of a whole global batch.

Accumulation is thus 1 for the framework, and the loader's length, steps and epochs are the same in every world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset

from ds_dynatrain.data import Cursor, MicroBatch, TrainLoader
from ds_dynatrain.errors import ConfigError

Window = tuple[MicroBatch, ...]
"""This rank's micro-batches of one global batch."""


class EngineBatches:
    """Loader that reads from the engine once there is one.

    loader: a torch DataLoader over the data set. Its samplers and collate function are used.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._torch = loader
        self._ours: TrainLoader | None = None

    @property
    def loader(self) -> TrainLoader:
        """The engine's loader. Raises ConfigError before there is an engine."""
        if self._ours is None:
            raise ConfigError(
                "the training loader has no engine yet: prepare the model and its optimizer, and iterate over the "
                "loader in training alone"
            )
        return self._ours

    def refuse_other_epochs(self, saved: Mapping[str, Any]) -> None:
        """Raise ConfigError for a stock checkpoint whose epochs differ; see the function of this name."""
        refuse_other_epochs(self._torch, saved)

    def go_to(self, steps: int) -> None:
        """Move to the position after `steps` optimizer steps of the job; of a stream, in its first pass."""
        epoch, step = divmod(steps, self.loader.order.steps)
        state = self.loader.state_dict()
        self.loader.load_state_dict({**state, "cursor": Cursor(epoch, step).to_dict(), "begun": step > 0})


class GlobalBatches(EngineBatches):
    """Loader of global batches, which reads from the engine once there is one; see `bind`.

    loader: a torch DataLoader over the data set. Its samplers and collate function are used.
    global_batch: number of samples in a step.
    name: a name that is unique among the engine's loaders.
    seed: epoch k has the permutation of `seed` + k; by default, the sampler's seed is used.
    """

    def __init__(self, loader: DataLoader[Any], global_batch: int, name: str, seed: int | None = None) -> None:
        super().__init__(loader)
        self.batch_size, self._name, self._seed = global_batch, name, seed
        self._drawn: Callable[[], None] = lambda: None

    @property
    def dataset(self) -> Any:
        """The data set whose samples are assigned to ranks."""
        return self._torch.dataset

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is left out."""
        return bool(self._torch.drop_last)

    def bind(self, engine: Any, drawn: Callable[[], None] | None = None, reshuffle: bool | None = None) -> None:
        """Read from `engine`.

        drawn: function called when a global batch has been fetched, in the world that will train it.
        reshuffle: whether each epoch has a different order; by default, this follows the sampler.
        """
        made = engine.loader(self._torch, seed=self._seed, reshuffle=reshuffle, name=self._name)
        self._ours, self._drawn = cast("TrainLoader", made), drawn or self._drawn

    def epoch_after(self, steps: int, max_steps: int) -> float:
        """Return the number of epochs trained after `steps` steps.

        A pass over a stream counts as `max_steps` steps, as in Trainer, because its length is not known.
        """
        if is_stream(self.dataset):
            cursor = self.loader.cursor
            return cursor.epoch + cursor.step / max_steps
        epoch, step = divmod(steps, len(self))
        return epoch + step / len(self)

    def __len__(self) -> int:
        rest = 0 if self.drop_last else self.batch_size - 1
        return (len(self.dataset) + rest) // self.batch_size

    def __iter__(self) -> Iterator[Window]:
        for window in self.loader.windows():
            self._drawn()
            yield window


def is_stream(dataset: object) -> bool:
    """Return whether the samples of a data set have no index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def refuse_other_epochs(loader: DataLoader[Any], saved: Mapping[str, Any]) -> None:
    """Raise ConfigError for a stock checkpoint whose epochs differ from this job's in their number of steps.

    saved: the DeepSpeed configuration of the checkpoint.

    With `drop_last`, a stock framework leaves out samples that do not fill a micro-batch on all ranks, and its last
    step may have fewer micro-batches than others. Here, samples that do not fill a global batch are left out.
    """
    batch, accumulation = saved.get("train_batch_size"), saved.get("gradient_accumulation_steps", 1)
    if not (loader.drop_last and isinstance(batch, int) and isinstance(accumulation, int)):
        return
    samples = len(cast("Sized", loader.dataset))
    micro_batches = samples // (batch // accumulation)
    there, here = -(-micro_batches // accumulation), samples // batch
    if there != here:
        raise ConfigError(
            f"the checkpoint is of a job with drop_last, whose epochs of {samples} samples have {there} optimizer "
            f"steps: the last one has {micro_batches % accumulation} of {accumulation} micro-batches. Here drop_last "
            f"leaves out what fills no global batch of {batch} samples, and an epoch has {here} steps. Set drop_last "
            f"(dataloader_drop_last) to False here: an epoch then has {there} steps, the last one of {samples % batch} "
            "samples"
        )
