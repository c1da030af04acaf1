"""Measure a step of an exact job against a step of the same job without `exact`, in the same processes and in turn.

python tools/bench_exact.py                              # 8M, 2 and 4 ranks, stages 1 to 3; minutes on a quiet machine
python tools/bench_exact.py --size 30M --write docs/figures

Both jobs have the same micro-batches. The figure is the median, over all pairs of steps, of the ratio within a pair, by
the slowest rank, so a slow moment of the machine affects both. The bars are 1.2 at stage 1, and 1.15 at stages 2 and 3.
Memory is measured in two more launches, one of each job, as the peak of the fullest rank in a step. The exact job may
need log2(leaves) + 2 times a rank's part of the gradient in fp32 more.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from figures import keep, machine, table
from launch import launch
from workload import GPT, SIZES

LIMIT_SECONDS = 600
BARS = {1: 1.2, 2: 1.15, 3: 1.15}
FORMS = ["default", "exact"]
MODE = "COMPATIBLE"
"""MKL's mode in both jobs."""
Notes = dict[int, list[dict[str, Any]]]
"""The notes of each rank."""


def row(data: int, stage: int, args: argparse.Namespace) -> list[object]:
    """Return a row of the table."""
    wanted = {name: getattr(args, name) for name in ("size", "leaves", "samples", "length")} | {"stage": stage}
    notes = launch("exact_ranks.py", data, LIMIT_SECONDS, forms=FORMS, steps=args.steps, **wanted)
    pairs = [
        {form: max(line[form] for line in lines) for form in FORMS}
        for lines in zip(*notes.values(), strict=True)
        if "form" not in lines[0]
    ]
    ratios = [pair["exact"] / pair["default"] for pair in pairs]
    low, _, high = quantiles(ratios, n=4)
    times = (f"{1e3 * median(pair[form] for pair in pairs):.0f}" for form in FORMS)
    met = "pass" if median(ratios) <= BARS[stage] else f"missed, bar {BARS[stage]}"
    sent = (f"{most(notes, form, 'bytes_sent') / 1e6:.0f}" for form in FORMS)
    return [f"data {data}, stage {stage}", *times, f"{median(ratios):.2f}", f"{low:.2f} to {high:.2f}", met, *sent]


def memory_cells(data: int, stage: int, args: argparse.Namespace) -> list[object]:
    """Return the cells on memory: what an exact job needs in addition, and what it may need."""
    wanted = {name: getattr(args, name) for name in ("size", "leaves", "samples", "length")} | {"stage": stage}
    held = {
        form: most(launch("exact_ranks.py", data, LIMIT_SECONDS, forms=[form], steps=1, **wanted), form, "memory")
        for form in FORMS
    }
    partition = 4 * sum(parameter.numel() for parameter in GPT(**SIZES[args.size]).parameters()) / data
    more, allowed = held["exact"] - held["default"], (math.log2(args.leaves) + 2) * partition
    met = "pass" if more <= allowed else "missed"
    return [f"{more / 1e6:.0f}", f"{allowed / 1e6:.0f}", met]


def most(notes: Notes, form: str, name: str) -> int:
    """Return the largest value of a note over all ranks."""
    return max(int(line[name]) for lines in notes.values() for line in lines if line.get("form") == form)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8M", choices=["tiny", "8M", "30M"])
    parser.add_argument("--data", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps (default 20)")
    parser.add_argument("--leaves", type=int, default=8, help="of a global batch (default 8)")
    parser.add_argument("--samples", type=int, default=2, help="of a leaf (default 2)")
    parser.add_argument("--length", type=int, default=48, help="tokens of a sample (default 48)")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    os.environ["MKL_CBWR"] = MODE
    worlds = [(data, stage) for data in args.data for stage in args.stages]
    rows = [[*row(*world, args), *memory_cells(*world, args)] for world in worlds]
    text = f"Measured on: {machine()}. {args.size}, fp32, {args.leaves} leaves of {args.samples} samples, {args.steps} "
    text += f"pairs of steps, MKL_CBWR={MODE}.\n\n"
    head = ("", "default ms", "exact ms", "ratio, median of pairs", "middle half of pairs", "")
    text += table((*head, "MB sent by a rank", "with exact", "exact holds more, MB", "allowed, MB", ""), rows)
    print(text)
    if args.write is not None:
        keep(args.write, f"bench_exact {args.size}", text)


if __name__ == "__main__":
    main()
