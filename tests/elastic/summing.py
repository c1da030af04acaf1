"""A training script as small as one can be: each step adds up the samples of a batch, in whatever world there is.

Run by torchrun; writes a line of JSON for each step and each event into `$OUT/PID.jsonl`, until `$OUT/stop` is there.
All members hold the whole state (the step, and the sum over all samples so far), so whoever survives has it. After a
step the sum is one certain number (`tools/history.py`) in any history of worlds: a sample that is lost, or used twice,
is seen at once. Samples come from `$LOADERS` loader processes.

The main thread of process PID stands still for ever once `$OUT/hang-PID` is there.

Without our back-end it does what torch advises for elastic jobs: every world is a new process that loads a snapshot.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils.data import DataLoader, Dataset

from ds_dynatrain.data.workers import SharedEnd, WorkerStart
from ds_dynatrain.elastic.abort import WorldSockets
from ds_dynatrain.elastic.environment import job_token, worker_place
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.member import ORPHAN_SECONDS, Member
from ds_dynatrain.errors import JobFinished, WorldChanged

OUT = Path(os.environ["OUT"])
LOADERS = int(os.environ.get("LOADERS", "2"))
BATCH = 12
STEPS = 1 << 31
STEP_SECONDS = 0.02
WAIT = timedelta(seconds=20)


class Batches(Dataset[torch.Tensor]):
    """The samples of each step, a number each."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> torch.Tensor:
        return torch.arange(step * BATCH, (step + 1) * BATCH) * 7919 % 1_000_003


class Feed:
    """The batch of whichever step is wanted; loader processes start anew only if it is not the next one."""

    def __init__(self) -> None:
        self._end = SharedEnd()
        self._step = -1
        self._batch = torch.zeros(0)
        self._stream: Iterator[torch.Tensor] = iter(())

    def batch(self, step: int) -> torch.Tensor:
        if step == self._step:
            return self._batch
        if step != self._step + 1 or self._step < 0:
            start = WorkerStart(parent=os.getpid(), end=self._end) if LOADERS else None
            order = range(step, STEPS)
            self._stream = iter(
                DataLoader(Batches(), sampler=order, batch_size=None, num_workers=LOADERS, worker_init_fn=start)
            )
        self._step, self._batch = step, next(self._stream)
        return self._batch


