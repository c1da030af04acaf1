"""The loader of training data: one object for a whole job, whose batches follow the world.

A position is counted in global batches, and inside one in micro-batches. Which indices this rank reads, and what it has
prefetched, belongs to a world: it hangs on the iterator and is made anew from the position when the generation has
changed. Worker processes live as long as the iterator, as in stock torch; a change of world does not start them anew.
The rules of `iter`:

- A `DistributedSampler` of the user's is asked at each `iter()` for the epoch that `set_epoch` has named; a pass that
  the job is in goes on in the order that it began with.
- A new `iter()` is a new pass: where stock torch would start from sample 0 again, so does this one, as the next
  epoch. A pass is over when its last batch was dealt and `StopIteration` raised, or when its iterator was dropped by
  a `break`.
- After `load_state_dict` of a position inside a pass, the next `iter()` goes on from there. An iterator that already
  exists goes on from there too.
- A global batch that was begun must be dealt in full: leaving it in the middle is an error of the next `iter()`.
- Where the host says that the others have left their loops, the pass has no batch, and the position stays where it is.
- One iterator at a time: an older one raises.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from ds_dynatrain.data.batch import BatchArithmetic, Slot
from ds_dynatrain.data.cursor import Cursor
from ds_dynatrain.data.host import Host
from ds_dynatrain.data.order import Order
from ds_dynatrain.data.seeded import in_epoch
from ds_dynatrain.data.source import MapStyle, Source
from ds_dynatrain.data.windows import MicroBatch, Windows
from ds_dynatrain.data.workers import apart, like_stock, without_collection
from ds_dynatrain.errors import DataError


class TrainLoader:
    """Batches of a training set, in the present world; `name` tells it from the other loaders of an engine.

    Raises `DataError` if an epoch would have no global batch.
    """

    def __init__(self, source: Source, host: Host, name: str = "train", order: Order | None = None) -> None:
        self.name = name
        self.source = source
        self.order: Order = source.order(host.batch.train_batch_size) if order is None else order
        """Which samples are in which global batch; the same in every world."""
        self.post_process: Callable[[Any, dict[str, Any]], Any] | None = None
        """Makes the batch to train on, of a batch and the order's state when its global batch was drawn."""
        self.samples = 0
        """Samples of its own in the micro-batch that `next` dealt last; 0 for one that repeats another's sample."""
        self._host = host
        self._at = Cursor()
        self._follows_sampler, self._sampler_epoch = source.sampler is not None and order is None, 0
        self._micro = 0
        self._resume = False
        self._loads = 0
        self._live: weakref.ref[Pass] | None = None

    @property
    def dataset(self) -> MapStyle:
        """The data set."""
        return self.source.dataset

    @property
    def batch_size(self) -> int:
        """The most samples that a micro-batch holds."""
        return self._host.batch.micro_batch_limit

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any] | None:
        """The user's function that makes a batch of samples; None is torch's default."""
        return self.source.collate_fn

    @property
    def num_workers(self) -> int:
        """Worker processes on each member."""
        return self.source.num_workers

    @property
    def pin_memory(self) -> bool:
        """Whether batches are copied to pinned memory."""
        return self.source.pin_memory

    @property
    def drop_last(self) -> bool:
        """Whether a short last global batch is dropped."""
        return self.source.drop_last

    @property
    def sampler(self) -> Order:
        """The order of the samples, in the place where a torch loader has its sampler."""
        return self.order

    @property
    def cursor(self) -> Cursor:
        """The first global batch not dealt in full; after a `break`, the first one of the next epoch."""
        left = not self.has_begun and self._micro == 0 and self._at.step > 0
        return self._at.next_epoch() if left else self._at

    @property
    def mid_window(self) -> bool:
        """Whether a global batch was begun here and not dealt in full."""
        return self._micro > 0

    @property
    def has_begun(self) -> bool:
        """Whether a pass is under way: its iterator lives, or is still to come after `load_state_dict`."""
        return self._resume or (self._live is not None and self._live() is not None)

    @property
    def order_epoch(self) -> int:
        """The epoch that decides the order: the job's, or the one that the user's sampler was set to for this pass."""
        return self._sampler_epoch if self._follows_sampler else self._at.epoch

    @property
    def is_under_way(self) -> bool:
        """Whether the next `iter` goes on with a pass that the job is in, after `load_state_dict`."""
        return self._resume

    def __len__(self) -> int:
        """Micro-batches per epoch on this rank in the present world; on an idle member those of the rank with most."""
        host = self._host
        return self.order.steps * (host.batch.accumulation if host.idle else host.batch.micro_batches(host.data_rank))

    def __iter__(self) -> Pass:
        """An iterator over what remains of the epoch; see the rules of this file.

        Raises `DataError` if a global batch was begun and not dealt in full.
        """
        if self._micro:
            raise DataError(
                f"loader {self.name!r}: iter() in the middle of global batch {self._at.step}, epoch {self._at.epoch}: "
                f"{self._micro} of {len(self) // self.order.steps} micro-batches are dealt; leave the loop only after "
                "a complete accumulation window (engine.is_gradient_accumulation_boundary())"
            )
        with self._host.turn():
            sampler_epoch = self._host.begin_epoch(self)
            has_batches = sampler_epoch is not None
            draws = has_batches and not self._resume and not self._host.idle
            stream = like_stock() if draws else None
        if not self._resume:
            self._at = self._at.next_epoch() if self._at.step else self._at
            self._sampler_epoch = sampler_epoch or 0
        fresh = Pass(self, self._host, stream, is_over=not has_batches)
        self._live = weakref.ref(fresh) if has_batches else None
        return fresh

    def windows(self) -> Windows:
        """The same as an iterable of global batches, each a tuple of objects of `MicroBatch`, this rank's.

        For a loop that draws a whole global batch before its first pass. `with engine.micro_batch(one):` around
        forward, backward and step says which one they are about.
        """
        return Windows(self.__iter__, self.order.steps)

    def state_dict(self) -> dict[str, Any]:
        """The position and the order that it counts in: plain integers and booleans, the same on every rank.

        In the middle of a global batch it is the start of that batch.
        """
        cursor = self.cursor
        begun = (self.has_begun or self.mid_window) and cursor == self._at
        state = {"cursor": cursor.to_dict(), "begun": begun, "order": self.order.describe()}
        return {**state, "sampler epoch": self._sampler_epoch} if self._follows_sampler else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the position of `state`; what an iterator has prefetched is thrown away.

        Raises `DataError` if it was counted in another order: another data set length, batch size, seed, shuffle or
        drop_last.
        """
        mine, theirs = self.order.describe(), dict(state["order"])
        differing = [name for name in mine if mine[name] != theirs.get(name)]
        if differing:
            pairs = ", ".join(f"{name} {theirs.get(name)!r} there and {mine[name]!r} here" for name in differing)
            raise DataError(
                f"loader {self.name!r}: the position cannot be taken over, it was counted in another order: {pairs}; "
                "use the same data set and batch size, or begin anew with a loader of another name: "
                "engine.loader(dataset, name=...)"
            )
        cursor = Cursor.from_dict(state["cursor"])
        if cursor.step > self.order.steps:
            raise DataError(
                f"loader {self.name!r}: {cursor} is behind the end of an epoch of {self.order.steps} steps; give what "
                "state_dict() of this loader returned, or use the data set that it was saved with"
            )
        self._at, self._micro, self._resume = cursor, 0, bool(state["begun"])
        self._sampler_epoch = int(state.get("sampler epoch", 0))
        self._loads += 1

    def close(self) -> None:
        """End the worker processes and drop what they have fetched; the position stays, and `next` starts anew."""
        live = self._live() if self._live is not None else None
        if live is not None:
            live.close()


class Pass(Iterator[Any]):
    """The iterator of a `TrainLoader`; it holds whatever belongs to the present world."""

    def __init__(self, loader: TrainLoader, host: Host, stream: torch.Generator | None, is_over: bool = False) -> None:
        self._loader = loader
        self._host = host
        self._stream = stream
        self._key = (host.generation, loader._loads)
        self._rows: dict[int, tuple[Slot, ...]] = {}
        self._window: tuple[Slot, ...] = ()
        self._torch: DataLoader[Any] | None = None
        self._fetch: Iterator[Any] | None = None
        self._over, self._stands = is_over, False

    @property
    def loader(self) -> TrainLoader:
        """Whose pass it is."""
        return self._loader

    def reach_boundary(self) -> None:
        """Stand at the next global batch, which `next` does by itself for its first micro-batch.

        StopIteration if the pass is over. A pending change takes effect here.
        """
        loader = self._loader
        if self._over:
            raise StopIteration
        if loader._live is None or loader._live() is not self:
            raise DataError(
                f"loader {loader.name!r}: this iterator has been replaced by a later iter(); draw from the newest one"
            )
        self._host.before_micro_batch()
        is_here = self._stands and self._key == (self._host.generation, loader._loads)
        if not loader.mid_window and not is_here:
            self._open_window()
            self._stands = True

    def skip(self) -> None:
        """Leave the global batch out at which it stands: this member has no use for its samples, others have."""
        self.close()
        self._stands, self._loader._resume = False, False
        self._loader._at = self._loader._at.advance()

    def __next__(self) -> Any:
        with self._host.turn():
            return self._next()

    def _next(self) -> Any:
        self.reach_boundary()
        loader = self._loader
        first, last, slot = loader._micro == 0, self._at_last, self._window[loader._micro]

        def deal() -> None:
            self._host.deal(slot, first, last)
            loader.samples = slot.samples

        batch = self._take(deal)
        self._advance(last)
        return batch

    def next_window(self) -> tuple[MicroBatch, ...]:
        """All micro-batches of this rank of the next global batch; `Host.deal` is for whoever trains them.

        DataError where `next` has begun one.
        """
        loader, drawn = self._loader, list[MicroBatch]()
        if loader.mid_window:
            raise DataError(
                f"loader {loader.name!r}: {loader._micro} micro-batches of global batch {loader._at.step} were dealt "
                "one by one; go on so to its end, or draw whole global batches from the start"
            )
        with self._host.turn():
            while not (drawn and drawn[-1].is_last):
                self.reach_boundary()
                if loader._micro == 0:  # it may have gone back to there
                    drawn.clear()
                drawn.append(self._draw())
                self._advance(drawn[-1].is_last)
        return tuple(drawn)

    def _draw(self) -> MicroBatch:
        """The next micro-batch, for later; with the first one of a global batch that is open."""
        slot, first = self._window[self._loader._micro], self._loader._micro == 0
        batch = self._take((lambda: self._host.open_batch(self._window)) if first else lambda: None)
        return MicroBatch(batch, slot, self._at_last, self._key[0])

    @property
    def _at_last(self) -> bool:
        return self._loader._micro + 1 == len(self._window)

    def _advance(self, last: bool) -> None:
        """A micro-batch was dealt. last: of its global batch."""
        loader = self._loader
        self._stands = loader._resume = False
        loader._micro = 0 if last else loader._micro + 1
        loader._at = loader._at.advance() if last else loader._at

    def close(self) -> None:
        """Drop the torch loader; its worker processes end with its last reference."""
        self._fetch = self._torch = None

    def _open_window(self) -> None:
        """Stand at a global batch in the present world, or end the pass; only a working member can judge which."""
        loader = self._loader
        if not self._host.idle:
            self._end_if_over()
        self._host.before_batch(loader)
        self._end_if_over()
        key = (self._host.generation, loader._loads)
        if key != self._key:
            self._fetch, self._rows, self._key = None, {}, key
        self._check_batch_size()
        samples = loader.order.samples(loader._at.step)
        if samples not in self._rows:
            self._rows[samples] = self._host.batch.deal(samples).rank(self._host.data_rank)
        self._window = self._rows[samples]

    def _check_batch_size(self) -> None:
        now, then = self._host.batch.train_batch_size, self._loader.order.train_batch_size
        if now != then:
            raise DataError(
                f"loader {self._loader.name!r}: train_batch_size became {now}, and its epochs are cut by {then}; "
                "it cannot change under a live switch, make a new engine"
            )

    def _end_if_over(self) -> None:
        loader = self._loader
        if loader._at.step < loader.order.steps:
            return
        self.close()
        self._over = True
        loader._at, loader._resume, loader._live = loader._at.next_epoch(), False, None
        raise StopIteration

    def _take(self, announce: Callable[[], None]) -> Any:
        """The next micro-batch, once `announce` has told the host; after an error the next call reads it again."""
        loader, host = self._loader, self._host
        if host.generation != self._key[0]:
            raise DataError(
                f"loader {loader.name!r}: generation {self._key[0]} became {host.generation} in the middle of a "
                "global batch; load_state_dict first, which goes back to its start"
            )
        try:
            if self._fetch is None:
                self._fetch = self._start()
            batch = next(self._fetch)
            if loader.post_process is not None:
                batch = loader.post_process(batch, loader.order.state(loader.order_epoch, loader._at.step))
            announce()
        except StopIteration as error:
            self.close()
            raise DataError(
                f"loader {loader.name!r}: the data set raised StopIteration in global batch {loader._at.step}, epoch "
                f"{loader._at.epoch}; let __getitem__ and collate_fn return a value for every index below len(dataset)"
            ) from error
        except BaseException:
            self.close()
            raise
        return batch

    def _start(self) -> Iterator[Any]:
        """This rank's remaining micro-batches of the epoch, from the torch loader that is there or a new one."""
        loader, host = self._loader, self._host
        if self._torch is None:
            stream, self._stream = self._stream, None
            if stream is None:
                at = loader._at
                stream = apart(loader.order.seed, at.epoch, at.step, loader._micro, host.generation, host.data_rank)
            self._torch = loader.source.fetch(_Remaining(loader, host), stream, persistent=True)
        with without_collection():
            return iter(self._torch)


class _Remaining:
    """The lists of indices that one rank reads from the loader's position to the end of the epoch.

    Position, rank and world are those at the time of `iter()`, which a torch loader calls whenever it starts over.
    """

    def __init__(self, loader: TrainLoader, host: Host) -> None:
        self._loader = loader
        self._host = host

    def __iter__(self) -> Iterator[list[Any]]:
        loader, host = self._loader, self._host
        rest: Iterator[list[Any]] = _rank_indices(loader, loader._at.step, host.batch, host.data_rank)
        if loader.source.seeds_samples:
            rest = in_epoch(loader._at.epoch, rest)
        return itertools.islice(rest, loader._micro, None)


def _rank_indices(loader: TrainLoader, step: int, batch: BatchArithmetic, rank: int) -> Iterator[list[int]]:
    """The data set's indices of one rank's micro-batches, from global batch `step` to the end of the present epoch."""
    rows: dict[int, list[torch.Tensor]] = {}
    for chosen in loader.order.batches(loader.order_epoch, step):
        samples = len(chosen)
        if samples not in rows:
            rows[samples] = [torch.tensor(slot.positions) for slot in batch.deal(samples).rank(rank)]
        for positions in rows[samples]:
            yield chosen[positions].tolist()
