"""Measure what copies with buddies cost a step: how long it waits, what is sent, and how much memory it takes.

python tools/bench_buddies.py                              # three minutes on a quiet machine
python tools/bench_buddies.py --sizes 30M --batches 4 --steps 20
python tools/bench_buddies.py --write docs/figures

An elastic job of two torchrun agents with one worker each takes a copy after every second step, so steps during which a
copy is sent can be compared with steps during which none is. `plain` is a copy of the same buffers, made at the same
boundary, into memory that was used before. `waits` is the time for which a step waits at a boundary where a copy is
taken. `more` is how much longer steps take while a copy is being sent: the time that the thread and the network take
away from training on shared cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from figures import keep, machine, table
from nodes import TIMES, Job, Row

SCRIPT = Path(__file__).with_name("buddy_ranks.py")
NODES = ("a", "b")
LIMIT_SECONDS = 600.0
BLOCKING, SHARE, JUDGED = 1.25, 0.02, 64
"""The bars: the time of a copy ÷ that of a plain one, and the share of a step that it waits, with so many samples per
rank."""


def steps_of(**wanted: Any) -> list[Row]:
    """Run one job, and return the lines that its ranks wrote."""
    with tempfile.TemporaryDirectory(prefix="dynatrain-bench-", ignore_cleanup_errors=True) as folder:
        variables = {"WANTED": json.dumps(wanted), "DS_ACCELERATOR": "cpu"}
        times = {**TIMES, "silent_seconds": 5.0}
        job = Job(Path(folder), f"{len(NODES)}:{len(NODES)}", variables=variables, times=times, script=SCRIPT)
        job.seconds = LIMIT_SECONDS
        try:
            job.coordinator("coordinator")
            for node in NODES:
                job.node(node)
            codes = {node: job.code(node) for node in NODES}
            if any(codes.values()):
                raise SystemExit(f"a node has ended with {codes}\n{job.logs()}")
            return job.rows("step")
        finally:
            job.clean_up()


def line(size: str, stage: int, batch: int, args: argparse.Namespace) -> list[object]:
    """Return a row of the table."""
    wanted = {"size": size, "stage": stage, "batch": batch * len(NODES), "dtype": args.dtype}
    rows = steps_of(**wanted, steps=args.steps, length=args.length)
    with_copy, without = ([row for row in rows if row["is_taken"] == kind] for kind in (True, False))
    plain, waits, took = (median(row[key] for row in with_copy) for key in ("plain_ms", "boundary_ms", "take_ms"))
    busy, calm = (median(row["train_ms"] for row in each) for each in (with_copy, without))
    last = rows[-1]
    share = waits / (calm + waits)
    verdict = [] if took <= BLOCKING * plain else [f"copy missed: {took / plain:.2f}"]
    verdict += [f"share missed: {100 * share:.1f} %"] if batch >= JUDGED and share > SHARE else []
    return [
        f"{size}, stage {stage}, {batch} a rank",
        f"{calm:.0f}",
        f"{plain:.1f}",
        f"{took:.1f}",
        f"{took / plain:.2f}",
        f"{waits:.1f}",
        f"{100 * share:.1f} %",
        f"{100 * (busy / calm - 1):+.1f} %",
        f"{last['sent_bytes'] / last['state_bytes']:.4f}",
        f"{last['memory_bytes'] / last['state_bytes']:.2f}",
        "; ".join(verdict) or "pass",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["30M"], choices=["tiny", "30M", "125M"])
    parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp32"])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 64], help="samples a rank (default 4 and 64)")
    parser.add_argument("--steps", type=int, default=30, help="steps of each job (default 30)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample (default 32)")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    cases = [(size, stage, batch) for size in args.sizes for stage in args.stages for batch in args.batches]
    rows = [line(*case, args) for case in cases]
    text = f"Measured on: {machine()}. {args.dtype}, {len(NODES)} nodes of one rank, a copy after every second of "
    text += f"{args.steps} steps; medians. Bars: copy ÷ plain {BLOCKING:g}; {100 * SHARE:g} % of a step of "
    text += f"{JUDGED} samples a rank.\n\n"
    head = ("", "step ms", "plain ms", "copy ms", "÷ plain", "waits ms", "of a step", "more")
    text += table((*head, "sent ÷ state", "memory ÷ state", ""), rows)
    print(text)
    if args.write is not None:
        keep(args.write, "bench_buddies", text)


if __name__ == "__main__":
    main()
