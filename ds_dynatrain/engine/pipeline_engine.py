"""Engine of a `PipelineModule`: each call trains a whole global batch, and changes take effect at the beginning of a
call.

A user's own iterator yields the samples that one member reads in one world: a number of micro-batches from one share of
each global batch, starting at the member's position. Its samples cannot be assigned to other members. The iterator is
therefore usable only as long as every member keeps its position in the pipelines, and every pipeline its share of a
global batch. The ZeRO stage and the boundaries of stages may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from ds_dynatrain.adapters.deepspeed.pipeline_host import PipelineHostEngine, RepeatingLoader
from ds_dynatrain.data import EvaluationLoader, Pass, TrainLoader
from ds_dynatrain.data.stream import SampleStream
from ds_dynatrain.engine.dynatrain_engine import DynatrainEngine, in_turn
from ds_dynatrain.errors import DataError, WorldChanged
from ds_dynatrain.extension import around
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS

WAY_OUT = (
    "give another one with set_dataiterator, in a function of engine.on_switch or after engine.boundary() "
    "(engine.batch and engine.data_rank say who reads what), or take engine.loader(dataset), which follows the world"
)


@dataclass(frozen=True)
class PipelinePlaces:
    """Positions of all members in the pipelines of a world.

    members: the member at each rank.
    pipe: the number of stages.
    data: the size of the data axis, which is the number of pipelines.
    shares: the pipelines' shares of a global batch; None if the layout gives none.
    """

    members: tuple[int, ...]
    pipe: int
    data: int
    shares: tuple[int, ...] | None

    def __str__(self) -> str:
        shares = "" if self.shares is None else f" shares={','.join(map(str, self.shares))}"
        return f"members {', '.join(map(str, self.members))} as pipe={self.pipe} data={self.data}{shares}"


@dataclass(frozen=True)
class PipelineFeed:
    """Source of samples for `train_batch`.

    given: one pass of a loader of this package, or DeepSpeed's `RepeatingLoader` over it, which reads pass after pass;
        or a user's own iterator.
    places: the positions in the pipelines for which a user's own iterator was given; None for a loader of this package,
        which can be read at any position. An iterator that is given again still belongs to the positions for which it
        was first given.
    """

    given: Any
    places: PipelinePlaces | None = None

    @property
    def _at(self) -> Pass:
        return self.given if isinstance(self.given, Pass) else cast("Pass", self.given.data_iter)

    def reach_boundary(self, boundary: Callable[[], None]) -> None:
        """Let pending changes take effect before the next global batch. A loader of this package does this by itself;
        for a user's own iterator, call `boundary`.

        Raises StopIteration on all members at the end of a single pass.
        """
        if self.places is not None:
            boundary()
            return
        try:
            self._at.reach_boundary()
        except StopIteration:
            if isinstance(self.given, Pass):
                raise
            self.given.data_iter = iter(self.given.loader)
            self._at.reach_boundary()

    def samples(self, now: PipelinePlaces) -> Iterator[Any]:
        """Return the iterator from which to read samples: the current pass over a loader, or the user's own iterator.

        now: the current positions of the members.

        Raises DataError on all members, before anything is read, if the user's iterator was given for other positions
        than the current ones.
        """
        if self.places is None:
            return self._at
        if now != self.places:
            raise DataError(
                f"train_batch: the {type(self.given).__name__} that it reads was given for {self.places}, and now "
                f"it is {now}: an iterator of your own cannot be dealt again; {WAY_OUT}"
            )
        return cast("Iterator[Any]", self.given)

    def reads(self, given: object) -> bool:
        """Return whether this source reads `given`, which may also be a loader of this package inside a
        `RepeatingLoader`."""
        is_inside = self.places is None and isinstance(self.given, RepeatingLoader) and given is self.given.loader
        return given is self.given or is_inside


def places_of(engine: EngineCore) -> PipelinePlaces:
    """Return the positions of all members in the current world's pipelines."""
    layout = engine.layout
    return PipelinePlaces(engine.members, layout.pipe, layout.data, layout.shares)


def feed_of(engine: EngineCore, given: Any) -> PipelineFeed:
    """Return the source of samples that reads `given`. Raises DataError if `given` is not an iterator."""
    if isinstance(given, TrainLoader):
        given = RepeatingLoader(given)
    if isinstance(given, Pass) or (isinstance(given, RepeatingLoader) and isinstance(given.loader, TrainLoader)):
        return PipelineFeed(given)
    if not hasattr(given, "__next__"):
        raise DataError(
            f"set_dataiterator: a {type(given).__name__} is no iterator; give iter(...) of it, or call set_dataloader"
        )
    return PipelineFeed(given, places_of(engine))


