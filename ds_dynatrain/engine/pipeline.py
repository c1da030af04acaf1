"""The engine of a `PipelineModule`: a whole global batch a call, and the boundary is where that call begins.

An iterator of the user's own gives what one member reads in one world: so many micro-batches, of one share of each
global batch, from where it stands on this member. None of this can be dealt again, so it serves until somebody's place
in the pipelines, or its pipeline's share, is another one; the ZeRO stage and the boundaries of stages may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from ds_dynatrain.adapters.pipeline_host import PipelineHostEngine, RepeatingLoader
from ds_dynatrain.data import EvaluationLoader, Pass, TrainLoader
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.engine import DynatrainEngine, in_turn
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.errors import DataError, WorldChanged
from ds_dynatrain.extension import around

WAY_OUT = (
    "give another one with set_dataiterator, in a function of engine.on_switch or after engine.boundary() "
    "(engine.batch and engine.data_rank say who reads what), or take engine.loader(dataset), which follows the world"
)


@dataclass(frozen=True)
class Passes:
    """One pass of a loader of ours, or one after the other where it is in DeepSpeed's `RepeatingLoader`."""

    given: Pass | RepeatingLoader

    @property
    def _at(self) -> Pass:
        return self.given if isinstance(self.given, Pass) else cast("Pass", self.given.data_iter)

    def reach_boundary(self, boundary: Callable[[], None]) -> None:
        """At the next batch of the pass; StopIteration, on all members, where it was the only one and is over."""
        try:
            self._at.reach_boundary()
        except StopIteration:
            if isinstance(self.given, Pass):
                raise
            self.given.data_iter = iter(self.given.loader)
            self._at.reach_boundary()

    def samples(self, now: Places) -> Pass:
        """The pass."""
        return self._at

    def reads(self, given: object) -> bool:
        """Also for the loader itself, which is read as in a `RepeatingLoader`."""
        return given is self.given or (isinstance(self.given, RepeatingLoader) and given is self.given.loader)

    def refuse_again(self) -> None:
        """The loader has gone back to where the batch begins."""


@dataclass(frozen=True)
class Places:
    """Who trains, and by that in which stage of which pipeline. shares: of the pipelines, if they have any."""

    members: tuple[int, ...]
    pipe: int
    data: int
    shares: tuple[int, ...] | None

    def __str__(self) -> str:
        shares = "" if self.shares is None else f" shares={','.join(map(str, self.shares))}"
        return f"members {', '.join(map(str, self.members))} as pipe={self.pipe} data={self.data}{shares}"


@dataclass(frozen=True)
class Own:
    """The user's own. places: those that it was given for."""

    given: Iterator[Any]
    places: Places

    def reach_boundary(self, boundary: Callable[[], None]) -> None:
        """As in a loop without our loaders."""
        boundary()

    def samples(self, now: Places) -> Iterator[Any]:
        """The iterator; DataError, on all members and before anything is read, where it is not for these places."""
        if now != self.places:
            raise DataError(
                f"train_batch: the {type(self.given).__name__} that it reads was given for {self.places}, and now "
                f"it is {now}: an iterator of your own cannot be dealt again; {WAY_OUT}"
            )
        return self.given

    def reads(self, given: object) -> bool:
        """An iterator that is given again stays one for the places that it was first given for."""
        return given is self.given

    def refuse_again(self) -> None:
        """WorldChanged: nobody can go back in it."""
        raise WorldChanged(
            "train_batch: the world was aborted in this global batch and formed anew, and what was read of the "
            f"{type(self.given).__name__} cannot be read again; {WAY_OUT}"
        )


Feed = Passes | Own
"""Where samples come from."""


def places_of(engine: EngineCore) -> Places:
    """Those of the present world."""
    layout = engine.layout
    return Places(engine.members, layout.pipe, layout.data, layout.shares)


def feed_of(engine: EngineCore, given: Any) -> Feed:
    """What was given to `engine`, as a feed; DataError for what is no iterator."""
    if isinstance(given, TrainLoader):
        given = RepeatingLoader(given)
    if isinstance(given, Pass) or (isinstance(given, RepeatingLoader) and isinstance(given.loader, TrainLoader)):
        return Passes(given)
    if not hasattr(given, "__next__"):
        raise DataError(
            f"set_dataiterator: a {type(given).__name__} is no iterator; give iter(...) of it, or call set_dataloader"
        )
    return Own(given, places_of(engine))


