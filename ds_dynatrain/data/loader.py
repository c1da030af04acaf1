"""The loader of training data: one object for a whole job, whose batches follow the world.

A position is counted in global batches, and within a batch in micro-batches. The indices that this rank reads, and the
samples that it has prefetched, belong to one world: the iterator holds them, and recomputes them from the position when
the generation has changed. Worker processes live as long as the iterator, as in stock torch, and survive a change of
world.

The rules of `iter`:

- Each `iter()` asks the user's `DistributedSampler` for the epoch that `set_epoch` has set. A pass that the job has
  already begun continues in its original order.
- A new `iter()` is a new pass: stock torch would start from sample 0 again, and so does this loader, as the next epoch.
  A pass is over when its last batch was returned and `StopIteration` raised, or when its iterator was dropped by a
  `break`.
- After `load_state_dict` of a position inside a pass, the next `iter()` continues from this position. So does an
  iterator that already exists.
- A global batch that was begun must be returned in full; otherwise the next `iter()` raises an error.
- If the host reports that the other members have left their loops, the pass has no batch, and the position stays.
- Only one iterator may be used at a time: an older one raises.

The loader of evaluation data has no position and no boundary, and returns the same number of batches on every rank.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from ds_dynatrain.data.batch import BatchArithmetic, Slot
from ds_dynatrain.data.order import Cursor, EpochOrder
from ds_dynatrain.data.source import DataSource, Sample
from ds_dynatrain.data.workers import apart, like_stock, without_collection
from ds_dynatrain.errors import DataError


class LoaderHost(Protocol):
    """The current world, as an engine shows it to its loaders. It changes only inside `before_batch` and
    `before_micro_batch`.

    On an idle member `data_rank` is undefined; `batch` still has the `train_batch_size`, which is the same in every
    world.
    """

    @property
    def data_rank(self) -> int:
        """This member's index on the data axis, 0 to data - 1. Members with equal indices get the same samples.
        Undefined on an idle member."""

    @property
    def batch(self) -> BatchArithmetic:
        """The rule by which the samples of a global batch are assigned to ranks in the current world."""

    @property
    def generation(self) -> int:
        """Number of the current world. When this number changes, a loader assigns its samples to ranks again."""

    @property
    def idle(self) -> bool:
        """Whether this member currently holds no state."""

    def turn(self) -> AbstractContextManager[None]:
        """Return a context manager within which the process's random streams are those of this job. Every call of a
        loader runs inside this context."""

    def begin_epoch(self, loader: TrainLoader) -> int | None:
        """Return the epoch that the job has set for the loader's sampler. Called by `iter` of a train loader.

        Returns None on a member that joined late if the others have left their loops. In this case the pass has no
        batch.
        """

    def begin_evaluation(self, loader: EvaluationLoader) -> bool:
        """Return whether the other members also make this pass over an evaluation loader. Called by the loader's
        `iter`."""

    def before_micro_batch(self) -> None:
        """Let the host act before a micro-batch. The host may reset a loader to the start of its global batch."""

    def before_batch(self, loader: TrainLoader) -> None:
        """Let a pending change take effect. Called before the first micro-batch of each global batch.

        On an idle member this call returns once the member works again and `loader.load_state_dict` has set the
        position. A host that makes a member wait calls `loader.close()` first, so that no worker processes are kept
        waiting.
        """

    def check_order(self, loader: TrainLoader, digest: int) -> None:
        """Raise `DataError` on all working members unless they have the same `digest` of a loader's order.

        Called on all working members, in the first global batch of each pass and of each world, if the order comes from
        the user's own stream or sampler.
        """

    def deal(self, slot: Slot, last: bool) -> None:
        """Record the samples and the weight (the slot) of the micro-batch that is about to be returned.

        last: whether the micro-batch is the last one of its global batch.
        """

    def note_slots(self, slots: Sequence[Slot]) -> None:
        """Record the slots of all micro-batches of this rank in a global batch that is fetched as a whole. `deal` is
        called for each of them later."""


@dataclass(frozen=True)
class MicroBatch:
    """Data and weight of one forward and backward pass.

    data: the result of the data set and `collate_fn`.
    slot: the micro-batch's samples in the global batch, and their weight.
    is_last: whether this is the rank's last micro-batch of the global batch.
    generation: number of the world in which the micro-batch was assigned to this rank.
    """

    data: Any
    slot: Slot
    is_last: bool
    generation: int

    @property
    def samples(self) -> int:
        """Number of samples that count; 0 if the micro-batch repeats another rank's sample."""
        return self.slot.samples

    @property
    def is_borrowed(self) -> bool:
        """Whether the micro-batch has no samples of its own, and so does not count."""
        return self.slot.is_borrowed

    @property
    def weight(self) -> float:
        """Factor for the mean loss that makes the gradient the mean over all samples of the global batch."""
        return self.slot.weight


