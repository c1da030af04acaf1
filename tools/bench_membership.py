"""Measure what it costs the others when nodes join, leave, die and hang, and compare it with stock torchrun.

python tools/bench_membership.py                                    # about eight minutes
python tools/bench_membership.py --parts join-kill hang             # some of it
python tools/bench_membership.py --kept build/membership.json       # adds to what that file has, and shows all of it
python tools/bench_membership.py --write docs/figures

Real agents run on one machine, over loopback, with one worker each. The script is `tests/elastic/summing.py`: a step is
20 ms of sleep and three small all-reduces, and batches come from two loader processes. A pause is the time from the
last step of the old world to the first step that all members of the new world have made, minus the median step, and
minus any switch that the script itself makes (`pause_ms` in its `switch` line).

Stock torchrun uses the c10d back-end in two forms: "default", with restarts allowed and no other setting, with one
event of each kind; and "best", with the settings that made it fastest in our tests (`BEST`). It replaces all processes
at every change, and they load a snapshot that rank 0 writes after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from figures import keep, machine, table
from nodes import SCRIPT, TIMES, Found, Job, Row

BEST = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
"""With two attempts a loss is noticed a second earlier, but on a busy machine a waiting node then counts as dead."""
BEST_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RESTARTS = "--max-restarts=1000"
LIMIT_SECONDS = 120.0
REST_SECONDS = 0.6
"""Seconds between two events, so that there are steps to compare with."""
AWAY_SECONDS = 2.0
"""Seconds for which a coordinator is away."""
ROWS_BEFORE = 300

Event = dict[str, Any]
Given = dict[str, Any]
"""Further arguments of a `Job`: its script, and environment variables."""


class OverError(Exception):
    """Raised if nothing more can be measured in a scene. The message is the reason."""


@dataclass(frozen=True)
class Crossing:
    """The change from one world to the next, in seconds of the machine's clock."""

    last: float
    """Time of the last step in the old world."""
    formed: float
    """Time at which the last member had entered the new world."""
    first: float
    """Time at which all members of the new world had made a step."""
    usual: float
    """Median seconds of a step in the old world."""
    switch: float
    """Seconds of the script's own switch."""
    lost: int
    """Number of steps that had to be made again."""

    @property
    def pause_ms(self) -> float:
        """The pause of the members that stayed, without the switch."""
        return 1e3 * (self.first - self.last - self.usual - self.switch)


def crossing(rows: list[Row], begin: float, size: int) -> Crossing | None:
    """Return the first change after `begin` into a world of `size` members; None if it is not complete yet."""
    steps = sorted((row for row in rows if row["event"] == "step"), key=lambda row: float(row["time"]))
    new: dict[int, Row] = {}
    for row in steps:
        if row["time"] > begin and row["size"] == size:
            new.setdefault(row["pid"], row)
    old = [row for row in steps if row["size"] != size and (row["time"] < begin or row["generation"])]
    old = [row for row in old if not new or row["time"] < min(one["time"] for one in new.values())]
    if len(new) < size or not old:
        return None
    events = [row for row in rows if row["time"] > begin and row["pid"] in new]
    formed = [row for row in events if row["event"] in ("formed", "switch")]
    first = max(row["time"] for row in new.values())
    return Crossing(
        last=old[-1]["time"],
        formed=max((row["time"] for row in formed if row["time"] < first), default=first),
        first=first,
        usual=usual(old),
        switch=max((row.get("pause_ms", 0.0) / 1e3 for row in formed), default=0.0),
        lost=max(row["step"] for row in old) - min(row["step"] for row in new.values()) + 1,
    )


def usual(steps: list[Row]) -> float:
    """Return the median seconds between two steps, for the process that made the last step."""
    mine = [float(row["time"]) for row in steps if row["pid"] == steps[-1]["pid"]]
    return median([after - before for before, after in pairwise(mine)] or [0.0])