class DynatrainPipelineEngine(DynatrainEngine, PipelineHostEngine):
    """DeepSpeed's pipeline engine whose stages, world and ZeRO stage change between two `train_batch` calls."""

    _feed: Feed | None = None
    """What `train_batch()` goes on with."""
    _read: tuple[Feed, int] | None = None
    """What the open global batch is read from, once its members stand at it, and the number of its step."""

    @in_turn
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """DeepSpeed's; a pending change takes effect before anything else, and an idle member waits here.

        data_iter: see `set_dataiterator`. Without it the one before is read on; the first loader if there was none.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._read = None
        return PROCESS.membership.surviving(self._parts, self._train_batch, self._train_again)

    def _train_batch(self) -> torch.Tensor:
        samples = self._reach_boundary()
        self._read = cast("Feed", self._feed), int(self.global_steps)
        before = int(self.global_samples)
        with around(each.around_batch() for each in self._parts.extensions):
            loss = self._train_samples(samples)
        if isinstance(samples, Pass) and not self._host.reads_data:
            samples.skip()
        self.micro_steps += self._parts.accumulation
        self._end_window(before)
        self._parts.finish_step()
        return loss

    def _train_samples(self, samples: Iterator[Any]) -> torch.Tensor:
        """Train a global batch that is read from `samples`, in DeepSpeed's `train_batch`."""
        super().set_dataiterator(samples)
        loss: torch.Tensor = super().train_batch()
        return loss

    def _take_model_step(self, *arguments: Any) -> None:
        """DeepSpeed's, once all know the loss: a step that is made without somebody who is dead has one, too."""
        self._share_loss()
        super()._take_model_step(*arguments)

    def _train_again(self) -> torch.Tensor:
        """Go on after the world was aborted and formed anew; a function of `on_switch` may have given another feed.

        At stage 0 the other replica may have made the step all the same: then its loss is there, too.
        """
        if self._read is not None:
            feed, step = self._read
            if self.global_steps > step:
                return self._loss_of_step()
            if feed is self._feed:
                feed.refuse_again()
        return self.train_batch()

    def _reach_boundary(self) -> Iterator[Any]:
        """What the next global batch is read from, in the world that trains it."""
        if self._feed is None:
            if not self._parts.train_loaders:
                raise DataError("train_batch() without data: pass an iterator, or training_data to initialize")
            self._feed = feed_of(self._parts, next(iter(self._parts.train_loaders.values())))
        feed = self._feed
        feed.reach_boundary(self.boundary)
        if self._feed is not feed:  # a function of `on_switch` may have given another one
            return self._reach_boundary()
        return feed.samples(places_of(self._parts))

    eval_batch = in_turn(PipelineHostEngine.eval_batch)
    module_state_dict = in_turn(PipelineHostEngine.module_state_dict)

    @in_turn
    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """DeepSpeed's: `set_dataiterator(iter(loader))`."""
        self.set_dataiterator(iter(loader))

    def set_dataiterator(self, iterator: Any) -> None:
        """DeepSpeed's: what `train_batch()` reads from now on; call it on every process.

        iterator: one of a loader of ours, `iter(loader)`, which ends with the epoch (StopIteration on all members), or
        `RepeatingLoader(loader)`; `loader` itself is read as the latter. An iterator of the user's own serves until a
        switch gives somebody another place in the pipelines, see `Own`. None: the first loader again.
        """
        if iterator is None:
            self._feed = None
        elif self._feed is None or not self._feed.reads(iterator):
            self._feed = feed_of(self._parts, iterator)
        super().set_dataiterator(iterator)

    def loader(self, dataset: Any, **arguments: Any) -> TrainLoader | EvaluationLoader:
        """As with any engine; DataError for a short last global batch, which a pipeline cannot run."""
        made = super().loader(dataset, **arguments)
        if isinstance(made, EvaluationLoader):
            return made
        last, full = made.order.samples(made.order.steps - 1), self.global_batch_size
        if last < full:
            del self._parts.train_loaders[made.name]
            raise DataError(
                f"loader {made.name!r}: the last global batch of an epoch has {last} of {full} samples, and a pipeline "
                "sends buffers of one size; set dataloader_drop_last to true"
            )
        return made

    def _training_loader(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> TrainLoader:
        """DeepSpeed's pipeline engine reads `training_data` in its own order; any other loader shuffles."""
        says_itself = isinstance(dataset, DataLoader) or self._parts.settings.data.reshuffle
        made = self.loader(dataset, collate_fn=collate_fn, shuffle=None if says_itself else False)
        return cast("TrainLoader", made)
