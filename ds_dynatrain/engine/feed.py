"""What `train_batch` of a pipeline reads: a loader of ours, which follows the world, or an iterator of the user's own.

An iterator of the user's own gives what one member reads in one world: so many micro-batches, of one share of each
global batch, from where it stands on this member. None of this can be dealt again, so it serves until somebody's place
in the pipelines, or its pipeline's share, is another one; the ZeRO stage and the boundaries of stages may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ds_dynatrain.adapters.pipeline_host import RepeatingLoader
from ds_dynatrain.data import Pass, TrainLoader
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.errors import DataError, WorldChanged

WAY_OUT = (
    "give another one with set_dataiterator, in a function of engine.on_switch or after engine.boundary() "
    "(engine.batch and engine.data_rank say who reads what), or take engine.loader(dataset), which follows the world"
)


class Feed(Protocol):
    """Where samples come from."""

    def reach_boundary(self, boundary: Callable[[], None]) -> None:
        """Stand at the next global batch: a pending change takes effect, and an idle member waits for work.

        boundary: the engine's, of a loop without our loaders.
        """
        ...

    def samples(self, now: Places) -> Iterator[Any]:
        """What that batch is read from. now: who trains."""
        ...

    def reads(self, given: object) -> bool:
        """Whether it is a feed of `given` already, which goes on."""
        ...

    def refuse_again(self) -> None:
        """An error if a global batch of which a part was read cannot be read again."""
        ...


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
