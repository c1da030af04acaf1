"""Measure a step without a pending change against plain DeepSpeed, in the same processes and in turn.

python tools/bench_step.py                          # stages 1 and 3, a minute each on a quiet machine
python tools/bench_step.py --write docs/figures

Each rank has a plain engine and an engine of ds_dynatrain for the same model, and runs a step of each in turn, with
alternating order. The figure is the median, over all pairs of steps, of the ratio within a pair, so a slow moment of
the machine affects both. It is given for wall time (of the slowest rank, including data loading) and for processor time
(the sum over ranks), which hardly depends on other load.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from figures import keep, machine, table
from launch import launch

PROCESSES = 2
LIMIT_SECONDS = 600
ALLOWED = 0.01

Pair = dict[str, float]


def pairs(stage: int, args: argparse.Namespace) -> tuple[list[Pair], list[Pair]]:
    """Run all launches. Return the (wall, processor) seconds of each pair of steps."""
    wall: list[Pair] = []
    processor: list[Pair] = []
    wanted: dict[str, Any] = {name: getattr(args, name) for name in ("size", "dtype", "steps", "batch", "length")}
    for _ in range(args.launches):
        notes = launch("step_ranks.py", PROCESSES, LIMIT_SECONDS, stage=stage, **wanted)
        for lines in zip(*notes.values(), strict=True):
            wall.append({form: max(line[form][0] for line in lines) for form in lines[0]})
            processor.append({form: sum(line[form][1] for line in lines) for form in lines[0]})
    return wall, processor


def compare(stage: int, args: argparse.Namespace) -> list[list[object]]:
    """Return the two rows of the table for a stage."""
    rows: list[list[object]] = []
    for name, found in zip(("wall", "processor"), pairs(stage, args), strict=True):
        ratios = [pair["dynatrain"] / pair["plain"] - 1 for pair in found]
        low, _, high = quantiles(ratios, n=4)
        more = median(ratios)
        verdict = "pass" if more <= ALLOWED else f"missed by {100 * (more - ALLOWED):.1f} %"
        times = (f"{1e3 * median(pair[form] for pair in found):.1f}" for form in ("plain", "dynatrain"))
        rows.append(
            [f"stage {stage}, {name}", *times, f"{100 * more:+.2f} %", f"{100 * low:+.1f} to {100 * high:+.1f} %"]
        )
        rows[-1].append(verdict)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="30M", choices=["tiny", "30M", "125M"])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps of a launch (default 40)")
    parser.add_argument("--launches", type=int, default=1, help="launches of each stage (default 1)")
    parser.add_argument("--batch", type=int, default=4, help="samples of a global batch (default 4)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample (default 32)")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    rows = [row for stage in args.stages for row in compare(stage, args)]
    text = f"Measured on: {machine()}. {args.size}, {args.dtype}, {PROCESSES} ranks, {args.steps} pairs of steps in "
    text += f"each of {args.launches} launches. Bar: 1 %.\n\n"
    text += table(("", "plain ms", "ds_dynatrain ms", "more, median of pairs", "middle half of pairs", ""), rows)
    print(text)
    if args.write is not None:
        keep(args.write, "bench_step", text)


if __name__ == "__main__":
    main()
