"""Measure the part of an exact job's step spent on its digest, and the part spent on recording losses and norm.

python tools/bench_exact_digests.py                           # 8M, 1, 2 and 4 ranks, stages 1 and 3
python tools/bench_exact_digests.py --write docs/figures

The figures are medians over steps, of the slowest rank. Bar: a digest after every step takes at most 3 % of the step.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median

from figures import keep, machine
from launch import launch

LIMIT_SECONDS = 600
BAR = 0.03
MODE = "COMPATIBLE"
"""MKL's mode."""


def row(data: int, stage: int, args: argparse.Namespace) -> list[object]:
    """Return a row of the table."""
    wanted = {name: getattr(args, name) for name in ("size", "steps", "leaves", "samples", "length")}
    notes = launch("exact_digest_ranks.py", data, LIMIT_SECONDS, stage=stage, **wanted)
    lines = [*zip(*notes.values(), strict=True)]
    step = median(max(line["step"] for line in each) for each in lines)
    told = {
        form: median(max(line["told"] for line in each) for each in lines if each[0]["form"] == form)
        for form in ("digest", "losses")
    }
    share = {form: seconds / step for form, seconds in told.items()}
    met = "pass" if share["digest"] <= BAR else "missed"
    cells = [f"{1e3 * step:.0f}"]
    for form in told:
        cells += [f"{1e3 * told[form]:.1f}", f"{100 * share[form]:.1f} %"]
    return [f"data {data}, stage {stage}", *cells, met]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8M", choices=["tiny", "8M", "30M"])
    parser.add_argument("--data", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--steps", type=int, default=20, help="half of them with a digest (default 20)")
    parser.add_argument("--leaves", type=int, default=8, help="of a global batch (default 8)")
    parser.add_argument("--samples", type=int, default=2, help="of a leaf (default 2)")
    parser.add_argument("--length", type=int, default=48, help="tokens of a sample (default 48)")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    os.environ["MKL_CBWR"] = MODE
    rows = (row(data, stage, args) for data in args.data for stage in args.stages)
    found = [
        f"{name}: a step {step} ms, its digest {digest} ms ({share}, {met})"
        for name, step, digest, share, *_, met in rows
    ]
    text = (
        f"Measured on: {machine()}. {args.size}, fp32, {args.leaves} leaves of {args.samples} samples of {args.length} "
    )
    text += f"tokens, {args.steps} steps, MKL_CBWR={MODE}. {'; '.join(found)}."
    print(text)
    if args.write is not None:
        keep(args.write, f"bench_exact_digests {args.size}", text)


if __name__ == "__main__":
    main()
