"""The methods of an engine that its loaders call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as td

from ds_dynatrain.adapters.deepspeed.curriculum import CurriculumOrder
from ds_dynatrain.data import BatchArithmetic, EvaluationLoader, Leaf, MicroBatch, Slot, TrainLoader
from ds_dynatrain.engine.switcher import SwitchingEngine
from ds_dynatrain.errors import DataError
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.core import OpenBatch
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.space.leaves import MicroStep

T = TypeVar("T")


@dataclass(eq=False)
class LoadingEngine(SwitchingEngine):
    """An engine with the methods that its loaders call (see `data.loader.Host`)."""

    evaluation_loaders: int = 0
    """Number of evaluation loaders made so far."""
    _opened: dict[str, tuple[str, int]] = field(default_factory=dict)
    """For each train loader, by name, when its last global batch began: the segment of training, and the number of
    micro-batches trained before."""

    @property
    def data_rank(self) -> int:
        """This member's index on the data axis; -1 on an idle member."""
        return self.place("data")

    @property
    def batch(self) -> BatchArithmetic:
        """How a global batch is divided among the ranks of the current world."""
        return self.batch_for(self.layout)

    def turn(self) -> AbstractContextManager[None]:
        """Return the context manager within which a loader works. Process-wide state belongs to this engine
        meanwhile."""
        return PROCESS.turn(self)

    def begin_epoch(self, loader: TrainLoader) -> int | None:
        """Begin a pass over a train loader; see `Host.begin_epoch`."""
        return PROCESS.sync_points.begin_epoch(loader.name, loader.is_under_way, loader.source.sampler_epoch)

    def begin_evaluation(self, loader: EvaluationLoader) -> bool:
        """Begin a pass over an evaluation loader; return whether this member takes part, so that the loader has
        batches."""
        return PROCESS.sync_points.arrive(f"a pass over {loader.name!r}") is not None

    def before_micro_batch(self) -> None:
        """Form a new world if the current one is lost. Called by a train loader before each micro-batch."""
        PROCESS.membership.before_micro_batch(self)

    def before_batch(self, loader: TrainLoader) -> None:
        """Carry out changes that are due between two steps. Called by a train loader before it begins a global batch.

        Raises DataError if the loader's last global batch was trained only partly.
        """
        self._refuse_part(loader)
        self.at_boundary(loader.name)
        PROCESS.membership.open_window(self)
        self._opened[loader.name] = self.segment, self.micro_steps

    def _refuse_part(self, loader: TrainLoader) -> None:
        """Raise DataError if the loader's last global batch was trained only partly.

        Otherwise DeepSpeed's gradient accumulation would stay unfinished at all later boundaries, and no switch, save
        or SIGTERM could take effect.
        """
        segment, opened = self._opened.get(loader.name, ("", 0))
        trained = self.micro_steps - opened
        if self.idle or segment != self.segment or not 0 < trained < self.accumulation:
            return
        raise DataError(
            f"loader {loader.name!r}: before global batch {loader.cursor.step} of epoch {loader.cursor.epoch}, "
            f"{trained} of {self.accumulation} micro-batches of the last one were trained: one was left out "
            "(`continue`), or they are drawn ahead of training; train every micro-batch, one that is to count nothing "
            "with a finite loss times 0: engine.backward(0 * engine(OTHER_INPUTS)), engine.step(); or leave out whole "
            "global batches, which loader.windows() gives"
        )

    def check_order(self, loader: TrainLoader, digest: int) -> None:
        """Check that a loader has the same order of samples on all working ranks; see `LoaderHost.check_order`.

        digest: a hash of this rank's order.
        """
        extremes = torch.tensor([digest, -digest])

        def reduced() -> torch.Tensor:
            world = self.world
            if world is not None:
                td.all_reduce(extremes, td.ReduceOp.MAX, group=world.default)
            return extremes

        largest, smallest = self.together("a loader's order", reduced, lambda: extremes).tolist()
        if largest != -smallest:
            raise DataError(
                f"loader {loader.name!r}: the ranks read different samples as global batch {loader.cursor.step} of "
                f"epoch {loader.cursor.epoch}; every rank must read the whole stream, in the same order: do not divide "
                "it between nodes or workers (in webdataset: nodesplitter=None), and seed its shuffling, and a "
                "sampler's generator, alike on all ranks"
            )

    def deal(self, slot: Slot, last: bool) -> None:
        """Record the weight and the number of samples of the micro-batch that a train loader is about to return.

        slot: the weight and number of samples.
        last: whether the micro-batch completes the global batch.
        """
        host = self.host
        host.slot_weight, host.slot_is_borrowed = slot.weight, slot.is_borrowed
        if isinstance(slot, Leaf):
            host.micro_step = MicroStep(slot.micro_step, self.batch.data, slot.leaves)
            streams.begin_leaf(self.stream_seed, self.global_steps, slot.number)
        self.open_batch = OpenBatch(True, self._samples_with(slot), last)

    def note_slots(self, slots: Sequence[Slot]) -> None:
        """Record the weights and numbers of samples of this rank's micro-batches in a global batch. Called by a train
        loader before it returns the first of them."""
        for slot in slots:
            self.open_batch = OpenBatch(True, self._samples_with(slot), False)

    def _samples_with(self, slot: Slot) -> int | None:
        """Return the number of samples in the current global batch, computed from the weight and number of samples of
        one micro-batch; None if they do not determine it."""
        if isinstance(slot, Leaf):
            return slot.batch_samples
        if slot.is_borrowed:
            return self.open_batch.samples
        return round(slot.samples * self.batch.slots / slot.weight)

    @contextmanager
    def micro_batch(self, one: MicroBatch, is_divided: bool) -> Iterator[None]:
        """Context manager for training one micro-batch; see `DynatrainEngine.micro_batch`."""
        if not isinstance(one, MicroBatch):
            raise DataError(
                f"engine.micro_batch: a {type(one).__name__} is not one of a loader's windows(); write `for window in "
                "loader.windows(): for one in window: with engine.micro_batch(one):`"
            )
        if not self.is_discarded:
            if one.generation != self.generation:
                raise DataError(
                    f"engine.micro_batch: the world of generation {one.generation} dealt it, and this is generation "
                    f"{self.generation}; draw the next global batch"
                )
            self.deal(one.slot, one.is_last)
            self.host.loss_is_divided = is_divided
        try:
            yield
        finally:
            self.host.loss_is_divided = False

    @property
    def of_curricula(self) -> list[TrainLoader]:
        """Train loaders whose order of samples follows a curriculum."""
        return [loader for loader in self.train_loaders.values() if isinstance(loader.order, CurriculumOrder)]

    def together(self, name: str, call: Callable[[], T], alone: Callable[[], T]) -> T:
        """Run a collective of the working members and return its result. If not all members take part, return the
        result of `alone` instead.

        Not all members take part if the world is aborted during the collective, if the global batch is discarded, or if
        this member joined late and the others are elsewhere in their scripts.

        name: a name for the log, the same on all members.
        call: runs the collective.
        """
        if self.is_discarded or not (self.is_in_epoch or PROCESS.sync_points.arrive(name) is not None):
            return alone()
        return PROCESS.membership.surviving(self, call, alone)
