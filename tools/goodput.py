"""Measure how much of the time of spot machines becomes training, in a job whose nodes come and go.

python tools/goodput.py spot_us_east_2b.csv                         # `seconds,nodes` by line; ten minutes of it
python tools/goodput.py spot_us_east_2b.csv --stages 1 2 3 --stock-stages 1 --seconds 20 --minutes 6
python tools/goodput.py --mtbf 30                                   # no trace: a death without notice each 30 s
python tools/goodput.py spot_us_east_2b.csv --write docs/figures

The numbers of nodes in a trace are scaled to at most `--most` and rounded; changes that then make no difference are
left out. One change follows another after `--seconds`. A node that is taken away gets SIGTERM or, every k-th time
(`--silent-falls`), SIGKILL. With `--mtbf` all `--most` nodes run until one is killed, after an exponentially
distributed time; another one starts 5 s later. Our job keeps copies with buddies, and saves a fallback checkpoint when
all nodes have to leave. At its end no sample may be missing or repeated.

Stock torchrun (`--stock-stages`) trains the same model (`tests/elastic/stock_training.py`) with DeepSpeed's own
checkpoints. They are saved as often as our fallback checkpoints, and converted to the universal format if the number of
ranks has changed. Its rendezvous has the settings that make it fastest, and a store that outlives all nodes.

ETTR is the time that the steps which count would take without any change (at the median of steps with the same world
size), divided by the time in which there was a node; with `--mtbf`, from the first step on. The lost time is divided by
cause: it lies between the last step that counts in one world and the first one in the next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torch._C._distributed_c10d import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_membership import BEST, BEST_VARIABLES, RESTARTS
from figures import conclude, machine, table
from history import mistakes
from nodes import SCRIPT, Job, training

STEP_SECONDS = 0.3
AWAY_SECONDS = 5.0
"""With `--mtbf`: seconds from a death to the start of another node."""
TOGETHER_SECONDS = 1.0
"""Nodes that are removed within this many seconds were removed by one change."""
OTHER = "steps slower than their median"
CAUSES = ("start from nothing", "death", "leave", "join", OTHER)

Trace = Iterator[tuple[int, float]]
"""Numbers of nodes, and the seconds for which each lasts."""


def changes(file: Path, most: int, seconds: float) -> Trace:
    """Yield the numbers of nodes in a file, scaled to at most `most`, with the seconds for which each lasts."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith(("#", "seconds"))]
    counts, last = [int(line.split(",")[1]) for line in lines], 0
    for count in counts:
        size = round(count * most / max(counts))
        if size != last:
            yield size, seconds
        last = size


def deaths(most: int, mtbf: float, chance: random.Random) -> Trace:
    """Yield all nodes, and all but one that has just died, in turn and without end."""
    while True:
        yield most, chance.expovariate(1 / mtbf)
        yield most - 1, AWAY_SECONDS


