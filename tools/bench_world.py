"""Measure how long survivors need to form a new world when one of 4, 8, 16 or 32 processes is killed.

python tools/bench_world.py                                 # about five minutes
python tools/bench_world.py --ranks 4 8 --times 5
python tools/bench_world.py --write docs/figures

Only membership is measured: the processes are those of `tests/elastic/summing.py`, which import torch but not
DeepSpeed, and add up a few numbers. All but one are workers of one agent. The one that is killed, with its agent, is
alone on another node. Every world is built anew: one gloo group in which each member connects to all others at once, an
all-gather, and a barrier. `formed` is the time from the SIGKILL until the last survivor has finished these; `step` is
the time until all survivors have made their next step.
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
    """Kill the last node this many times, one death after the other. Return (time of the kill, the change) of each."""
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
    """Start a node with this many workers."""
    job.workers = workers
    job.node(name)


def whole(job: Job, ranks: int, since: float) -> bool:
    """Return whether all ranks of a world of this size have made a step since `since`."""
    made = {row["pid"] for row in job.rows("step") if row["time"] > since and row["size"] == ranks}
    return len(made) == ranks


def without(job: Job, ranks: int, since: float) -> Crossing | None:
    """Return the change into a world of this size, once it is complete, from the newest lines only."""
    return crossing(job.rows()[-ROWS_BEFORE * ranks :], since, ranks)


def line(ranks: int, times: int) -> list[object]:
    """Return a row of the table."""
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends this process also ends the jobs
    where = machine()
    rows = [line(ranks, args.times) for ranks in args.ranks]
    text = f"Measured on: {where}; processes of one machine, medians.\n\n{table(HEAD, rows)}"
    print(text)
    if args.write is not None:
        keep(args.write, "bench_world", text)


if __name__ == "__main__":
    main()
