"""Measure the time from SIGTERM to all members until their state is saved, and continue with another number of ranks.

python tools/bench_ending.py                              # 30M parameters, two ranks, then three
python tools/bench_ending.py --sizes 125M --times 2
python tools/bench_ending.py --write docs/figures

The job has torchrun agents with one worker each. All of them get SIGTERM at a random time. The next launch, with
another number of ranks, has to continue with the step after the saved one.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from figures import keep, machine
from nodes import TIMES, Job

from ds_dynatrain.checkpoint.folder import latest

SCRIPT = Path(__file__).with_name("ending_ranks.py")
LIMIT_SECONDS = 400.0
BAR_SECONDS = 30.0
RANKS = (2, 3)
"""Numbers of ranks of one launch and of the next one, in turn."""


def launch(
    folder: Path, ranks: int, kept: Path, delay: float, args: argparse.Namespace, size: str
) -> tuple[float, float, int]:
    """Run one launch. Return (seconds until the state was saved, seconds of a step, first step of the launch).

    Raises SystemExit if the state was not saved.
    """
    folder.mkdir()
    wanted = {"size": size, "dtype": args.dtype, "stage": args.stage, "batch": args.batch, "length": args.length}
    variables = {"WANTED": json.dumps({**wanted, "kept": str(kept)}), "DS_ACCELERATOR": "cpu"}
    job = Job(folder, f"{ranks}:{ranks}", variables=variables, script=SCRIPT, times={**TIMES, "silent_seconds": 20.0})
    job.seconds = LIMIT_SECONDS
    try:
        job.coordinator("coordinator")
        names = [f"n{number}" for number in range(ranks)]
        for name in names:
            job.node(name, "--shutdown-timeout=120")
        job.wait(lambda: len(job.rows("step")) >= 4 * ranks, "steps of all")
        mine = [row["time"] for row in job.rows("step") if row["pid"] == job.rows("step")[0]["pid"]]
        usual = median(later - earlier for earlier, later in pairwise(mine))
        time.sleep(delay * usual)
        told = time.time()
        for name in names:
            job.kill(name, signal.SIGTERM)
        for name in names:
            job.code(name)
        made, tag = max(row["step"] for row in job.rows("step")), latest(kept)
        if tag is None or tag.partition("-")[0] != f"step{made}":
            raise SystemExit(f"{tag} was kept, and step {made} was made\n{job.logs()}")
        return (kept / "latest").stat().st_mtime - told, usual, min(row["step"] for row in job.rows("step"))
    finally:
        job.clean_up()


def line(size: str, args: argparse.Namespace) -> str:
    """Return text with the times of one size, for launches of 2 and 3 ranks in turn."""
    chance, last, steps, kept_after = random.Random(args.seed), 0, list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="dynatrain-bench-", ignore_cleanup_errors=True) as folder:
        kept = Path(folder, "kept")
        for number in range(args.times):
            ranks = RANKS[number % len(RANKS)]
            seconds, usual, first = launch(Path(folder, str(number)), ranks, kept, chance.random(), args, size)
            if first != last + 1:
                raise SystemExit(f"launch {number} began with step {first}, and {last} was kept")
            last = int(str(latest(kept)).partition("-")[0].removeprefix("step"))
            steps.append(usual)
            kept_after.append(seconds)
    met = f"{sum(seconds <= BAR_SECONDS for seconds in kept_after)} of {args.times}"
    spans = (f"{min(each):.2f} to {max(each):.2f}" for each in (steps, kept_after))
    took = "a step {} s, kept after {} s".format(*spans)
    return f"{size}, stage {args.stage}: {took}, median {median(kept_after):.1f}; {last} steps; bar met in {met}."


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["30M"], choices=["tiny", "30M", "125M"])
    parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp32"])
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--batch", type=int, default=12, help="samples of a global batch (default 12)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample (default 32)")
    parser.add_argument("--times", type=int, default=4, help="launches of each size (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="for the instants")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    rows = [line(size, args) for size in args.sizes]
    text = f"Measured on: {machine()}. {args.dtype}, SIGTERM to all nodes at a random instant of a step; launches "
    text += f"of 2 and 3 ranks in turn, each from the state that the one before it has kept. Bar: {BAR_SECONDS:g} s. "
    text += " ".join(rows)
    print(text)
    if args.write is not None:
        keep(args.write, "bench_ending", text)


if __name__ == "__main__":
    main()
