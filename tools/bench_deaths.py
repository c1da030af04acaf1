"""Measure the time from a SIGKILL to the first step in the new world, with buddies and without a checkpoint.

python tools/bench_deaths.py                               # three minutes on a quiet machine
python tools/bench_deaths.py --sizes 125M --kills 1        # needs more cores than two, or patience
python tools/bench_deaths.py --stages 1 2 3
python tools/bench_deaths.py --write docs/figures

The job has four torchrun agents with one worker each, one of which is killed in the middle of a step. `stands still` is
the time from the signal to the first step that all three survivors have made, minus their median step. `raw` is the
time of the transport alone: each survivor sends and receives as many bytes as the busiest one does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from figures import keep, machine, table
from nodes import TIMES, Job, Row

SCRIPT = Path(__file__).with_name("death_ranks.py")
NODES = ("a", "b", "c", "d")
LIMIT_SECONDS = 400.0
BOUND = 1.0, 1.25
"""The bar: this many seconds plus this many times the raw transport."""


@dataclass(frozen=True)
class Death:
    """The cost of one death.

    seconds: how long training stood still.
    steps_lost: the number of steps that had to be made again.
    nbytes: the bytes of the busiest survivor.
    raw: the seconds of the raw transport.
    """

    seconds: float
    steps_lost: int
    nbytes: int
    raw: float


def death(number: int, **wanted: Any) -> Death:
    """Run a job in which one node is killed, and return what the death cost.

    number: the index of the node to kill.
    """
    with tempfile.TemporaryDirectory(prefix="dynatrain-bench-", ignore_cleanup_errors=True) as folder:
        variables = {"WANTED": json.dumps({**wanted, "ranks": len(NODES)}), "DS_ACCELERATOR": "cpu"}
        job = Job(Path(folder), f"{len(NODES) - 1}:{len(NODES)}", variables=variables, script=SCRIPT)
        job.times, job.seconds = {**TIMES, "silent_seconds": 10.0}, LIMIT_SECONDS
        try:
            job.coordinator("coordinator")
            for node in NODES:
                job.node(node)
            job.wait(lambda: _is_protected(job.rows("step")), "steps of all, and whole copies")
            (victim,) = job.workers_of(NODES[number])
            before = [row["time"] for row in job.rows("step") if row["pid"] == victim and row["ranks"] == len(NODES)]
            usual = median(later - earlier for earlier, later in pairwise(before))
            time.sleep(usual / 2)
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            others = [name for place, name in enumerate(NODES) if place != number]
            codes = {name: job.code(name) for name in others}
            if any(codes.values()):
                raise SystemExit(f"a node has ended with {codes}\n{job.logs()}")
            return _judged(job.rows(), killed)
        finally:
            job.clean_up()


def _is_protected(rows: list[Row]) -> bool:
    """Return whether all nodes have trained together for some steps and have complete copies."""
    full = [row for row in rows if row["ranks"] == len(NODES)]
    return len({row["pid"] for row in full if (row["whole"] or -1) > 0}) == len(NODES) and len(full) >= 6 * len(NODES)


def _judged(rows: list[Row], killed: float) -> Death:
    after = [row for row in rows if row["event"] == "step" and row["time"] > killed and row["ranks"] < len(NODES)]
    by_step = {step: [row["time"] for row in after if row["step"] == step] for step in {row["step"] for row in after}}
    ends = [max(by_step[step]) for step in sorted(by_step)]
    usual = median(later - earlier for earlier, later in pairwise(ends))
    done = max(row["step"] for row in rows if row["event"] == "step" and row["time"] < killed)
    raw = [row for row in rows if row["event"] == "raw"]
    return Death(ends[0] - killed - usual, done + 1 - min(by_step), raw[0]["bytes"], max(row["seconds"] for row in raw))


def line(size: str, stage: int, args: argparse.Namespace) -> list[object]:
    """Return a row of the table: medians over several deaths."""
    wanted = {"size": size, "stage": stage, "dtype": args.dtype, "batch": args.batch, "length": args.length, "steps": 4}
    found = [death(1 + number % (len(NODES) - 1), **wanted) for number in range(args.kills)]
    seconds, raw = median(each.seconds for each in found), median(each.raw for each in found)
    bound = BOUND[0] + BOUND[1] * raw
    return [
        f"{size}, stage {stage}",
        f"{seconds:.2f}",
        f"{min(each.seconds for each in found):.2f} to {max(each.seconds for each in found):.2f}",
        max(each.steps_lost for each in found),
        f"{found[0].nbytes / 1e6:.0f}",
        f"{raw:.2f}",
        f"{bound:.2f}",
        "pass" if seconds <= bound else "missed",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["30M"], choices=["tiny", "30M", "125M"])
    parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp32"])
    parser.add_argument("--stages", nargs="+", type=int, default=[1])
    parser.add_argument("--batch", type=int, default=12, help="samples of a global batch (default 12)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample (default 32)")
    parser.add_argument("--kills", type=int, default=3, help="deaths of each line (default 3)")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    rows = [line(size, stage, args) for size in args.sizes for stage in args.stages]
    text = f"Measured on: {machine()}. {args.dtype}, {len(NODES)} nodes of one rank, of which one is killed; "
    text += f"{args.kills} deaths a line, median. Bar: {BOUND[0]:g} s + {BOUND[1]:g} × raw.\n\n"
    head = ("", "stands still s", "from, to", "steps lost", "MB of the busiest", "raw s", "bar s", "")
    text += table(head, rows)
    print(text)
    if args.write is not None:
        keep(args.write, "bench_deaths", text)


if __name__ == "__main__":
    main()