@dataclass
class Played:
    """The events of a run: (time, number of nodes from then on, kind of change)."""

    times: list[tuple[float, int, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, size: int, cause: str) -> None:
        """Record an event now."""
        self.times.append((time.monotonic(), size, cause))
        self.counts[cause] += 1

    def empty_seconds(self, begin: float, end: float) -> float:
        """Return for how many seconds between `begin` and `end` there was no node."""
        bounds = itertools.pairwise([*self.times, (float("inf"), 0, "")])
        return sum(max(0.0, min(end, after[0]) - max(begin, at)) for (at, size, _), after in bounds if size == 0)

    def last_fall(self, before: float) -> str:
        """Return the cause of the last removal of nodes before a time: "death", or "leave" if all nodes had notice."""
        falls = [(at, cause) for at, _, cause in self.times if at <= before and cause in ("death", "leave")]
        together = {cause for at, cause in falls if at > falls[-1][0] - TOGETHER_SECONDS}
        return next((cause for cause in ("death", "leave") if cause in together), OTHER)


class Player:
    """One job, to which the changes of a trace happen."""

    def __init__(self, folder: Path, stage: int, args: argparse.Namespace) -> None:
        self.job = self.new_job(folder, stage, args)
        self.args, self.chance, self.played = args, random.Random(args.seed), Played()
        self.silent_falls = args.silent_falls if args.mtbf is None else 1
        self.agents: list[str] = []
        self.falls = 0
        self.faults: list[str] = []

    def new_job(self, folder: Path, stage: int, args: argparse.Namespace) -> Job:
        """Return a job with buddies and a fallback checkpoint."""
        kept = {"path": str(folder / "kept"), "every_seconds": args.every}
        block = {"buddies": {"mode": "copy"}, "fallback": kept, "resume": {"path": str(folder / "kept")}}
        return training(folder, stage, block, f"1:{args.most}", STEP_SECONDS)

    def begin(self) -> None:
        """Start what must exist before the first node."""
        self.job.coordinator("coordinator")

    def node(self, name: str) -> None:
        """Start a node."""
        self.job.node(name, is_host=0)

    def fall(self, name: str, number: int) -> None:
        """Send a signal to a node. Its workers end with it."""
        self.job.kill(name, number)

    def clean_up(self) -> None:
        """End everything that is left."""
        self.job.clean_up()

    def ended(self, name: str) -> None:
        """Raise RuntimeError, because an agent has ended by itself."""
        raise RuntimeError(f"agent {name} has ended by itself: {self.job.folder / name}.log")

    def judge(self) -> None:
        """Record faults after the end, from exit codes and from the lines that the scripts wrote."""
        for name in (*self.agents, "coordinator"):
            if code := self.job.processes[name].wait(self.args.rest):
                self.faults.append(f"{name} ended with code {code}")
        self.faults += mistakes(self.job.rows(), None)[:20]

    def run(self, trace: Trace) -> None:
        """Play the trace for as long as there is time, and then let the scripts end."""
        self.begin()
        until = time.monotonic() + 60 * self.args.minutes
        for size, seconds in trace:
            if time.monotonic() > until:
                break
            self._go_to(size)
            end = time.monotonic() + seconds
            while time.monotonic() < min(end, until):
                self._look()
                time.sleep(0.1)
        if not self.agents:
            self._go_to(1)
        made = len(self.job.rows("step"))
        self.job.wait(lambda: len(self.job.rows("step")) > made + 3 * self.args.most, "more steps", self.args.rest)
        self.played.note(len(self.agents), "end")
        self.job.end()
        self.judge()

    def _go_to(self, size: int) -> None:
        if size > len(self.agents):
            self.played.note(size, "join")
        while len(self.agents) < size:
            self._start()
        while len(self.agents) > size:
            self.falls += 1
            is_silent = self.silent_falls > 0 and self.falls % self.silent_falls == 0
            name = self.agents.pop(self.chance.randrange(len(self.agents)))
            self.played.note(len(self.agents), "death" if is_silent else "leave")
            self.fall(name, signal.SIGKILL if is_silent else signal.SIGTERM)

    def _start(self) -> None:
        name = f"n{len(self.job.processes)}"
        self.node(name)
        self.agents.append(name)

    def _look(self) -> None:
        for name in [*self.agents]:
            if self.job.processes[name].poll() is not None:
                self.ended(name)


def kill(workers: list[int]) -> None:
    """Kill those of the workers that still run."""
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class StockPlayer(Player):
    """The same for stock torchrun. An agent that ends by itself is replaced."""

    def new_job(self, folder: Path, stage: int, args: argparse.Namespace) -> Job:
        """Return a job with DeepSpeed's own checkpoints, saved as often."""
        wanted = {"stage": stage, "every": args.every, "step_seconds": STEP_SECONDS}
        variables = {**BEST_VARIABLES, "WANTED": json.dumps(wanted), "DS_ACCELERATOR": "cpu"}
        script = SCRIPT.with_name("stock_training.py")
        job = Job(folder, f"1:{args.most}", backend="c10d", variables=variables, script=script)
        job.times = {}
        return job

    def begin(self) -> None:
        """Start the store, so that no node has to host it."""
        self._store = TCPStore(self.job.address.host, self.job.address.port, is_master=True, wait_for_workers=False)

    def node(self, name: str) -> None:
        """Start a node."""
        conf: dict[str, Any] = {**BEST, "is_host": 0}
        self.job.node(name, RESTARTS, **conf)

    def fall(self, name: str, number: int) -> None:
        """Kill a node and its workers, because workers of stock torchrun outlive a killed agent."""
        workers = self.job.workers_of(name)
        super().fall(name, number)
        if number == signal.SIGKILL:
            kill(workers)

    def clean_up(self) -> None:
        """End everything, workers included."""
        workers = [pid for name in self.job.processes for pid in self.job.workers_of(name)]
        super().clean_up()
        kill(workers)

    def ended(self, name: str) -> None:
        """Record that an agent has ended by itself, and start another one."""
        self.agents.remove(name)
        self.played.counts["agent that ended by itself"] += 1
        self._start()

    def judge(self) -> None:
        """Record nothing, because a member that is alone after the others have finished ends with an error."""


@dataclass(frozen=True)
class Judged:
    """The judgement of a job.

    steps: the number of steps that count.
    again: the number of steps that were made again.
    seconds: the time in which there was a node.
    usual: the part of that time that the steps which count would take without any change.
    lost: the lost seconds by cause.
    """

    steps: int
    again: int
    seconds: float
    usual: float
    lost: dict[str, float]


def judged(job: Job, played: Played, counts_start: bool) -> Judged:
    """Judge a job by the lines that its scripts wrote.

    counts_start: whether the time before the first step counts.
    """
    rows = job.rows("step")
    newest = {step: 0 for step in {row["step"] for row in rows}}
    for row in rows:
        newest[row["step"]] = max(newest[row["step"]], row["generation"])
    made: dict[int, tuple[float, int, int]] = {}
    for step in sorted(newest):
        mine = [row for row in rows if (row["step"], row["generation"]) == (step, newest[step])]
        made[step] = max(row["time"] for row in mine), newest[step], mine[0]["size"]
    ends = list(made.values())
    begin = played.times[0][0] if counts_start else ends[0][0]
    by_size: defaultdict[int, list[float]] = defaultdict(list)
    for (before, generation, _), (after, later, size) in itertools.pairwise(ends):
        if generation == later:
            by_size[size].append(after - before)
    usual = {size: median(each) for size, each in by_size.items()}
    lost = dict.fromkeys(CAUSES, 0.0)
    for (before, generation, size), (after, later, now) in itertools.pairwise(
        [(begin, 0, 0), *ends] if counts_start else ends
    ):
        empty = played.empty_seconds(before, after)
        if generation == later:
            cause = OTHER
        elif empty or not size:
            cause = "start from nothing"
        else:
            cause = "join" if now > size else played.last_fall(after)
        lost[cause] += after - before - empty - usual.get(now, 0.0)
    seconds = ends[-1][0] - begin - played.empty_seconds(begin, ends[-1][0])
    again = len({(row["step"], row["generation"]) for row in rows}) - len(made)
    counted = ends if counts_start else ends[1:]
    return Judged(len(made), again, seconds, sum(usual.get(size, 0.0) for _, _, size in counted), lost)


@dataclass(frozen=True)
class Run:
    """One job, and its results."""

    name: str
    found: Judged
    counts: Counter[str]
    faults: list[str]


def run(name: str, folder: Path, stage: int, args: argparse.Namespace) -> Run:
    """Play the trace in one job, and return the results."""
    folder.mkdir()
    player = (StockPlayer if name.startswith("stock") else Player)(folder, stage, args)
    trace = (
        changes(args.trace, args.most, args.seconds)
        if args.mtbf is None
        else deaths(args.most, args.mtbf, random.Random(args.seed))
    )
    try:
        player.run(trace)
    except (TimeoutError, RuntimeError) as error:
        player.faults.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    finally:
        player.clean_up()
    found = judged(player.job, player.played, counts_start=args.mtbf is None)
    return Run(name, found, player.played.counts, player.faults)


def told(runs: list[Run], args: argparse.Namespace) -> str:
    """Return the text with the table."""
    what = f"a death each {args.mtbf:g} s" if args.mtbf else f"{args.trace.name}, {args.seconds:g} s a change"
    text = f"Measured on: {machine()}. {what}, 0 to {args.most} nodes, {args.minutes:g} minutes each. "
    changes = dict.fromkeys(", ".join(f"{count} × {cause}" for cause, count in each.counts.items()) for each in runs)
    text += f"Changes: {'; '.join(changes)}.\n\n"
    rows: list[list[object]] = [
        ["steps that count", *(each.found.steps for each in runs)],
        ["steps that were made again", *(each.found.again for each in runs)],
        ["seconds with a node there", *(f"{each.found.seconds:.1f}" for each in runs)],
        ["of them steps that count: ETTR", *(f"{each.found.usual / each.found.seconds:.3f}" for each in runs)],
        ["seconds lost", *(f"{each.found.seconds - each.found.usual:.1f}" for each in runs)],
    ]
    for cause in CAUSES:
        if any(each.found.lost[cause] for each in runs):
            rows.append([f"lost: {cause}", *(f"{each.found.lost[cause]:.1f}" for each in runs)])
    if any(each.faults for each in runs):
        rows.append(["faults", *("; ".join(each.faults) for each in runs)])
    return text + table(["", *(each.name for each in runs)], rows)


def main() -> None:
    """Play the trace, and judge the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", help="a file with lines `seconds,nodes`")
    parser.add_argument("--mtbf", type=float, help="seconds between deaths, instead of a trace")
    parser.add_argument("--most", type=int, default=4, help="nodes at most (default 4)")
    parser.add_argument("--seconds", type=float, default=20.0, help="from one change to the next (default 20)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the trace, for each job (default 10)")
    parser.add_argument("--stages", type=int, nargs="*", default=[1], help="of ZeRO, a job for each (default 1)")
    parser.add_argument("--stock-stages", type=int, nargs="*", default=[], help="the same with stock torchrun")
    parser.add_argument("--seed", type=int, default=0, help="for who falls")
    parser.add_argument("--silent-falls", type=int, default=5, help="every k-th fall comes without notice; 0: none")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between checkpoints (default 10)")
    parser.add_argument("--rest", type=float, default=120.0, help="seconds until everything has to be in order")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    if (args.trace is None) == (args.mtbf is None):
        parser.error("give a trace, or --mtbf")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends this process also ends the job
    folder = Path(tempfile.mkdtemp(prefix="dynatrain-goodput-"))
    jobs = [(f"stage {stage}", stage) for stage in args.stages]
    jobs += [(f"stock torchrun, stage {stage}", stage) for stage in args.stock_stages]
    runs = [run(name, folder / name.replace(" ", "-"), stage, args) for name, stage in jobs]
    faults = [f"{each.name}: {fault}" for each in runs for fault in each.faults]
    conclude("goodput" if args.mtbf is None else "mtbf", told(runs, args), folder, faults, args.write)


if __name__ == "__main__":
    main()
