"""Measure the communication between members in a switch: operations of the store, bytes, and how long members wait.

python tools/bench_control.py
python tools/bench_control.py --members 16 64 --write docs/figures

There are two measurements. Their records have the real size of a model with 70 billion parameters (the 723 tensors of
Llama-2-70B) that switches from ZeRO stage 3 to stage 1. In the first measurement, threads act as members. Each has its
own connection to one TCPStore, and sends all messages of a switch, without computing or moving anything in between. In
the second, 16,384 members are simulated in one process, one after the other, from the leaves of the tree to its root.
It measures the time to send, merge and judge their requests and reports, and the traffic through the store.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from figures import keep, machine, table
from torch._C._distributed_c10d import HashStore, TCPStore

from ds_dynatrain.membership import agreement
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.session import Join, Session, VoteResult, joined_requests
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.certificate import SIDES, SideDigests, certify, folded, joined_sides, shares
from ds_dynatrain.reshard.preparation import POLL_SECONDS, joined_readiness, judged_readiness, over_all
from ds_dynatrain.space import Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds

LAYERS, WIDTH, FEED, KEYS, WORDS = 80, 8192, 28672, 1024, 32000
PER_NODE = 8
OPERATIONS_BAR, KILOBYTES_BAR, WAIT_BAR_MS, SIMULATED_BAR_SECONDS = 40, 50, 50, 5.0
SIMULATED = 16384
TURNS = 5
STEP_SECONDS = 0.1
"""Simulated seconds of training between two looks for the meeting."""


def tensors() -> tuple[LogicalTensor, ...]:
    """Return the logical tensors of Llama-2-70B."""
    layer = {
        "q": (WIDTH, WIDTH),
        "k": (KEYS, WIDTH),
        "v": (KEYS, WIDTH),
        "o": (WIDTH, WIDTH),
        "gate": (FEED, WIDTH),
        "up": (FEED, WIDTH),
        "down": (WIDTH, FEED),
        "norm1": (WIDTH,),
        "norm2": (WIDTH,),
    }
    named = [(f"layers.{number}.{name}", shape) for number in range(LAYERS) for name, shape in layer.items()]
    named += [("embed", (WORDS, WIDTH)), ("norm", (WIDTH,)), ("head", (WORDS, WIDTH))]
    return tuple(LogicalTensor(name, shape) for name, shape in named)


STREAMS = {"states": streams.capture(), "print": "0" * 32}
"""Random streams of some member. What members compute for themselves is not part of the measurement."""
SWITCH_SECONDS = 2e-4
"""Seconds after which one thread yields to another: few, because members in separate processes would not wait for each
other."""


class Switch:
    """The properties of one switch that all its members share."""

    def __init__(self, members: int) -> None:
        self.source, self.target = (Layout(data=members, zero_stage=stage) for stage in (3, 1))
        self.members = tuple(range(members))
        kinds = standard_kinds(2)
        self.vps = VirtualParameterSpace.of(tensors(), ZeroRules(), kinds, self.source, self.members)
        self.kinds = ("weight", "master", "exp_avg", "exp_avg_sq")
        drawn = np.random.default_rng(0).integers(0, 1 << 62, size=(len(self.kinds), len(self.vps.tensors)))
        self.whole = dict(zip(self.kinds, drawn.astype(np.uint64), strict=True))

    def digests(self, layout: Layout, rank: int) -> SideDigests:
        """Return made-up digests of a rank that add up correctly.

        A replicated kind is whole on all ranks. Of other kinds, rank 0 has the remainder of the sum.
        """
        found, count = {}, len(self.members)
        for kind, whole in self.whole.items():
            if self.vps.is_replicated(layout, kind):
                found[kind] = whole
            else:
                found[kind] = whole - np.uint64(count - 1) if rank == 0 else np.ones_like(whole)
        return SideDigests(found)

    def report(self, rank: int) -> dict[str, Any]:
        """Return one member's report about both sides of the switch."""
        sides = zip(SIDES, (self.source, self.target), strict=True)
        return {
            side: folded(shares(self.vps, layout, self.members, rank, self.digests(layout, rank)))
            for side, layout in sides
        }

    def judge(self, report: dict[str, Any]) -> VoteResult:
        """Judge the merged report, as a switch does."""
        said = certify(self.vps, self.source, self.target, report)
        return VoteResult("digest" in said, said=said)

    def proposal(self, generation: int) -> Proposal:
        """Return a proposal to change the ZeRO stage with the same members."""
        return Proposal(generation, self.source, self.members, self.target, self.members, None)


