"""Measure how far losses deviate if a job changes its world, with and without `exact`.

python tools/deviation.py                       # 300 steps of 4 runs; some minutes
python tools/deviation.py --write docs/figures --picture docs/deviation.svg

The job starts on 4 ranks, and continues on 3, 2 and 4. It uses dropout, clipping and AdamW, and reads real text. A loss
is the mean of the global batch. The deviation, as defined by ElasWave (arXiv 2510.00606), is the mean of |loss - loss
of the run without changes|.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from figures import keep, machine
from launch import launch
from matplotlib.figure import Figure

LIMIT_SECONDS = 1200
WORLD = 4
THEN = (3, 2, 4)
"""Sizes of the later worlds, at equal intervals."""


def losses(exact: bool, steps: int, stage: int, worlds: Sequence[int]) -> np.ndarray:
    """Run a job, and return the loss of each step.

    A loss is the mean over the step's micro-batches, added in an order that is the same in every world.
    """
    schedule = {str(steps * (place + 1) // (len(worlds) + 1)): data for place, data in enumerate(worlds)}
    wanted: dict[str, Any] = {"exact": exact, "steps": steps, "stage": stage, "data": WORLD, "schedule": schedule}
    found = defaultdict(list)
    for lines in launch("deviation_ranks.py", WORLD, LIMIT_SECONDS, **wanted).values():
        for line in lines:
            found[line["step"]].append(line["loss"])
    if sorted(found) != list(range(steps)):
        raise SystemExit(f"{len(found)} of {steps} steps were trained")
    return np.array([math.fsum(found[step]) / len(found[step]) for step in range(steps)])


def draw(file: Path, apart: dict[str, np.ndarray]) -> None:
    """Draw a chart of |loss - loss of the run without changes| by step."""
    figure = Figure(figsize=(7.0, 2.8), layout="constrained")
    place = figure.subplots()
    steps = len(next(iter(apart.values())))
    for (words, values), color in zip(apart.items(), ("#b8763c", "#0b6e99"), strict=True):
        place.plot(np.arange(steps), values, color=color, linewidth=1.0, label=words)
    for number, data in enumerate(THEN):
        at = steps * (number + 1) // (len(THEN) + 1)
        place.axvline(at, color="#888888", linestyle="--", linewidth=0.6)
        place.text(at + 2, place.get_ylim()[1], f"data {data}", fontsize=7, va="top")
    place.set_xlabel("step", fontsize=8)
    place.set_ylabel("|loss - static run|", fontsize=8)
    place.tick_params(labelsize=7)
    place.legend(fontsize=8)
    with mpl.rc_context({"svg.hashsalt": "deviation", "svg.fonttype": "none"}):  # equal figures give equal files
        figure.savefig(file, format="svg", metadata={"Date": None})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3], help="of ZeRO (default 2)")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    parser.add_argument("--picture", type=Path, help="an SVG file, such as docs/deviation.svg")
    args = parser.parse_args()
    os.environ["MKL_CBWR"] = "COMPATIBLE"
    rows, apart = [], {}
    for words, exact in (("default", False), ("exact", True)):
        static, moving = (losses(exact, args.steps, args.stage, worlds) for worlds in ((), THEN))
        apart[words] = np.abs(moving - static)
        equal = int(np.count_nonzero(moving == static))
        rows.append(
            f"{words}: last loss {static[-1]:.4f}, apart by {apart[words].mean():.3g} in the mean and by "
            f"{apart[words].max():.3g} at most, equal bits in {equal} steps"
        )
    text = f"Measured on: {machine()}. {args.steps} steps at stage {args.stage}, data {WORLD}, "
    text += f"{', '.join(map(str, THEN))} at even intervals, beside data {WORLD} throughout. {'; '.join(rows)}."
    print(text)
    if args.picture is not None:
        draw(args.picture, apart)
    if args.write is not None:
        keep(args.write, "deviation", text)


if __name__ == "__main__":
    main()
