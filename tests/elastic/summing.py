"""A training script as small as one can be: each step adds up a one of every member, in whatever world there is.

Run by torchrun; writes a line of JSON for each step and each event into `$OUT/PID.jsonl`, until `$OUT/stop` is there.
All members hold the whole state (the step, and the sum over all steps), so whoever survives has it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_dynatrain.elastic.abort import WorldSockets
from ds_dynatrain.elastic.environment import rewrite_rank, token_from, worker_place
from ds_dynatrain.elastic.member import Member
from ds_dynatrain.elastic.world import World
from ds_dynatrain.errors import JobFinished, WorldChanged

OUT = Path(os.environ["OUT"])
STEP_SECONDS = 0.02
WAIT = timedelta(seconds=20)


class Script:
    def __init__(self) -> None:
        place = worker_place()
        if place is None:
            raise SystemExit("run this with torchrun --rdzv-backend=dynatrain")
        self.sockets = WorldSockets()
        self.member = Member(place, token_from(), on_world=self.hear)
        self.world: World | None = None
        self.state = torch.zeros(2, dtype=torch.int64)  # steps, and the sum over them
        self.log = (OUT / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def hear(self, world: World) -> None:
        """A failure interrupts whatever is in flight."""
        if world.change == "failure":
            self.sockets.abort(spare=self.member.descriptors())

    def run(self) -> None:
        self.member.start(30)
        self.member.ready()
        try:
            while self.form():
                if not self.train():
                    break
        except JobFinished:
            self.say(event="sent home")
        self.member.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def form(self) -> bool:
        """Build the newest world that there is; False if this member is not in it."""
        while True:
            world = self.member.wait_for_world(0 if self.world is None else self.world.generation, 60)
            if dist.is_initialized():
                dist.destroy_process_group()
            self.sockets.forget()
            self.world = world
            rank = world.rank(self.member.id)
            if rank is None:
                self.say(event="left")
                return False
            try:
                self.build(world, rank)
            except (RuntimeError, WorldChanged) as error:
                self.say(event="build failed", why=str(error)[:200])
                self.member.broken(world)
                continue
            self.member.enter(world)
            rewrite_rank(rank, len(world.members))
            self.say(event="formed", change=world.change, members=world.members, survivors=world.survivors)
            return True

    def build(self, world: World, rank: int) -> None:
        """The group of a world, with the state of its first survivor on all members."""
        with self.sockets.building(lambda: self.member.is_newest(world)):
            store = self.member.store(world, WAIT.total_seconds())
            dist.init_process_group("gloo", store=store, rank=rank, world_size=len(world.members), timeout=WAIT)
            dist.broadcast(self.state, 0)
            dist.barrier()

    def train(self) -> bool:
        """Steps in the present world, until another one is due; False at the end of the job."""
        while True:
            try:
                if self.step():
                    return False
            except RuntimeError as error:
                self.say(event="broken", why=str(error)[:200])
                if self.world is not None:
                    self.member.broken(self.world)
                return True
            if self.is_due:
                return True

    def step(self) -> bool:
        """One step; whether it was the last one."""
        time.sleep(STEP_SECONDS)
        one = torch.ones(1, dtype=torch.int64)
        dist.all_reduce(one)
        newest = self.member.newest
        said = torch.tensor([0 if newest is None else newest.generation, int((OUT / "stop").exists())])
        known, stop = said[:1].clone(), said[1:].clone()
        dist.all_reduce(known, dist.ReduceOp.MIN)
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        self.state += torch.cat([torch.ones_like(one), one])
        self.known = int(known)
        self.member.progress(int(self.state[0]), f"data={int(one)}")
        self.say(event="step", sum=int(self.state[1]), size=int(one))
        return bool(stop)

    @property
    def is_due(self) -> bool:
        """Whether all members know of a later generation."""
        return self.world is not None and self.known > self.world.generation

    def say(self, **what: Any) -> None:
        generation = 0 if self.world is None else self.world.generation
        line = {"pid": os.getpid(), "step": int(self.state[0]), "generation": generation, **what}
        self.log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    Script().run()
    sys.exit(0)
