"""Cause random events in an elastic job on a busy machine, and check the job's history afterwards.

python tools/chaos.py                              # 200 events, about ten minutes
python tools/chaos.py --events 15 --seed 3 --busy 0
python tools/chaos.py --write docs/figures
python tools/chaos.py --script tests/elastic/several.py --steps step beside --busy 0  # two engines; see there for --set
python tools/chaos.py --script tests/elastic/training.py --kind tensor --busy 0 --most 3 --rest 180  # or another axis

Nodes of stock torchrun start and are told to leave; agents, workers, rank 0 and the coordinator are killed; workers, or
only their main threads, are stopped; the coordinator stands still for a while; sometimes two events happen at once.
Every few events the job has to come to rest: all nodes train, and none is left behind. At the end every step must be
there, with the sum of all samples up to it, and the processes that lived longest may hold no more descriptors or
threads than at their start. If anything is wrong, the exit status is 1 and the folder with all logs stays.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import conclude, machine
from history import mistakes, sums_of_samples
from nodes import SCRIPT, TIMES, Job, Row
from storm import SECONDS, Storm

AXES = ("tensor", "experts", "pipeline")
CHAOS_TIMES = {**TIMES, "silent_seconds": 3.0, "stuck_seconds": 30.0, "recovery_seconds": 3.0}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Context manager that keeps this many cores busy with other processes."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def gaps(rows: list[Row]) -> dict[str, list[float]]:
    """Return the seconds from a process's last step in one world to its first step in a later one, by kind of change.

    The kind is "any" if the script does not record it.
    """
    kinds = {row["generation"]: row["change"] for row in rows if row["event"] == "formed"}
    last: dict[int, Row] = {}
    found: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        before = last.get(row["pid"])
        if row["event"] == "step":
            if before is not None and before["generation"] < row["generation"]:
                found[kinds.get(row["generation"], "any")].append(row["time"] - before["time"])
            last[row["pid"]] = row
    return found


def settings_of(kind: str, folder: Path) -> dict[str, str]:
    """Return the environment variables that make `training.py` use an axis.

    They turn on fallback checkpoints, from which lost state is restored.
    """
    from tests.elastic.kinds import KINDS, settings

    here, fallback = KINDS[kind], {"path": str(folder / "fallback"), "every_steps": 5}
    block = {"layout": {**here.layout, "zero_stage": 1}, "fallback": fallback}
    own = settings(1, dict(here.own), **block)
    return {"KIND": kind, "SETTINGS": json.dumps(own), "DS_ACCELERATOR": "cpu", "STEP_SECONDS": "0.2"}


def report(storm: Storm, rows: list[Row], seconds: float, faults: list[str]) -> str:
    """Return text on the events, and on what they cost the members that stayed."""
    events = [*sorted(storm.counts.items()), ("two of these at once", storm.pairs)]
    counts = ", ".join(f"{name} {times}" for name, times in events)
    pauses = "; ".join(
        f"{name} {len(each)}, median {1e3 * median(each):.0f} ms, nine of ten below "
        f"{1e3 * quantiles(each, n=10)[-1]:.0f}, longest {1e3 * max(each):.0f}"
        for name, each in sorted(gaps(rows).items())
        if len(each) > 1
    )
    steps = max((row.get("step", 0) for row in rows), default=0)
    generations = max((row["generation"] for row in rows), default=0)
    verdict = "; ".join(faults) if faults else "nothing was wrong"
    told = f"{storm.counts.total()} events in {seconds:.0f} s, {generations} generations, {steps} steps: {verdict}."
    return f"{told} {counts}. Pauses of survivors: {pauses}."


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, help="processes that keep the machine busy")
    parser.add_argument("--most", type=int, default=5, help="nodes at most (default 5, one more than may train)")
    parser.add_argument("--rest", type=float, default=SECONDS, help="seconds until everything has to be in order")
    parser.add_argument("--workers", type=int, default=1, help="workers of a node (default 1)")
    parser.add_argument(
        "--script",
        type=lambda given: Path(given).resolve(),
        default=SCRIPT,
        help="another training script, see nodes.py",
    )
    parser.add_argument("--kind", choices=AXES, help="of `training.py`: nodes of two workers, and another axis")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="environment variables of the script"
    )
    parser.add_argument(
        "--steps",
        nargs="+",
        default=["step"],
        metavar="EVENT",
        help="what the script calls a step of each of its engines",
    )
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    args.workers = args.workers if args.kind is None else 2
    return args


def main() -> None:
    """Run the storm, and judge the history."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends this process also ends the job
    folder = Path(tempfile.mkdtemp(prefix="dynatrain-chaos-"))
    variables = dict(each.split("=", 1) for each in args.set)
    if args.kind is not None:
        variables |= settings_of(args.kind, folder)
    job = Job(folder, workers=args.workers, times=CHAOS_TIMES, script=args.script, variables=variables)
    storm = Storm(job, args.seed, most=args.most, rest_seconds=args.rest)
    begin, faults = time.monotonic(), list[str]()
    try:
        with busy(args.busy):
            storm.begin()
            storm.run(args.events)
            storm.end()
    except (TimeoutError, RuntimeError, subprocess.TimeoutExpired) as error:
        faults.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    finally:
        job.clean_up()
    rows = job.rows()
    faults += storm.faults + storm.growth.found()
    right = sums_of_samples if args.script == SCRIPT else None
    for name in args.steps:
        faults += [f"{name}: {each}" for each in mistakes(rows, right, name)[:20]]
    text = f"Measured on: {machine()}, {args.busy} processes beside it that do nothing else than to keep it busy. "
    text += f"Seed {args.seed}, {args.workers} workers a node, each with two loader processes. "
    text += report(storm, rows, time.monotonic() - begin, faults)
    conclude("chaos", text, folder, faults, args.write)


if __name__ == "__main__":
    main()
