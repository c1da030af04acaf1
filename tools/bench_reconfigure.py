"""Measure how long a switch waits for a gloo group, either edited in place by torch or built anew.

python tools/bench_reconfigure.py                           # about five minutes
python tools/bench_reconfigure.py --ranks 4 --laps 5

Since torch 2.14 the members of a group can be changed in place (`ProcessGroup.reconfigure`). With an older torch only
the other two ways are measured. In every lap the same processes change their group in each of the ways, in turn: either
with the same members, or with one that leaves and one that joins. A way ends when the last member has finished a
collective of the new group.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any, NamedTuple

import torch
import torch._C._distributed_c10d as distributed_c
import torch.distributed as td
from figures import machine, table
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ds_dynatrain.adapters.groups.device import HOST
from ds_dynatrain.adapters.groups.process_groups import make_group, tear_down
from ds_dynatrain.elastic.store import serve_store

SECONDS = 60.0
LEAD_SECONDS = 0.05
"""Seconds from an order until all begin, which is longer than it takes to send it."""
REBUILT, AHEAD, EDITED = "built anew ms", "built ahead ms", "edited ms"
CAN_EDIT = hasattr(td.ProcessGroup, "reconfigure")
WAYS = (REBUILT, AHEAD, EDITED) if CAN_EDIT else (REBUILT, AHEAD)
GLOO = td.ProcessGroup.BackendType.GLOO


class Order(NamedTuple):
    """An order to all processes: to change from the group of `before` to a group of `members`.

    handles: torch's names of the members' groups.
    begin: the time (`time.monotonic`) at which all begin.
    """

    number: int
    way: str
    before: tuple[int, ...]
    members: tuple[int, ...]
    handles: list[str]
    begin: float


class Answer(NamedTuple):
    """One process's answer to an order.

    through: the seconds until it could use the new group.
    gone: the seconds until the old group was also destroyed.
    handle: the handle of its group that can be edited.
    """

    through: float
    gone: float
    handle: str


def editable(store: Store, number: int) -> td.ProcessGroup:
    """Return a group without peers, as made by `init_process_group(enable_reconfigure=True)`."""
    prefix = PrefixStore("edited/", store)
    timeout: Any = {"timeout": timedelta(seconds=SECONDS), "enable_reconfigure": True}
    group = td.ProcessGroup(prefix, number, number + 1)
    group._set_default_backend(GLOO)
    group._register_backend(HOST, GLOO, td.ProcessGroupGloo(prefix, number, number + 1, **timeout))
    return group


def edit(group: Any, number: int, handles: list[str]) -> None:
    """Give a group the members with these handles, in this order."""
    options = distributed_c.ReconfigureOptions()  # type: ignore[attr-defined]  # since torch 2.14
    options.uuid, options.handles = number, handles
    group.reconfigure(options).wait()


def collective(group: td.ProcessGroup, value: float) -> float:
    """Return the sum of all members' values."""
    tensor = torch.tensor([value])
    group.allreduce([tensor]).wait()
    return tensor.item()