@dataclass
class Counts:
    """The traffic through the store.

    operations: the number of operations.
    bytes: the size of all values written and read, without keys.
    """

    operations: int = 0
    bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, size: int) -> None:
        """Count one operation."""
        with self.lock:
            self.operations += 1
            self.bytes += size


class CountedStore:
    """A store that counts its operations."""

    def __init__(self, store: Any, counts: Counts) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            result = call(*arguments)
            given = arguments[-1] if name in ("set", "compare_set", "append") else b""
            found = result if isinstance(result, list) else [result] if isinstance(result, bytes) else []
            self._counts.add(len(given) + sum(map(len, found)))
            return result

        return counted


def board(store: Any, counts: Counts, member: int) -> Control:
    """Return the board of one member, on which operations are counted."""
    made = Control(store, "bench", member, 60.0)
    made.store = CountedStore(made.store, counts)  # type: ignore[assignment]
    return made


def one_switch(switch: Switch, mine: Control, generation: int, together: threading.Barrier) -> dict[str, float]:
    """Make all calls of one member in a switch. Return the milliseconds that it waits in each, by name.

    together: a barrier, so that all members begin each call at the same time.
    """
    proposal, member, waited = switch.proposal(generation), mine.member, dict[str, float]()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        together.wait()
        begin = time.perf_counter()
        result = call()
        waited[name] = 1e3 * (time.perf_counter() - begin)
        return result

    timed("ask", lambda: agreement.agree(mine, str(generation), switch.members, proposal, generation))
    timed("prepare", lambda: prepare(mine, proposal))
    while mine.read(proposal.meeting_key) is None:
        if member == switch.members[0] and proposal.is_prepared(mine):
            mine.decide(proposal.meeting_key, 2)
        else:
            time.sleep(STEP_SECONDS)
    session = Session(mine, proposal.key, switch.members, "bench", record=f"record/{generation}")
    report = switch.report(member)  # computed beforehand, because computing in one thread delays the messages of others
    timed("meet", lambda: meet(session, proposal))
    decision = timed("verify", lambda: session.vote(lambda: report, joined_sides, switch.judge))
    if not decision.commit:
        raise RuntimeError(decision.reason)
    measured = {"bytes_kept": 1, "bytes_local": 1, "bytes_sent": 1, "certificate_ms": 1.0, "peak_memory_bytes": 1}
    timed("acknowledge", lambda: session.reduce("acknowledged", measured, over_all))
    return waited


def prepare(mine: Control, proposal: Proposal) -> None:
    """Exchange the messages of a preparation: among all members, and among those of one node, who find their
    neighbours.
    """
    key, node = f"machine/{proposal.generation}/{mine.member // PER_NODE}", f"near/{proposal.generation}"
    mine.add_to_list(key, mine.member)
    session = Session(mine, f"prepare/{proposal.generation}", proposal.union, "bench", longest=POLL_SECONDS)
    said = {"errors": [], "own_groups": [[mine.member, 0]]}
    session.reduce("building", said, joined_readiness, judged_readiness)
    near = mine.read_list(key)
    for step in ("cards", "readable"):
        mine.post(f"{node}/{step}/{mine.member}", {"machine": "x" * 40, "probe": list(range(16))})
        keys = {member: f"{node}/{step}/{member}" for member in near}
        mine.wait(keys, "finding neighbors", longest=POLL_SECONDS, is_there=False)
    agreement.say_prepared(mine, proposal)


def meet(session: Session, proposal: Proposal) -> None:
    """Post the random streams, which no member needs because nobody moves, and meet."""
    mine, generation = session.board, proposal.generation
    mine.post(f"stream/{generation}/{mine.member}", STREAMS)
    carry = {"shared": {"groups": ["x" * 200] * 8, "scheduler": "x" * 500}} if session.is_first else {}
    agreement.wait_until_prepared(mine, proposal, session.stop)
    agreement.meet(session, proposal, 1, "train", carry)


