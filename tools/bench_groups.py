"""Measure how long a new world's groups take after a death, where all are built anew and where those that can stay do.

python tools/bench_groups.py                                # about three minutes
python tools/bench_groups.py --ranks 4 8 --times 5
python tools/bench_groups.py --write docs/figures

Groups alone: the processes are forked from one that has imported this package, and have no engine and no coordinator.
They are pairs of tensor ranks, half as many data ranks, and one more process that is idle. One that trains is killed at
a random instant of a step, most of which is computing; the others are told at once, agree on which groups stay over a
board, build the rest with the idle one in the dead one's place, and make a collective in every group. `formed` is from
the SIGKILL until the last of them is through these.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as td
from figures import keep, machine
from torch._C._distributed_c10d import TCPStore

from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus
from ds_dynatrain.adapters.groups.traffic import joined, unfit
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import WorldSpec, build_world, drop, install
from ds_dynatrain.elastic.abort import WorldSockets
from ds_dynatrain.elastic.store import serve_store
from ds_dynatrain.errors import WorldChanged
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.session import Session
from ds_dynatrain.space import Layout

SECONDS = 60.0
REST_SECONDS = 0.5
STEP_SECONDS = 0.05
POLL_SECONDS = 0.0002


@dataclass(frozen=True)
class Order:
    """What a process is told: the generation to form, its members, and who has trained and is not gone."""

    generation: int
    members: tuple[int, ...]
    present: tuple[int, ...]
    keeps: bool


@dataclass
class Light:
    """One process. The main thread makes steps; another one hears."""

    number: int
    port: int
    pipe: Connection
    orders: list[Order] = field(default_factory=list)
    world: World | None = None
    sockets: WorldSockets = field(default_factory=WorldSockets)

    def run(self) -> None:
        """Until it is killed."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        store = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        self.control = Control(store, "board", self.number, SECONDS)
        threading.Thread(target=self.hear, daemon=True).start()
        while True:
            if self.orders:
                self.form(self.orders.pop())
            elif self.world is None:
                time.sleep(POLL_SECONDS)
            else:
                self.step(self.world)

    def hear(self) -> None:
        """Of a death what is to be shut down is."""
        while True:
            order: Order = self.pipe.recv()
            if self.world is not None:
                known: Collection[str] = self.sockets.groups if order.keeps else ()
                self.sockets.abort(resting=self.world.lose(known, order.present))
            self.orders.append(order)

    def step(self, world: World) -> None:
        """Of training."""
        try:
            for kind in ("tensor", "data"):
                td.all_reduce(torch.ones(8), group=world.group(kind))
        except WorldChanged:
            while not self.orders:
                time.sleep(POLL_SECONDS)
            return
        end = time.monotonic() + STEP_SECONDS
        while time.monotonic() < end and not self.orders:
            time.sleep(POLL_SECONDS)

    def form(self, order: Order) -> None:
        """The next world, and a collective in each of its groups."""
        session = Session(self.control, f"form/{order.generation}", order.members, "forming a world")
        said = self.world.says() if self.world is not None and order.keeps else {}
        anew, coming = session.reduce("building", said, joined, unfit), WorldSockets()
        layout, given = Layout(zero_stage=1, tensor=2, data=len(order.members) // 2), dict[str, Any]()
        if order.keeps:
            given |= {"present": self.world, "unfit": anew}
        spec = WorldSpec(order.generation, self.number, order.members, order.members, layout)
        with coming.building() as note:
            made = build_world(self.control.store, spec, SECONDS, GroupStatus(), note=note, **given)
        before, stay = self.world, 0
        if before is not None:
            kinds = [kind for kind in made.kinds if len(made.ranks(kind)) > 1]
            stay = len({id(made.group(kind)) for kind in kinds if made.group(kind) is before.group(kind)})
        install(made)
        for kind in ("default", "tensor", "data"):
            td.all_reduce(torch.ones(8), group=made.group(kind))
        through = time.monotonic()
        coming.take_over(self.sockets)
        self.world, self.sockets = made, coming
        self.pipe.send((through, stay))
        if before is not None:
            drop(before)


class Job:
    """So many processes, and one more. keeps: whether groups stay."""

    def __init__(self, ranks: int, keeps: bool) -> None:
        self.store, self._keeps = serve_store("127.0.0.1"), keeps
        self._context, self._all = get_context("fork"), dict[int, Any]()
        self.pipes = dict[int, Connection]()
        self._next = self._generation = 0
        self.members = tuple(self.start() for _ in range(ranks))
        self.form(())

    def start(self) -> int:
        """One more process; its number."""
        here, there = self._context.Pipe()
        number, self._next = self._next, self._next + 1
        process = self._context.Process(target=Light(number, self.store.port, there).run, daemon=True)
        process.start()
        self._all[number], self.pipes[number] = process, here
        return number

    def form(self, present: tuple[int, ...]) -> list[tuple[float, int]]:
        """All of them form the next world: when each is through, and how many of its groups have stayed."""
        self._generation += 1
        for member in self.members:
            self.pipes[member].send(Order(self._generation, self.members, present, self._keeps))
        found = []
        for member in self.members:
            if not wait([self.pipes[member]], SECONDS):
                raise TimeoutError(f"member {member} is not through generation {self._generation}")
            found.append(self.pipes[member].recv())
        return found

    def death(self) -> tuple[float, float]:
        """(seconds until all are through, groups that have stayed on a rank) where the last one is killed."""
        gone, spare = self.members[-1], self.start()
        time.sleep(REST_SECONDS + STEP_SECONDS * random.random())
        present, self.members = self.members[:-1], (*self.members[:-1], spare)
        begin = time.monotonic()
        os.kill(self._all[gone].pid, signal.SIGKILL)
        found = self.form(present)
        self._all.pop(gone).join()
        return max(when for when, _ in found) - begin, sum(stay for _, stay in found) / len(found)

    def end(self) -> None:
        """All of them."""
        for process in self._all.values():
            process.kill()
            process.join()


def deaths(ranks: int, times: int, keeps: bool) -> list[tuple[float, float]]:
    """Of so many deaths, one after another."""
    job = Job(ranks, keeps)
    try:
        return [job.death() for _ in range(times)]
    finally:
        job.end()


def line(ranks: int, times: int) -> str:
    """Say how long a new world took to form after a death, with the groups that stay and all built anew."""
    anew, stay = deaths(ranks, times, False), deaths(ranks, times, True)
    took = []
    for found in (stay, anew):
        milliseconds = [1e3 * seconds for seconds, _ in found]
        took.append(f"{median(milliseconds):.0f} ({min(milliseconds):.0f} to {max(milliseconds):.0f})")
    kept = sum(each for _, each in stay) / times
    return f"- {ranks} ranks: {took[0]} ms where {kept:.1f} of 3 groups of a rank stay, {took[1]} ms all anew"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8, 16, 32])
    parser.add_argument("--times", type=int, default=5, help="deaths of each line and kind (default 5)")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    where = machine()
    rows = [line(ranks, args.times) for ranks in args.ranks]
    text = f"Measured on: {where}; processes of one machine, medians of {args.times} deaths.\n\n"
    text += "\n".join(rows)
    print(text)
    if args.write is not None:
        keep(args.write, "bench_groups", text)


if __name__ == "__main__":
    main()
