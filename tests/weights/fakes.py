"""A source of weights without an engine, and receivers in threads of the test process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.errors import MemberMissing
from ds_dynatrain.weights.outputs import ParamMeta
from ds_dynatrain.weights.receivers.group_receiver import GroupReceiver
from ds_dynatrain.weights.update import Update

SHAPES = {"words": (23, 6), "block.up": (10, 7), "block.down": (7, 10), "norm": (7,), "scale": (), "none": (0, 4)}
CUTS = {"words": 0, "block.up": 0, "block.down": 1}


def values(step: int, dtype: torch.dtype = torch.float32, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """The weights of a step; some of them are those of step 0."""
    found = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        start = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        change = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + number))
        is_changed = torch.rand(shape, generator=torch.Generator().manual_seed(77 * step + number)) < scale
        found[name] = torch.where(is_changed & (step > 0), change, start).to(dtype)
    return found


class FakeSource:
    """The contract of `WeightSource` over a dict of whole tensors, which is cut into runs of all ranks.

    cut: elements of a run before another rank's begins.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], step: int = 0, rank: int = 0, world_size: int = 1, cut: int = 17
    ) -> None:
        self.weights, self.step, self.rank, self.world_size, self.cut = weights, step, rank, world_size, cut
        self.layout = f"{world_size} ranks, cut at {cut}"
        self.metadata = [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in weights.items()]
        self.collectives = 0

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors on rank 0."""
        for name, each in self.weights.items():
            yield name, each if self.rank == 0 else each.to("meta")

    def runs(self) -> Iterator[tuple[str, Extent, torch.Tensor]]:
        """Runs of `cut` elements, dealt to the ranks in turn; an odd tensor as a series of runs with a distance."""
        for name, each in self.weights.items():
            flat = each.reshape(-1)
            for number, start in enumerate(range(0, flat.numel(), self.cut)):
                if number % self.world_size == self.rank:
                    part = flat[start : start + self.cut]
                    yield name, Extent(start, len(part), 0, 1), part.view(1, -1)


def fake_source(step: int, **more: Any) -> FakeSource:
    """The source of a step on this rank of the launch group."""
    dtype, scale = more.pop("dtype", torch.float32), more.pop("scale", 0.1)
    return FakeSource(values(step, dtype, scale), step, td.get_rank(), td.get_world_size(), **more)


@dataclass
class Rollouts:
    """Receiving ranks in threads, which take every update; `updates` has the records of rank 0.

    keeps: whether `weights` has a copy of each version.
    """

    size: int = 1
    placements: Mapping[str, int] = field(default_factory=lambda: CUTS)
    seconds: float = 20.0
    receivers: list[GroupReceiver] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    weights: list[list[dict[str, torch.Tensor]]] = field(default_factory=list)
    """Copies of the weights, by rank and update."""
    stopped: bool = False
    keeps: bool = True

    @property
    def address(self) -> str:
        """Where the trainer finds them."""
        return self.receivers[0].address

    def whole(self, update: int = -1) -> dict[str, torch.Tensor]:
        """The whole tensors of an update, put together from all ranks."""
        ranks = [weights[update] for weights in self.weights]
        return {
            name: torch.cat([each[name] for each in ranks], self.placements[name]) if name in self.placements else held
            for name, held in ranks[0].items()
        }

    def wait(self, count: int) -> None:
        """Until all have taken `count` updates."""
        end = time.monotonic() + self.seconds
        while min(map(len, self.weights)) < count:
            assert time.monotonic() < end, f"{count} updates expected, {[len(each) for each in self.weights]} arrived"
            time.sleep(0.01)

    def start_anew(self, rank: int) -> None:
        """Put another receiver, which knows nothing, in the place of a rank between two updates."""
        before = self.receivers[rank]
        self.receivers[rank] = GroupReceiver(
            self.address, rank, self.size, self.placements, timeout_seconds=self.seconds
        )
        time.sleep(0.5)  # until the other one is asked no more
        before.close()

    def _run(self, rank: int) -> None:
        while not self.stopped:
            receiver = self.receivers[rank]
            try:
                record = receiver.update(timeout_seconds=0.2)
            except MemberMissing:
                continue
            kept = {name: held.clone() for name, held in receiver.weights.items()} if self.keeps else {}
            self.weights[rank].append(kept)
            if rank == 0:
                self.updates.append(record)


@contextmanager
def rollouts(
    size: int = 1, placements: Mapping[str, int] = CUTS, seconds: float = 20.0, keeps: bool = True
) -> Iterator[Rollouts]:
    """Receivers that run in threads inside the block."""
    made = Rollouts(size, placements, seconds, keeps=keeps)
    for rank in range(size):
        address = "127.0.0.1:0" if rank == 0 else made.address
        made.receivers.append(GroupReceiver(address, rank, size, placements, timeout_seconds=seconds))
        made.weights.append([])
    threads = [threading.Thread(target=made._run, args=(rank,), name=f"rollout-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        made.stopped = True
        for thread in threads:
            thread.join(seconds)
        for receiver in made.receivers:
            receiver.close()