@dataclass(frozen=True)
class Windows:
    """A train loader whose items are global batches: this rank's micro-batches of one optimizer step.

    Its length is the same in every world. Each `iter` begins a pass over the loader, under the same rules as
    `iter(loader)`.
    """

    loader: TrainLoader

    def __len__(self) -> int:
        return len(self.loader.order) and self.loader.order.steps

    def __iter__(self) -> Iterator[tuple[MicroBatch, ...]]:
        return iter(iter(self.loader).next_window, None)


class Loader:
    """Attributes that train and evaluation loaders share with torch's `DataLoader`."""

    source: DataSource

    @property
    def dataset(self) -> Any:
        """The map-style data set from which samples are read."""
        return self.source.dataset

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any] | None:
        """The user's function that collates samples into a batch; None for torch's default."""
        return self.source.collate_fn

    @property
    def num_workers(self) -> int:
        """Number of worker processes on each member."""
        return self.source.num_workers


class TrainLoader(Loader):
    """Batches of a training set, in the current world. `name` distinguishes the loader from the other loaders of an
    engine.

    Raises `DataError` if an epoch would have no global batch.
    """

    def __init__(
        self, source: DataSource, host: LoaderHost, name: str = "train", order: EpochOrder | None = None
    ) -> None:
        self.name = name
        self.source = source
        self.order: EpochOrder = source.order(host.batch.train_batch_size) if order is None else order
        """Assignment of samples to global batches; the same in every world."""
        self.post_process: Callable[[Any, dict[str, Any]], Any] | None = None
        """Function that makes the batch to train on, from a fetched batch and the order's state at the time its global
        batch was fetched."""
        self.samples = 0
        """Number of samples that count in the micro-batch that `next` returned last; 0 if it repeats another rank's
        sample."""
        self._host = host
        self._at = Cursor()
        self._follows_sampler, self._sampler_epoch = source.sampler is not None and order is None, 0
        self._micro = 0
        self.is_under_way = False
        """Whether the next `iter` continues a pass that the job has already begun, after `load_state_dict`."""
        self._loads = 0
        self._live: weakref.ref[Pass] | None = None

    @property
    def batch_size(self) -> int:
        """The most samples that a micro-batch holds."""
        return self._host.batch.micro_batch_limit

    @property
    def pin_memory(self) -> bool:
        """Whether batches are copied to pinned memory."""
        return self.source.pin_memory

    @property
    def drop_last(self) -> bool:
        """Whether a short last global batch is dropped."""
        return self.source.drop_last

    @property
    def sampler(self) -> EpochOrder:
        """The order of the samples, under the name that torch loaders use for their sampler."""
        return self.order

    @property
    def cursor(self) -> Cursor:
        """The first global batch that was not returned in full; after a `break`, the first one of the next epoch."""
        left = not self.has_begun and self._micro == 0 and self._at.step > 0
        return self._at.next_epoch() if left else self._at

    @property
    def mid_window(self) -> bool:
        """Whether this rank has fetched some, but not all, micro-batches of a global batch."""
        return self._micro > 0

    @property
    def has_begun(self) -> bool:
        """Whether a pass is under way: its iterator exists, or is still to be made after `load_state_dict`."""
        return self.is_under_way or (self._live is not None and self._live() is not None)

    @property
    def order_epoch(self) -> int:
        """The epoch that determines the order: the job's epoch, or the one that was set on the user's sampler for this
        pass."""
        return self._sampler_epoch if self._follows_sampler else self._at.epoch

    def __len__(self) -> int:
        """Return the number of micro-batches per epoch on this rank in the current world; on an idle member, the number
        on the rank with the most. Raises TypeError for a stream."""
        host, _ = self._host, len(self.order)
        return self.order.steps * (host.batch.accumulation if host.idle else host.batch.micro_batches(host.data_rank))

    def __iter__(self) -> Pass:
        """Return an iterator over the rest of the epoch. The rules are at the top of this file.

        Raises `DataError` if a global batch was begun and not returned in full.
        """
        if self._micro:
            raise DataError(
                f"loader {self.name!r}: iter() in the middle of global batch {self._at.step}, epoch {self._at.epoch}: "
                f"{self._micro} of {self._host.batch.micro_batches(self._host.data_rank)} micro-batches are dealt; "
                "leave the loop only after a complete accumulation window (engine.is_gradient_accumulation_boundary())"
            )
        with self._host.turn():
            sampler_epoch = self._host.begin_epoch(self)
            has_batches = sampler_epoch is not None
            draws = has_batches and not self.is_under_way and not self._host.idle
            stream = like_stock() if draws else None
        if not self.is_under_way:
            self._at = self._at.next_epoch() if self._at.step else self._at
            self._sampler_epoch = sampler_epoch or 0
        fresh = Pass(self, self._host, stream, is_over=not has_batches)
        self._live = weakref.ref(fresh) if has_batches else None
        return fresh

    def windows(self) -> Windows:
        """Return an iterable of global batches, each a tuple of this rank's `MicroBatch` objects.

        Use it in a loop that fetches a whole global batch before its first forward pass. Put `with
        engine.micro_batch(one):` around the forward, backward and step calls of each micro-batch `one`.
        """
        return Windows(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the order in which it is counted: plain integers and booleans, the same on every
        rank.

        In the middle of a global batch, the position is the start of that batch.
        """
        cursor = self.cursor
        begun = (self.has_begun or self.mid_window) and cursor == self._at
        state = {"cursor": cursor.to_dict(), "begun": begun, "order": self.order.describe()}
        own = self.order.state_at(cursor)
        state = state if own is None else {**state, "own": own}
        return {**state, "sampler epoch": self._sampler_epoch} if self._follows_sampler else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in `state`, and discard prefetched samples.

        Raises `DataError` if the position was counted in another order: a different data set length, batch size, seed,
        shuffle or drop_last.
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
        self._at, self._micro, self.is_under_way = cursor, 0, bool(state["begun"])
        self.order.load(cursor, state.get("own"))
        self._sampler_epoch = int(state.get("sampler epoch", 0))
        self._loads += 1

    def close(self) -> None:
        """End the worker processes and discard prefetched samples. The position stays, and the next `next` starts new
        workers."""
        live = self._live() if self._live is not None else None
        if live is not None:
            live.close()


class Pass(Iterator[Any]):
    """The iterator of a `TrainLoader`, which holds everything that depends on the current world."""

    def __init__(
        self, loader: TrainLoader, host: LoaderHost, stream: torch.Generator | None, is_over: bool = False
    ) -> None:
        self.loader = loader
        self._host = host
        self._stream = stream
        self._key = (host.generation, loader._loads)
        self._rows: dict[int, tuple[Slot, ...]] = {}
        self._window: tuple[Slot, ...] = ()
        self._torch: DataLoader[Any] | None = None
        self._fetch: Iterator[Any] | None = None
        self._over, self._stands = is_over, False
        self._compared: set[int] = set()
        """Generations in which members have compared the order; the same on all members of a generation."""

    def reach_boundary(self) -> None:
        """Advance to the next global batch and let a pending change take effect, unless a global batch is open. Called
        by `next`.

        Raises StopIteration if the pass is over.
        """
        loader = self.loader
        if self._over:
            raise StopIteration
        if loader._live is None or loader._live() is not self:
            raise DataError(
                f"loader {loader.name!r}: this iterator has been replaced by a later iter(); draw from the newest one"
            )
        self._host.before_micro_batch()
        while not (loader.mid_window or (self._stands and self._key == (self._host.generation, loader._loads))):
            self._open_window()  # repeated if the world is lost while members compare their orders
            self._stands = True

    def skip(self) -> None:
        """Skip the current global batch, whose samples other members need and this member does not."""
        self.close()
        self._stands, self.loader.is_under_way = False, False
        self.loader._at = self.loader._at.advance()

    def __next__(self) -> Any:
        with self._host.turn():
            self.reach_boundary()
            return self._draw(self._deal).data

    def _deal(self, slot: Slot, last: bool) -> None:
        self._host.deal(slot, last)
        self.loader.samples = slot.samples

    def next_window(self) -> tuple[MicroBatch, ...]:
        """Return this rank's micro-batches of the next whole global batch.

        They are not reported to `LoaderHost.deal`; the code that trains them does this. Raises DataError if `next` has
        already returned some micro-batches of the current global batch.
        """
        loader, drawn = self.loader, list[MicroBatch]()
        if loader.mid_window:
            raise DataError(
                f"loader {loader.name!r}: {loader._micro} micro-batches of global batch {loader._at.step} were dealt "
                "one by one; go on so to its end, or draw whole global batches from the start"
            )
        with self._host.turn():
            while not (drawn and drawn[-1].is_last):
                self.reach_boundary()
                if not loader.mid_window:  # a change at the boundary may have moved the loader back
                    drawn.clear()
                drawn.append(self._draw(self._open))
        return tuple(drawn)

    def _open(self, slot: Slot, last: bool) -> None:
        if not self.loader.mid_window:
            self._host.note_slots(self._window)

    def close(self) -> None:
        """Drop the torch loader. Its worker processes end once nothing refers to the loader any longer."""
        self._fetch = self._torch = None

    def _open_window(self) -> None:
        """Open the next global batch in the current world. Raises StopIteration if the pass is over.

        An idle member learns whether the pass is over once it works again.
        """
        loader = self.loader
        if not self._host.idle:
            self._end_if_over()
        self._host.before_batch(loader)
        self._end_if_over()
        key = (self._host.generation, loader._loads)
        if key != self._key:
            self._fetch, self._rows, self._key = None, {}, key
        now, then = self._host.batch.train_batch_size, loader.order.train_batch_size
        if now != then:
            raise DataError(
                f"loader {loader.name!r}: train_batch_size became {now}, and its epochs are cut by {then}; "
                "it cannot change under a live switch, make a new engine"
            )
        if key[0] not in self._compared and (digest := loader.order.digest(loader._at)) is not None:
            self._compared.add(key[0])
            self._host.check_order(loader, digest)
            if self._host.generation != key[0]:
                return
        samples = loader.order.size(loader._at)
        if samples not in self._rows:
            self._rows[samples] = self._host.batch.deal(samples).rank(self._host.data_rank)
        self._window = self._rows[samples]

    def _end_if_over(self) -> None:
        loader = self.loader
        if loader.order.size(loader._at):
            return
        self.close()
        self._over = True
        loader._at, loader.is_under_way, loader._live = loader._at.next_epoch(), False, None
        raise StopIteration

    def _draw(self, announce: Callable[[Slot, bool], None]) -> MicroBatch:
        """Return the next micro-batch, and move the position past it. After an error the next call reads the same
        micro-batch again.

        announce: called, before the position moves, with the slot and whether it ends its global batch.
        """
        loader, host = self.loader, self._host
        slot, is_last = self._window[loader._micro], loader._micro + 1 == len(self._window)
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
            announce(slot, is_last)
        except StopIteration as error:
            self.close()
            raise DataError(
                f"loader {loader.name!r}: the data set raised StopIteration in global batch {loader._at.step}, epoch "
                f"{loader._at.epoch}; let __getitem__ and collate_fn return a value for every index below len(dataset)"
            ) from error
        except BaseException:
            self.close()
            raise
        self._stands = loader.is_under_way = False
        loader._micro = 0 if is_last else loader._micro + 1
        loader._at = loader._at.advance() if is_last else loader._at
        return MicroBatch(batch, slot, is_last, self._key[0])

    def _start(self) -> Iterator[Any]:
        """Return this rank's remaining micro-batches of the epoch, from the current torch loader or a new one."""
        loader, host = self.loader, self._host
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

    Position, rank and world are read at each `iter()`, which a torch loader calls whenever it starts over.
    """

    def __init__(self, loader: TrainLoader, host: LoaderHost) -> None:
        self._loader = loader
        self._host = host

    def __iter__(self) -> Iterator[list[Any]]:
        loader, batch, rank = self._loader, self._host.batch, self._host.data_rank
        at, dealt = loader._at, loader._micro
        rows: dict[int, list[torch.Tensor]] = {}
        for chosen in loader.order.batches(loader.order_epoch, at.step):
            samples = len(chosen)
            if samples not in rows:
                rows[samples] = [torch.tensor(slot.positions) for slot in batch.deal(samples).rank(rank)]
            for positions in rows[samples][dealt:]:
                indices = chosen[positions].tolist()
                yield [Sample(at.epoch, index) for index in indices] if loader.source.seeds_samples else indices
            dealt = 0


class EvaluationLoader(Loader):
    """Batches of an evaluation set, divided among the ranks of the world at the time of `iter()`. No sample counts
    twice.

    Sample i of the order goes to rank i % data. All ranks yield the same number of batches, because a forward pass
    under ZeRO-3 is a collective; a rank that has run out of samples repeats the first one. Weight results by `samples`,
    the number of samples in the last batch that count on this rank (0 for a repeat):

        for batch in loader:
            total += engine(batch).item() * loader.samples
            count += loader.samples

    `batch_size` is the given one, else that of the torch `DataLoader`, else the micro-batch size of the engine.
    `drop_last` is ignored, because the samples dropped would depend on the world.
    """

    def __init__(
        self, source: DataSource, host: LoaderHost, batch_size: int | None = None, name: str = "evaluation"
    ) -> None:
        self.name = name
        self.source = source
        self.samples = 0
        """Number of samples in the last batch yielded on this rank that count."""
        self.batch_size: int = batch_size or source.batch_size or host.batch.micro_batch_limit
        """The most samples in a batch of one rank."""
        self._host = host
        self._order = source.order(self.batch_size)

    def __len__(self) -> int:
        """Return the number of batches on each rank in the current world."""
        return math.ceil(self._order.length / (self._host.batch.data * self.batch_size))

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches; none if the other members are not evaluating. Raises `DataError` on an idle
        member."""
        if self._host.idle:
            raise DataError(
                "an idle member holds no state and cannot evaluate: iterate over an evaluation loader only where "
                "engine.idle is false"
            )
        with self._host.turn():
            if not self._host.begin_evaluation(self):
                return iter(())
        return self._batches(self._host.data_rank, self._host.batch.data, len(self))

    def _batches(self, rank: int, data: int, count: int) -> Iterator[Any]:
        permutation = self._order.permutation(0)
        mine = permutation[rank::data].tolist()
        own = [mine[start : start + self.batch_size] for start in range(0, count * self.batch_size, self.batch_size)]
        spare = permutation[:1].tolist()
        with self._host.turn(), without_collection():
            batches = iter(self.source.fetch([indices or spare for indices in own], None))
        for indices in own:
            with self._host.turn():
                batch = next(batches)
            self.samples = len(indices)
            yield batch
