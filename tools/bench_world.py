"""Measure how long the others need for a new world when one of 4, 8, 16 or 32 processes is killed.

python tools/bench_world.py                                 # about five minutes
python tools/bench_world.py --ranks 4 8 --times 5
python tools/bench_world.py --write docs/figures

Membership alone: the processes are those of `tests/elastic/summing.py`, which import torch and no DeepSpeed, hold a few
numbers and add them up. All but one are workers of one agent, and the one that is killed, with its agent, is alone on
another node. Every world is built anew: one gloo group of all members, in which each connects to each at once, an
all-gather, and a barrier. `formed` is from the SIGKILL until the last of the others is through these; `step` until all
of them have made their next step.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from bench_membership import REST_SECONDS, Crossing, crossing
from figures import keep, machine, table
from nodes import TIMES, Job

BAR_SECONDS = 1.0
LIMIT_SECONDS = 300.0
ROWS_BEFORE = 40
STAYS, DIES = "stays", "dies"
HEAD = ("ranks", "deaths", "a step s", "formed s", "from, to", "step s", "bar s", "")


def deaths(job: Job, ranks: int, times: int) -> list[tuple[float, Crossing]]:
    """(when the killing began, what came of it) of so many deaths, one after another."""
    job.times = dict(TIMES)
    job.variables["LOADERS"] = "0"
    job.coordinator("coordinator")
    start(job, STAYS, ranks - 1)
    found = []
    for _ in range(times):
        begin = time.monotonic()
        start(job, DIES, 1)
        job.wait(partial(whole, job, ranks, begin), f"{ranks} ranks", LIMIT_SECONDS)
        time.sleep(REST_SECONDS)
        pids, begin = [job.processes[DIES].pid, *job.workers_of(DIES)], time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        after = job.wait(partial(without, job, ranks - 1, begin), "the others", LIMIT_SECONDS)
        found.append((begin, after))
        job.code(DIES)
    return found


def start(job: Job, name: str, workers: int) -> None:
    """A node of so many workers."""
    job.workers = workers
    job.node(name)


def whole(job: Job, ranks: int, since: float) -> bool:
    """Whether all of so many ranks have made a step."""
    made = {row["pid"] for row in job.rows("step") if row["time"] > since and row["size"] == ranks}
    return len(made) == ranks


def without(job: Job, ranks: int, since: float) -> Crossing | None:
    """The way into a world of so many ranks, once they are through; from the newest lines alone, which are enough."""
    return crossing(job.rows()[-ROWS_BEFORE * ranks :], since, ranks)


def line(ranks: int, times: int) -> list[object]:
    """A row of the table."""
    with tempfile.TemporaryDirectory(prefix="dynatrain-bench-", ignore_cleanup_errors=True) as folder:
        job = Job(Path(folder), "1:2")
        try:
            found = deaths(job, ranks, times)
        finally:
            job.end()
            job.clean_up()
    formed = [after.formed - begin for begin, after in found]
    step = median(after.first - begin for begin, after in found)
    usual, middle = median(after.usual for _, after in found), median(formed)
    state, spread = "pass" if middle <= BAR_SECONDS else "missed", f"{min(formed):.2f} to {max(formed):.2f}"
    seconds = [f"{usual:.2f}", f"{middle:.2f}", spread, f"{step:.2f}"]
    return [f"{ranks - 1} of {ranks}", times, *seconds, BAR_SECONDS, state]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8, 16, 32])
    parser.add_argument("--times", type=int, default=3, help="deaths of each line (default 3)")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends this process ends the jobs, too
    where = machine()
    rows = [line(ranks, args.times) for ranks in args.ranks]
    text = f"Measured on: {where}; processes of one machine, medians.\n\n{table(HEAD, rows)}"
    print(text)
    if args.write is not None:
        keep(args.write, "bench_world", text)


if __name__ == "__main__":
    main()
