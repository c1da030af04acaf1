"""How much of the time of spot machines becomes training: a public trace of nodes that come and go, played to one job.

python tools/goodput.py spot_us_east_2b.csv                         # `seconds,nodes` by line; ten minutes of it
python tools/goodput.py spot_us_east_2b.csv --seconds 5 --minutes 60 --stage 2
python tools/goodput.py spot_us_east_2b.csv --write docs/figures.md

The numbers of nodes are scaled to at most `--most` (rounded; what makes no difference then is left out); a change
comes `--seconds` after the one before. A node that falls gets SIGTERM, every k-th fall (`--silent-falls`) SIGKILL. The
job keeps copies with buddies, and a fallback checkpoint that is saved when all have to go. At the end no sample may be
missing or repeated. ETTR is the time that the steps which count would take without any change (the median of those of
the same world size), as a share of the time in which there was a node. What is missing is told by cause: from the last
step that counts of one world to the first one of the next.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import conclude, machine, table
from history import mistakes
from nodes import Job, training

STEP_SECONDS = 0.3
OTHER = "steps slower than their median"
CAUSES = ("start from nothing", "death", "leave", "join", OTHER)


def changes(file: Path, most: int) -> list[int]:
    """The numbers of nodes, one after the other, scaled to at most `most`; ValueError for what is no trace."""
    found: list[int] = []
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith(("#", "seconds"))]
    counts = [int(line.split(",")[1]) for line in lines]
    for count in counts:
        size = round(count * most / max(counts))
        if not found or found[-1] != size:
            found.append(size)
    return found if found[0] else found[1:]


@dataclass
class Played:
    """What happened, by time: the number of nodes from then on, and what kind of change it was."""

    times: list[tuple[float, int, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, size: int, cause: str) -> None:
        """Now."""
        self.times.append((time.monotonic(), size, cause))
        self.counts[cause] += 1

    def empty_seconds(self, begin: float, end: float) -> float:
        """For how long of a time there was no node."""
        bounds = itertools.pairwise([*self.times, (float("inf"), 0, "")])
        return sum(max(0.0, min(end, after[0]) - max(begin, at)) for (at, size, _), after in bounds if size == 0)

    def last_fall(self, before: float) -> str:
        """Whether the last node that fell before a time had notice."""
        falls = [cause for at, _, cause in self.times if at <= before and cause in ("death", "leave")]
        return falls[-1] if falls else OTHER


class Player:
    """One job, to which the trace happens."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        kept = {"path": str(folder / "kept"), "every_seconds": args.every}
        block = {"buddies": {"mode": "copy"}, "fallback": kept, "resume": {"path": str(folder / "kept")}}
        self.job = training(folder, args.stage, block, f"1:{args.most}", STEP_SECONDS)
        self.args, self.chance, self.played = args, random.Random(args.seed), Played()
        self.agents: list[str] = []
        self.falls = 0
        self.faults: list[str] = []

    def run(self, sizes: list[int]) -> None:
        """Play it, for as long as there is time; then let the scripts end."""
        self.job.coordinator("coordinator")
        until = time.monotonic() + 60 * self.args.minutes
        for size in sizes:
            if time.monotonic() > until:
                break
            self._go_to(size)
            end = time.monotonic() + self.args.seconds
            while time.monotonic() < end:
                self._look()
                time.sleep(0.1)
        if not self.agents:
            self._go_to(1)
        made = len(self.job.rows("step"))
        self.job.wait(lambda: len(self.job.rows("step")) > made + 3 * self.args.most, "more steps", self.args.rest)
        self.played.note(len(self.agents), "end")
        self.job.end()
        for name in (*self.agents, "coordinator"):
            if code := self.job.processes[name].wait(self.args.rest):
                self.faults.append(f"{name} ended with code {code}")

    def _go_to(self, size: int) -> None:
        if size > len(self.agents):
            self.played.note(size, "join")
        while len(self.agents) < size:
            name = f"n{len(self.job.processes)}"
            self.job.node(name, is_host=0)
            self.agents.append(name)
        while len(self.agents) > size:
            self.falls += 1
            is_silent = self.args.silent_falls > 0 and self.falls % self.args.silent_falls == 0
            name = self.agents.pop(self.chance.randrange(len(self.agents)))
            self.played.note(len(self.agents), "death" if is_silent else "leave")
            self.job.kill(name, signal.SIGKILL if is_silent else signal.SIGTERM)

    def _look(self) -> None:
        for name in self.agents:
            if self.job.processes[name].poll() is not None:
                raise RuntimeError(f"agent {name} has ended by itself: {self.job.folder / name}.log")