class Work:
    """The steps, in the default group."""

    def __init__(self) -> None:
        self.state = torch.zeros(2, dtype=torch.int64)  # steps, and the sum over their samples
        self.feed = Feed()
        self.log = (OUT / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self.generation = 0

    def step(self, newest: int = 0) -> tuple[int, bool]:
        """One step: the generation that all members know of, and whether it was the last step."""
        time.sleep(STEP_SECONDS)
        batch = self.feed.batch(int(self.state[0]))
        mine = batch[dist.get_rank() :: dist.get_world_size()].sum()
        total = torch.stack([torch.ones_like(mine), mine])
        dist.all_reduce(total)
        known, stop = torch.tensor([newest]), torch.tensor([int((OUT / "stop").exists())])
        dist.all_reduce(known, dist.ReduceOp.MIN)
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        self.state = torch.stack([self.state[0] + 1, self.state[1] + total[1]])
        self.say(event="step", sum=int(self.state[1]), size=int(total[0]))
        return int(known), bool(stop)

    def agree(self) -> None:
        """All take the state of whoever has come furthest: a death leaves some a step behind."""
        states = [torch.zeros_like(self.state) for _ in range(dist.get_world_size())]
        dist.all_gather(states, self.state)
        self.state = max(states, key=lambda state: int(state[0]))

    def say(self, **what: Any) -> None:
        line = {"pid": os.getpid(), "time": time.monotonic(), "step": int(self.state[0])}
        self.log.write(json.dumps({**line, "generation": self.generation, **what}) + "\n")


class Script:
    """A member of the job, whose process goes on from world to world."""

    def __init__(self) -> None:
        place = worker_place()
        if place is None:
            raise SystemExit("run this with torchrun --rdzv-backend=dynatrain")
        self.work = Work()
        self.sockets = WorldSockets()
        patience = float(os.environ.get("ORPHAN_SECONDS", ORPHAN_SECONDS))
        self.member = Member(place, job_token(place.coordinator)[0], on_world=self.hear, orphan_seconds=patience)
        self.world: Generation | None = None
        self.known = 0

    def hear(self, world: Generation) -> bool:
        """A failure interrupts whatever is in flight. Each generation is formed anew, so it ends the one before."""
        if world.change == "failure":
            self.sockets.abort()
        return True

    def run(self) -> None:
        self.member.start(30)
        self.member.built()  # whatever world comes, it needs no time to be in it
        self.member.ready()
        try:
            while self.form():
                if not self.train():
                    break
        except JobFinished:
            self.work.say(event="sent home")
        self.member.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def form(self) -> bool:
        """Build the newest world that there is; False if this member is not in it."""
        while True:
            world = self.member.wait_for_world(self.work.generation, 60)
            if dist.is_initialized():
                dist.destroy_process_group()
            self.sockets.forget()
            self.world, self.work.generation = world, world.generation
            rank = world.rank(self.member.id)
            if rank is None and not self.member.is_leaving:
                continue
            if rank is None:
                self.member.has_left = True
                self.work.say(event="left")
                return False
            try:
                self.build(world, rank)
            except (RuntimeError, WorldChanged) as error:
                self.work.say(event="build failed", why=str(error)[:200])
                self.member.broken(world)
                continue
            self.member.enter(world)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(world.members)))
            what: dict[str, Any] = {"change": world.change, "members": world.members, "survivors": world.survivors}
            self.work.say(event="formed", reason=world.reason, lost=world.lost, leaving=world.leaving, **what)
            return True

    def build(self, world: Generation, rank: int) -> None:
        """The group of a world, with the state of whoever has come furthest on all members."""
        with self.sockets.building(lambda: self.member.is_newest(world)):
            store = self.member.store(world.prefix, WAIT.total_seconds())
            c10d._world.group_count = 0  # it names the group, and a build that failed has counted on this member alone
            dist.init_process_group("gloo", store=store, rank=rank, world_size=len(world.members), timeout=WAIT)
            self.work.agree()
            dist.barrier()

    def train(self) -> bool:
        """Steps in the present world, until another one is due; False at the end of the job."""
        while True:
            if (OUT / f"hang-{os.getpid()}").exists():
                time.sleep(1e9)
            try:
                if self.step():
                    return False
            except RuntimeError as error:
                self.work.say(event="broken", why=str(error)[:200])
                if self.world is not None and self.member.is_newest(self.world):
                    self.member.breach()
                return True
            if self.is_due:
                return True

    def step(self) -> bool:
        """One step; whether it was the last one."""
        newest = self.member.newest
        self.known, stop = self.work.step(0 if newest is None else newest.generation)
        self.member.progress(int(self.work.state[0]), f"data={dist.get_world_size()}")
        return stop

    @property
    def is_due(self) -> bool:
        """Whether all members know of a later generation."""
        return self.world is not None and self.known > self.world.generation


def start_anew() -> None:
    """The same work under any other back-end: rank 0 saves each step, and every new process loads it."""
    work, snapshot = Work(), OUT / "snapshot.pt"
    dist.init_process_group("gloo", timeout=WAIT)
    if dist.get_rank() == 0 and snapshot.exists():
        work.state = torch.load(snapshot, weights_only=True)
    work.agree()
    stop = False
    while not stop:
        _, stop = work.step()
        if dist.get_rank() == 0:
            torch.save(work.state, snapshot.with_suffix(".new"))
            snapshot.with_suffix(".new").rename(snapshot)
    dist.destroy_process_group()


if __name__ == "__main__":
    if worker_place() is None:
        start_anew()
    else:
        Script().run()
    sys.exit(0)