class DynatrainPipelineEngine(DynatrainEngine, PipelineHostEngine):
    """DeepSpeed's pipeline engine whose stages, world and ZeRO stage can change between `train_batch` calls."""

    _feed: PipelineFeed | None = None
    """The source of samples that the next `train_batch()` reads."""
    _read: tuple[PipelineFeed, int] | None = None
    """The source of samples of the global batch in progress, and the number of that batch's step; None before changes
    for that batch have taken effect."""

    @in_turn
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train a global batch as DeepSpeed does. A pending change takes effect first. On an idle member the call waits
        for work.

        data_iter: see `set_dataiterator`. By default the batch comes from the previous iterator, or from the first
            loader if no iterator was set.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._read = None
        return PROCESS.membership.surviving(self._parts, self._train_batch, self._train_again)

    def _train_batch(self) -> torch.Tensor:
        samples = self._reach_boundary()
        self._read = cast("PipelineFeed", self._feed), int(self.global_steps)
        before = int(self.global_samples)
        with around(each.around_batch() for each in self._parts.extensions):
            loss = self._parts.last_loss = self._train_samples(samples)
        if isinstance(samples, Pass) and not self._host.reads_data:
            samples.skip()
        self.micro_steps += self._parts.accumulation
        self._end_window(before)
        self._parts.finish_step()
        return loss

    def _train_samples(self, samples: Iterator[Any]) -> torch.Tensor:
        """Train a global batch with DeepSpeed's `train_batch`.

        samples: the iterator from which to read the batch.
        """
        super().set_dataiterator(samples)
        loss: torch.Tensor = super().train_batch()
        return loss

    def _take_model_step(self, *arguments: Any) -> None:
        """Send the value of the loss to all ranks, and then run DeepSpeed's step. In this order, every rank has the
        value even if a member dies after the step."""
        self._share_loss()
        super()._take_model_step(*arguments)

    def _train_again(self) -> torch.Tensor:
        """Train the global batch again after the world was aborted and a new one was formed; return its loss.

        A function of `on_switch` may have set another source of samples before this call. At ZeRO stage 0 another
        replica may already have completed the step; the loss of that step is returned then.
        """
        if self._read is not None:
            feed, step = self._read
            if self.global_steps > step:
                return self._loss_of_step()
            if feed is self._feed and feed.places is not None:  # an iterator of the user cannot go back
                raise WorldChanged(
                    "train_batch: the world was aborted in this global batch and formed anew, and what was read of the "
                    f"{type(feed.given).__name__} cannot be read again; {WAY_OUT}"
                )
        return self.train_batch()

    def _reach_boundary(self) -> Iterator[Any]:
        """Let pending changes take effect, and return an iterator over the samples of the next global batch."""
        if self._feed is None:
            if not self._parts.train_loaders:
                raise DataError("train_batch() without data: pass an iterator, or training_data to initialize")
            self._feed = feed_of(self._parts, next(iter(self._parts.train_loaders.values())))
        feed = self._feed
        feed.reach_boundary(self.boundary)
        if self._feed is not feed:  # a function given to `on_switch` may have set another loader
            return self._reach_boundary()
        return feed.samples(places_of(self._parts))

    eval_batch = in_turn(PipelineHostEngine.eval_batch)
    module_state_dict = in_turn(PipelineHostEngine.module_state_dict)

    @in_turn
    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Read from `iter(loader)` from now on; same as DeepSpeed's call."""
        self.set_dataiterator(iter(loader))

    def set_dataiterator(self, iterator: Any) -> None:
        """Set the source that `train_batch()` reads from now on; same as DeepSpeed's call. Call it on every process.

        iterator: an iterator over a loader of this package, `iter(loader)`, which ends with the epoch (StopIteration on
            all members); or `RepeatingLoader(loader)`; or `loader` itself, which is read like
            `RepeatingLoader(loader)`; or None for the first loader. An iterator of your own can be read until a switch
            changes the position of a member in the pipelines.
        """
        if iterator is None:
            self._feed = None
        elif self._feed is None or not self._feed.reads(iterator):
            self._feed = feed_of(self._parts, iterator)
        super().set_dataiterator(iterator)

    def loader(self, dataset: Any, **arguments: Any) -> TrainLoader | EvaluationLoader:
        """Return a loader; see `DynatrainEngine.loader`. Raises DataError for a last global batch that would be smaller
        than the others, which a pipeline cannot run, and for a stream, which only its first and last stages would
        read."""
        made = super().loader(dataset, **arguments)
        if isinstance(made, EvaluationLoader):
            return made
        if isinstance(made.dataset, SampleStream):
            del self._parts.train_loaders[made.name]
            name = type(made.dataset.samples).__name__
            raise DataError(
                f"loader {made.name!r}: {name} is a stream, which a pipeline cannot read; give an iterator of "
                "your own to train_batch(), or a data set with __getitem__ and __len__"
            )
        last, full = made.order.samples(made.order.steps - 1), self.global_batch_size
        if last < full:
            del self._parts.train_loaders[made.name]
            raise DataError(
                f"loader {made.name!r}: the last global batch of an epoch has {last} of {full} samples, and a pipeline "
                "sends buffers of one size; set dataloader_drop_last to true"
            )
        return made

    def _training_loader(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> TrainLoader:
        """Return the loader of `training_data`. It keeps the data set's own order, as DeepSpeed's pipeline engine does.

        Any other loader shuffles by default.
        """
        says_itself = isinstance(dataset, DataLoader) or self._parts.settings.data.reshuffle
        made = self.loader(dataset, collate_fn=collate_fn, shuffle=None if says_itself else False)
        return cast("TrainLoader", made)