@dataclass(frozen=True)
class Judged:
    """seconds: in which there was a node; usual: of them, what the steps that count take without any change."""

    steps: int
    again: int
    seconds: float
    usual: float
    lost: dict[str, float]


def judged(job: Job, played: Played) -> Judged:
    """From what the scripts wrote."""
    rows = job.rows("step")
    newest = {step: 0 for step in {row["step"] for row in rows}}
    for row in rows:
        newest[row["step"]] = max(newest[row["step"]], row["generation"])
    made: dict[int, tuple[float, int, int]] = {}
    for step in sorted(newest):
        mine = [row for row in rows if (row["step"], row["generation"]) == (step, newest[step])]
        made[step] = max(row["time"] for row in mine), newest[step], mine[0]["size"]
    ends, begin = list(made.values()), played.times[0][0]
    by_size: defaultdict[int, list[float]] = defaultdict(list)
    for (before, generation, _), (after, later, size) in itertools.pairwise(ends):
        if generation == later:
            by_size[size].append(after - before)
    usual = {size: median(each) for size, each in by_size.items()}
    lost = dict.fromkeys(CAUSES, 0.0)
    for (before, generation, size), (after, later, now) in itertools.pairwise([(begin, 0, 0), *ends]):
        empty = played.empty_seconds(before, after)
        if generation == later:
            cause = OTHER
        elif empty or not size:
            cause = "start from nothing"
        else:
            cause = "join" if now > size else played.last_fall(after)
        lost[cause] += after - before - empty - usual.get(now, 0.0)
    seconds = ends[-1][0] - begin - played.empty_seconds(begin, ends[-1][0])
    all_made = [(row["pid"], row["step"]) for row in rows]
    again = len(all_made) - len(set(all_made))
    return Judged(len(made), again, seconds, sum(usual.get(size, 0.0) for _, _, size in ends), lost)


def main() -> None:
    """Play it and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a file with lines `seconds,nodes`")
    parser.add_argument("--most", type=int, default=4, help="nodes at most (default 4)")
    parser.add_argument("--seconds", type=float, default=20.0, help="from one change to the next (default 20)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the trace (default 10)")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--seed", type=int, default=0, help="for who falls")
    parser.add_argument("--silent-falls", type=int, default=5, help="every k-th fall comes without notice; 0: none")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between fallback checkpoints (default 10)")
    parser.add_argument("--rest", type=float, default=120.0, help="seconds until everything has to be in order")
    parser.add_argument("--write", type=Path, help="a document to put the table into, such as docs/figures.md")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends this process ends the job, too
    folder = Path(tempfile.mkdtemp(prefix="dynatrain-goodput-"))
    player = Player(folder, args)
    try:
        player.run(changes(args.trace, args.most))
    except (TimeoutError, RuntimeError) as error:
        player.faults.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    finally:
        player.job.clean_up()
    faults = player.faults + mistakes(player.job.rows(), None)[:20]
    found, counts = judged(player.job, player.played), player.played.counts
    told = ", ".join(f"{counts[cause]} × {cause}" for cause in ("join", "leave", "death"))
    text = f"Measured on: {machine()}. {args.trace.name}, 0 to {args.most} nodes, {args.seconds:g} s a change, ZeRO "
    text += f"stage {args.stage}: {told}. {found.steps} steps that count; {found.again} were made "
    text += f"again, by a member. {'; '.join(faults) or 'Nothing was wrong'}.\n\n"
    head = ("", "s", "share")
    lost = [(cause, found.lost[cause]) for cause in CAUSES if found.lost[cause]]
    rows = [("with a node there", found.seconds), ("steps that count: ETTR", found.usual), *lost]
    text += table(head, [(name, f"{value:.1f}", f"{value / found.seconds:.3f}") for name, value in rows])
    conclude("goodput", text, folder, faults, args.write)


if __name__ == "__main__":
    main()