class Scene:
    """Two nodes that stay, and others that come and go. The costs are appended to `events`."""

    def __init__(self, job: Job, system: str, events: list[Event], conf: dict[str, Any]) -> None:
        self.job, self.system, self.events, self.conf = job, system, events, conf
        self.count = 2

    def begin(self, *names: str) -> None:
        """Start nodes, the first one as host of stock torchrun's store, and wait until all have made steps."""
        is_ours = self.system == "ours"
        if is_ours:
            self.job.coordinator("coordinator")
        for name in names:
            self._node(name, is_host=int(not is_ours and name == names[0]))

        def start() -> Row | None:
            return self._unless_ended(next((one for one in self.job.rows("step") if one["size"] == len(names)), None))

        self.job.wait(start, "a start", LIMIT_SECONDS)
        self._rest()

    def join(self, name: str = "c") -> None:
        """Start a node."""
        self._cross("join", 3, lambda: self._node(name, is_host=0))

    def kill(self, name: str = "c") -> None:
        """Kill all processes of a node. This resembles a loss of power, except that connections are closed."""
        pids = [self.job.processes[name].pid, *self.job.workers_of(name)]

        def act() -> None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        self._cross("kill", 2, act)
        self.job.code(name)

    def leave(self, name: str = "c") -> None:
        """Send SIGTERM to a node's agent."""
        self._cross("leave", 2, lambda: self.job.kill(name, signal.SIGTERM))
        self.job.code(name)

    def hang(self, name: str = "c") -> None:
        """Stop a worker, and wait until it has been replaced."""
        pid = self.job.workers_of(name)[0]
        self._cross("hang", 2, lambda: os.kill(pid, signal.SIGSTOP))
        begin = self.events[-1]["first"]
        self.job.wait(lambda: crossing(self._rows(), begin, 3), "a replacement")
        self._rest()

    def lose_coordinator(self) -> None:
        """Kill the coordinator, and restart it after a while."""
        begin = time.monotonic()
        time.sleep(AWAY_SECONDS)
        middle = time.monotonic()
        self.job.kill("coordinator")
        self.job.code("coordinator")
        time.sleep(AWAY_SECONDS)
        end = time.monotonic()
        self.job.coordinator("coordinator")
        self.job.wait(lambda: (status := self.job.status()) is not None and len(status.ranks) == 2, "its return")
        quiet, away = (longest(self.job.rows("step"), *span) for span in ((begin, middle), (middle, end)))
        self._note("coordinator", pause_ms=1e3 * (away - quiet), away_ms=1e3 * away)

    def _node(self, name: str, **conf: Any) -> None:
        self.job.node(name, RESTARTS, **{**self.conf, **conf})

    def _cross(self, kind: str, size: int, act: Callable[[], object]) -> None:
        """Act, and wait for the world that results, or for the end of the job.

        kind: the kind of event.
        size: the number of members of that world.
        """
        begin = time.monotonic()
        act()
        try:
            found = self.job.wait(lambda: self._unless_ended(crossing(self._rows(), begin, size)), kind, LIMIT_SECONDS)
        except TimeoutError as error:
            self._note(kind, outcome=f"nothing within {LIMIT_SECONDS:.0f} s")
            raise OverError from error
        except OverError as error:
            self._note(kind, outcome=f"{error} after {time.monotonic() - begin:.0f} s")
            raise
        what = {"pause_ms": found.pause_ms, "formed_ms": 1e3 * (found.formed - begin), "lost": found.lost}
        self._note(kind, **what, step_ms=1e3 * (found.first - begin), first=found.first)
        self._rest()

    def _unless_ended(self, found: Found | None) -> Found | None:
        """Return `found`. Raises OverError if it is None and the nodes that stay have ended."""
        if found is None and all(self.job.processes[name].poll() is not None for name in ("a", "b")):
            raise OverError("the whole job ended")
        return found

    def _rows(self) -> list[Row]:
        return self.job.rows()[-ROWS_BEFORE:]

    def _note(self, kind: str, **values: object) -> None:
        self.events.append({"system": self.system, "kind": kind, **values})

    def _rest(self) -> None:
        time.sleep(REST_SECONDS)


def longest(steps: list[Row], begin: float, end: float) -> float:
    """Return the seconds of the longest step of any process between `begin` and `end`."""
    times: dict[int, list[float]] = {}
    for row in steps:
        if begin < row["time"] < end:
            times.setdefault(row["pid"], []).append(row["time"])
    return max(after - before for each in times.values() for before, after in pairwise(sorted(each)))


# -- what is measured ------------------------------------------------------------------------------------------------


@contextmanager
def scene(system: str, events: list[Event], given: Given, nodes: str = "2:3") -> Iterator[Scene]:
    """Context manager with a scene of one of three systems. At the end, all its processes are ended."""
    is_ours = system == "ours"
    with tempfile.TemporaryDirectory(prefix="dynatrain-bench-", ignore_cleanup_errors=True) as folder:
        job = Job(Path(folder), nodes, backend="dynatrain" if is_ours else "c10d", **given)
        job.times = dict(TIMES) if is_ours else {}
        job.variables |= BEST_VARIABLES if system == "best" else {}
        try:
            yield Scene(job, system, events, dict(BEST) if system == "best" else {})
        except OverError:
            pass  # the reason is already among the events
        finally:
            job.end()
            job.clean_up()


def join_and_kill(events: list[Event], given: Given, times: int) -> None:
    """Measure joins and kills with this library."""
    with scene("ours", events, given) as ours:
        ours.begin("a", "b")
        for _ in range(times):
            ours.join()
            ours.kill()


def join_and_leave(events: list[Event], given: Given, times: int) -> None:
    """Measure joins and leaves with this library."""
    with scene("ours", events, given) as ours:
        ours.begin("a", "b")
        for _ in range(times):
            ours.join()
            ours.leave()


def hang_and_coordinator(events: list[Event], given: Given, times: int) -> None:
    """Measure hangs and a lost coordinator with this library."""
    with scene("ours", events, given) as ours:
        ours.begin("a", "b")
        for _ in range(times):
            ours.lose_coordinator()
        ours.join()
        for _ in range(times):
            ours.hang()