def threads(members: int) -> dict[str, Any]:
    """Run several switches with threads as members. Return the medians.

    The result has the operations and bytes per member, and the milliseconds that the last member waits.
    """
    switch, server = Switch(members), TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    counts, together = Counts(), threading.Barrier(members)
    boards = [board(TCPStore("127.0.0.1", server.port, is_master=False), counts, each) for each in switch.members]
    runs = []
    with ThreadPoolExecutor(members) as pool:
        for generation in range(2, 2 + TURNS):
            counts.operations = counts.bytes = 0
            part = partial(one_switch, switch, generation=generation, together=together)
            waited = list(pool.map(part, boards))
            longest = {name: max(each[name] for each in waited) for name in waited[0]}
            share = 1e-3 * counts.bytes / members
            runs.append({"operations": counts.operations / members, "kilobytes": share, **longest})
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def simulated(members: int) -> dict[str, float]:
    """Return the CPU seconds in which this many simulated members send, merge and judge their requests and reports."""
    switch, store = Switch(members), HashStore()
    store.set_timeout(timedelta(seconds=60))
    counts, found = Counts(), dict[str, float]()
    proposal = switch.proposal(2)
    asked = {"said": f"{switch.target} (asked at step 1)", "destination": proposal.fingerprint()}

    def request_of(rank: int) -> dict[str, Any]:
        return {"refusal": None, "asked": [[rank, asked]]}

    steps: list[tuple[str, Callable[[int], Any], Join, Callable[[Any], Any]]] = [
        ("ask", request_of, joined_requests, lambda found: {"answer": proposal.generation}),
        ("report", switch.report, joined_sides, lambda found: switch.judge(found).said),
    ]
    for step, of_rank, join, judge in steps:
        found[step] = 0.0
        for rank in reversed(range(members)):  # members that lead others come after those
            said = of_rank(rank)  # members compute their own parts in parallel, so these count once
            session = Session(board(store, counts, rank), step, switch.members, "bench")
            begin = time.process_time()
            joined = session.gather("up", said, join)
            if joined is not None:
                session.board.decide(f"{step}/answer", judge(joined))
            found[step] += time.process_time() - begin
        boards, begin = [board(store, counts, rank) for rank in switch.members], time.process_time()
        answers = [each.value(f"{step}/answer") for each in boards]
        found[step] += time.process_time() - begin
        if len({str(answer) for answer in answers}) != 1 or answers[0] is None:
            raise RuntimeError(f"{step}: members were told different things, or nothing")
    return {**found, "operations": counts.operations / members, "gigabytes": counts.bytes / 1e9}


def main() -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="*", default=[4, 16, 64], help="threads in the place of members")
    parser.add_argument("--simulated", type=int, default=SIMULATED, help="members that one process computes for")
    parser.add_argument("--write", type=Path, help="put the figures into this Markdown file")
    options = parser.parse_args()
    rows = []
    for members in options.members:
        found = threads(members)
        pause = found["meet"] + found["verify"]
        rows.append(
            [
                str(members),
                f"{found['operations']:.0f}",
                f"{found['kilobytes']:.1f}",
                *(f"{found[name]:.1f}" for name in ("meet", "verify")),
                f"{pause:.1f}",
            ]
        )
        print(rows[-1], flush=True)
    heads = ["members", "operations each", "kB each", "meet, ms", "verify, ms", "meet + verify, ms"]
    text = (
        f"Measured on: {machine()}. Bars: at most {OPERATIONS_BAR} operations "
        f"and {KILOBYTES_BAR} kB for each member; 64 members "
        f"wait {WAIT_BAR_MS} ms at most in meet and verify."
    )
    if options.simulated:
        one = simulated(options.simulated)
        text += (
            f" {options.simulated:,} simulated members: asking {one['ask']:.1f} s, reporting {one['report']:.1f} s of "
            f"one core, {one['operations']:.1f} operations each, {one['gigabytes']:.2f} GB through the store; the bar "
            f"is {SIMULATED_BAR_SECONDS:g} s of two cores."
        )
    text += f"\n\n{table(heads, rows)}"
    print(text)
    if options.write:
        keep(options.write, "control", text)


if __name__ == "__main__":
    main()