@dataclass
class Process:
    """One process, which changes its groups as ordered.

    groups: the current group of each way.
    """

    number: int
    port: int
    pipe: Connection
    groups: dict[str, td.ProcessGroup] = field(default_factory=dict)

    def run(self) -> None:
        """Carry out orders until the process is killed."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.store = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        while True:
            order: Order = self.pipe.recv()
            through = gone = 0.0
            if self.number in {*order.before, *order.members}:
                time.sleep(max(0.0, order.begin - time.monotonic()))
                old = [group] if (group := self.groups.pop(order.way, None)) else list[td.ProcessGroup]()
                del group  # the group is destroyed only when its last reference is gone
                begin = self.change(order, old)
                through = time.monotonic() - begin
                tear_down(old).join()
                gone = time.monotonic() - begin
            self.pipe.send(Answer(through, gone, self.handle() if CAN_EDIT else ""))

    def handle(self) -> str:
        """Return the handle of the group to edit. A process that has no such group, or has left it, makes a new one."""
        if EDITED not in self.groups:
            self.groups[EDITED] = editable(self.store, self.number)
        group: Any = self.groups[EDITED]
        return str(group.get_reconfigure_handle())

    def change(self, order: Order, old: list[td.ProcessGroup]) -> float:
        """Change to the next group, and leave groups to be destroyed in `old`. Return the time at which the pause
        began.
        """
        begin, stays = order.begin, self.number in order.members
        if order.way == EDITED and stays:
            edit(old[0], order.number, order.handles)
            self.groups[EDITED] = old.pop()
        elif order.way == AHEAD:
            begin = self.build_beside(order, old)
        elif order.way == REBUILT:
            self.build(order)
        if stays:
            found = collective(self.groups[order.way], self.number)
            if found != sum(order.members):
                raise RuntimeError(f"{order.way}: a sum over {order.members} is {found}, not {sum(order.members)}")
        return begin

    def build(self, order: Order) -> None:
        """Build the next group, as a world does, if this process is in it."""
        if self.number not in order.members:
            return
        rank, name = order.members.index(self.number), f"bench_{order.number}"
        self.groups[order.way] = make_group(self.store, name, rank, len(order.members), SECONDS)[0]

    def build_beside(self, order: Order, old: list[td.ProcessGroup]) -> float:
        """Build the next group in a thread while members use the old one. Return the time at which they stop to wait
        for it.
        """
        thread = threading.Thread(target=self.build, args=(order,))
        thread.start()
        if self.number in order.before:
            while collective(old[0], float(not thread.is_alive())) < len(order.before):
                pass
        begin = time.monotonic()
        thread.join()
        return begin if self.number in order.before else time.monotonic()


class Job:
    """The processes of a measurement: `ranks` members, and one that is not in the group."""

    def __init__(self, ranks: int) -> None:
        self.store, context = serve_store("127.0.0.1"), get_context("fork")
        self.pipes, self.processes = list[Connection](), list[Any]()
        for number in range(ranks + 1):
            here, there = context.Pipe()
            process = context.Process(target=Process(number, self.store.port, there).run, daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        self.members, self.orders = tuple(range(ranks)), 0
        self.handles = [""] * (ranks + 1)
        for way in WAYS:
            self.change(way, (), ())  # collects the first handles
            self.change(way, (), self.members)

    def change(self, way: str, before: tuple[int, ...], members: tuple[int, ...]) -> tuple[float, float]:
        """Let all processes change their group in one way.

        Returns (seconds until all can use the new group, seconds until the old group is destroyed).
        """
        self.orders += 1
        handles, begin = [self.handles[member] for member in members], time.monotonic() + LEAD_SECONDS
        for pipe in self.pipes:
            pipe.send(Order(self.orders, way, before, members, handles, begin))
        answers = list[Answer]()
        for number, pipe in enumerate(self.pipes):
            if not wait([pipe], SECONDS):
                raise TimeoutError(f"process {number} has not answered within {SECONDS:g} s: {way}, {members}")
            answers.append(pipe.recv())
        self.handles = [answer.handle for answer in answers]
        return max(answer.through for answer in answers), max(answer.gone for answer in answers)

    def lap(self, lap: int) -> dict[str, tuple[float, float]]:
        """Replace one member by another, in every way. Each lap begins with another way. Return the results of `change`
        by way.
        """
        before, resting = self.members, next(n for n in range(len(self.pipes)) if n not in self.members)
        self.members = tuple(resting if place == lap % len(before) else old for place, old in enumerate(before))
        first = lap % len(WAYS)
        return {way: self.change(way, before, self.members) for way in (*WAYS[first:], *WAYS[:first])}

    def end(self) -> None:
        """Kill all processes."""
        for process in self.processes:
            process.kill()
            process.join()


def spread(seconds: list[float]) -> list[str]:
    """Return the cells of a column: the median, and the range."""
    found = [1e3 * each for each in seconds]
    return [f"{median(found):.1f}", f"{min(found):.1f} to {max(found):.1f}"]


def row(ranks: int, laps: int) -> list[object]:
    """Measure with this many members, and return a row."""
    job = Job(ranks)
    try:
        job.lap(0)
        all_laps = [job.lap(lap) for lap in range(laps)]
    finally:
        job.end()
    cells: list[object] = [ranks]
    for way in WAYS:
        cells += spread([lap[way][0] for lap in all_laps])
    cells.append(f"{1e3 * median(lap[REBUILT][1] for lap in all_laps):.1f}")
    if CAN_EDIT:
        cells.append(f"{median(lap[EDITED][0] / lap[REBUILT][0] for lap in all_laps):.2f}")
    return cells


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--laps", type=int, default=30, help="laps of each row (default 30)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    head = ["ranks", *(cell for way in WAYS for cell in (way, "from, to")), "old one gone ms"]
    text = f"Measured on: {machine()}; processes of one machine, medians of {args.laps} laps: one leaves, one comes."
    if CAN_EDIT:
        head.append("edited ÷ anew")
    else:
        text += f" Torch {torch.__version__} cannot reconfigure a group; torch 2.14 and newer can."
    text += f"\n\n{table(head, [row(ranks, args.laps) for ranks in args.ranks])}"
    print(text)


if __name__ == "__main__":
    main()