def stock_at_its_best(events: list[Event], given: Given, times: int) -> None:
    """Measure half as many events with stock torchrun's best settings, because each takes long.

    The last event is the death of the node that hosts its store.
    """
    with scene("best", events, given) as stock:
        stock.begin("a", "b")
        for _ in range((times + 1) // 2):
            stock.join()
            stock.kill()
            stock.join()
            stock.leave()


def stock_by_default(events: list[Event], given: Given, times: int) -> None:
    """Measure one event of each kind with stock torchrun's defaults, all in parallel, because they mostly wait."""

    def act(kind: str, stock: Scene) -> None:
        with suppress(OverError):
            stock.begin(*("ab" if kind == "join" else "abc"))
            getattr(stock, kind)()

    # whatever ends this process ends the jobs, and then the threads
    with ThreadPoolExecutor() as pool, ExitStack() as scenes:
        kinds = ("join", "kill", "leave")
        list(pool.map(act, kinds, [scenes.enter_context(scene("default", events, given)) for _ in kinds]))


PARTS: dict[str, Callable[[list[Event], Given, int], None]] = {
    "join-kill": join_and_kill,
    "join-leave": join_and_leave,
    "hang-coordinator": hang_and_coordinator,
    "best": stock_at_its_best,
    "default": stock_by_default,
}


# -- what is shown ---------------------------------------------------------------------------------------------------

HANG_BAR = 1e3 * (TIMES["silent_seconds"] + 1)
ROWS = (
    ("a node joins: pause", "join", "pause_ms", 150.0),
    ("a node is killed: until the others have formed a world", "kill", "formed_ms", 300.0),
    ("a node is killed: until their next step", "kill", "step_ms", None),
    ("a node gets SIGTERM: pause", "leave", "pause_ms", 300.0),
    (
        f"a worker hangs ({TIMES['silent_seconds']:g} s of silence allowed): until the next step",
        "hang",
        "step_ms",
        HANG_BAR,
    ),
    ("the coordinator is away: longest step, beyond the longest before", "coordinator", "pause_ms", 20.0),
)
HEAD = ("event, ms", "events", "median", "range", "bar", "", "stock, best", "÷ ours", "stock, default", "÷ ours")


def values(events: list[Event], system: str, kind: str, name: str) -> list[float]:
    """Return all measured values of one name, for one system and kind of event."""
    return [float(one[name]) for one in events if (one["system"], one["kind"]) == (system, kind) and name in one]


def line(events: list[Event], title: str, kind: str, name: str, bar: float | None) -> list[object] | None:
    """Return a row of the table; None if it was not measured."""
    ours = values(events, "ours", kind, name)
    if not ours:
        return None
    middle = median(ours)
    state = "" if bar is None else "met" if middle <= bar else f"missed by {middle - bar:.0f}"
    row: list[object] = [title, len(ours), f"{middle:.0f}", f"{min(ours):.0f}–{max(ours):.0f}"]
    row += ["" if bar is None else f"{bar:.0f}", state]
    for system in ("best", "default"):
        other = values(events, system, kind, "step_ms" if name == "formed_ms" else name)
        told = [one["outcome"] for one in events if (one["system"], one["kind"]) == (system, kind) and "outcome" in one]
        row += [f"{median(other):.0f}" if other else (told or ["not measured"])[0]]
        row += [f"{median(other) / middle:.0f} ×" if other else ""]
    return row


def report(events: list[Event]) -> str:
    """Return the tables with everything that was measured."""
    rows = [row for each in ROWS if (row := line(events, *each)) is not None]
    lost = {kind: [int(one) for one in values(events, "ours", kind, "lost")] for kind in ("join", "leave", "kill")}
    steps = "; ".join(f"{kind} {sum(each)} in {len(each)} events" for kind, each in lost.items() if each)
    return f"Steps of ours that had to be made again: {steps or 'not measured'}.\n\n{table(HEAD, rows)}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--events", type=int, default=10, help="events of a kind (default 10)")
    parser.add_argument("--script", type=Path, default=SCRIPT, help="another training script, see nodes.py")
    parser.add_argument("--kept", type=Path, help="a file with what was measured before; this run's figures are added")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="environment variables of the script"
    )
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends this process also ends the job
    variables = dict(each.split("=", 1) for each in args.set)
    events: list[Event] = json.loads(args.kept.read_text()) if args.kept is not None and args.kept.exists() else []
    where = machine()
    try:
        for part in args.parts:
            PARTS[part](events, {"script": args.script, "variables": variables}, args.events)
    finally:
        if args.kept is not None:
            args.kept.parent.mkdir(parents=True, exist_ok=True)
            args.kept.write_text(json.dumps(events))
    text = f"Measured on: {where} at the beginning. {report(events)}"
    print(text)
    if args.write is not None:
        keep(args.write, "bench_membership", text)


if __name__ == "__main__":
    main()
