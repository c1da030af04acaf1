"""Measure how accurate `ds-dynatrain simulate` is: its predicted goodput for a storm, compared with a real job's.

python tools/bench_simulate.py                              # a storm of 60 events to calibrate with, another one of 200
python tools/bench_simulate.py --write docs/simulate.md

Both storms are those of `chaos.py`, with different seeds. The first gives the times that the owner of a cluster
measures once: a step, a start, a change. The second is recorded as a trace and simulated with these times. Goodput is
the number of steps that count × the time of an undisturbed step ÷ the duration of the storm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos import CHAOS_TIMES, gaps
from figures import conclude, machine, table
from history import mistakes, sums_of_samples
from nodes import Job, Row
from storm import Storm

from ds_dynatrain.balance.profile import LayerCost, Profile
from ds_dynatrain.plan import LinkClass, Topology
from ds_dynatrain.simulate.player import play
from ds_dynatrain.simulate.policies import RIVALS
from ds_dynatrain.simulate.simulated_job import Assumptions, SimulatedJob
from ds_dynatrain.simulate.trace import read_trace

AT_MOST, NODES = 4, 5
"""Maximum number of members that train, and of nodes."""
REST_SECONDS = 240.0
"""Seconds that a storm on a busy machine may take to come to rest. Members wait as long for a coordinator, because one
of them may be the last that has the state."""
NOTICED = {"stop": CHAOS_TIMES["silent_seconds"], "hang": CHAOS_TIMES["stuck_seconds"]}
"""Map from an event of a worker to the seconds until the coordinator gives the worker up."""


@dataclass(frozen=True)
class Played:
    """A storm that was played.

    rows: the lines that the scripts wrote.
    told: the events, as (time, event, node).
    begin, end: the time of its start and of its end.
    faults: anything that went wrong.
    """

    rows: list[Row]
    told: list[tuple[float, str, str]]
    begin: float
    end: float
    faults: list[str]

    @property
    def steps(self) -> int:
        """Number of steps made in the storm that count."""
        return len({row["step"] for row in self.rows if row["event"] == "step" and self.is_in(row["time"])})

    def is_in(self, at: float) -> bool:
        return self.begin <= at < self.end

    def step_seconds(self) -> float:
        """Return the mean seconds of a step without a change."""
        by_process: dict[tuple[int, int], list[float]] = {}
        for row in self.rows:
            if row["event"] == "step":
                by_process.setdefault((row["pid"], row["generation"]), []).append(row["time"])
        steps = [after - before for times in by_process.values() for before, after in itertools.pairwise(times)]
        return sum(steps) / len(steps)

    def start_seconds(self) -> float:
        """Return the median time from the start of a node's process until its worker is in a world."""
        formed: dict[int, float] = {}
        for row in self.rows:
            if row["event"] == "formed":
                formed[row["pid"]] = min(row["time"], formed.get(row["pid"], row["time"]))
        firsts, joins = sorted(formed.values()), [at for at, what, _ in self.told if what == "join"]
        after = [next((first - at for first in firsts if first > at), None) for at in joins]
        return median(each for each in after if each is not None)

    def change_seconds(self) -> float:
        """Return the mean pause of planned changes, minus one step."""
        planned = [gap for kind, found in gaps(self.rows).items() if kind != "failure" for gap in found]
        return max(0.0, sum(planned) / len(planned) - self.step_seconds()) if planned else 0.0

    def failure_seconds(self) -> float:
        """Return the median pause after a failure, minus one step. Half of the failures are deaths that others notice
        at once.
        """
        failed = gaps(self.rows).get("failure", [])
        return max(0.0, median(failed) - self.step_seconds()) if failed else 0.0


def storm(seed: int, events: int) -> Played:
    """Play a storm, and return it."""
    folder = Path(tempfile.mkdtemp(prefix="dynatrain-simulate-"))
    job = Job(folder, times=CHAOS_TIMES, variables={"ORPHAN_SECONDS": f"{REST_SECONDS:g}"})
    found = Storm(job, seed, most=NODES, rest_seconds=REST_SECONDS)
    begin, end, faults = 0.0, 0.0, list[str]()
    try:
        found.begin()
        begin = time.monotonic()
        found.run(events)
        end = time.monotonic()
        found.end()
    except (TimeoutError, RuntimeError) as error:
        faults.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        end = end or time.monotonic()
    finally:
        job.clean_up()
    rows = job.rows()
    faults += found.faults + mistakes(rows, sums_of_samples)[:20]
    return Played(rows, found.told, begin, end, faults)


def trace_of(played: Played, start_seconds: float) -> list[dict[str, Any]]:
    """Return the events of a storm as rows of a trace. A new node gets the first free one of five places.

    start_seconds: how long a new coordinator needs until it can notice a loss.
    """
    back = [at - played.begin + start_seconds for at, what, _ in played.told if what == "coordinator"]
    places: dict[str, int] = {}
    lines: list[dict[str, Any]] = []
    # workers that stand still, and the rows of their successors
    unnoticed: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for at, what, name in played.told:
        seconds = at - played.begin
        if what == "join":
            places[name] = min(set(range(NODES)) - set(places.values()))
        if name not in places:
            continue  # its agent was told to leave
        row = {"seconds": seconds, "members": [places[name]]}
        if what in ("loss", "preemption"):
            del places[name]
            lost, successor = unnoticed.pop(name, ({}, {"seconds": 0.0}))
            if successor["seconds"] > seconds:  # it leaves before anybody has noticed that it stands still
                lost["noticed_seconds"] = seconds - lost["seconds"]
                lines.remove(successor)
                continue
        if seconds >= 0:
            lines.append({**row, "event": what if what in ("join", "preemption") else "loss"})
        if what in ("kill", "stop", "hang"):  # its agent starts another worker
            noticed = NOTICED.get(what, 0.0)
            lines[-1] |= {"noticed_seconds": noticed} if noticed else {}
            unnoticed[name] = lines[-1], {**row, "event": "join", "seconds": seconds + noticed}
            lines.append(unnoticed[name][1])
    end = played.end - played.begin
    for line in lines:
        away = [until - line["seconds"] for until in back if 0 <= until - line["seconds"] <= start_seconds]
        if line["event"] == "loss" and away:
            line["noticed_seconds"] = max(line.get("noticed_seconds", 0.0), *away)
    inside = sorted((line for line in lines if line["seconds"] <= end), key=lambda line: line["seconds"])
    return [*inside, {"seconds": end, "event": "end"}]


def simulated(calibrated: Played, played: Played, folder: Path) -> tuple[Assumptions, float, float]:
    """Simulate a storm. Return (assumptions, predicted goodput, predicted number of lost steps).

    calibrated: the storm from which the times are taken.
    """
    # Steps take equally long in all worlds, so larger worlds are made slightly faster. All possible members then train.
    layer = LayerCost(name="sum", forward_seconds=1e-7, backward_seconds=0.0, kind_bytes={"weight": 16})
    step, free = calibrated.step_seconds(), LinkClass(1e15)
    profile = Profile(layers=(layer,), train_batch_size=12, micro_batch_size=12, beside_seconds=step)
    profile.save(folder / "profile.json")
    (folder / "cluster.toml").write_text(Topology.uniform(NODES, 1, node=free, network=free).to_toml())
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, trace_of(played, calibrated.start_seconds()))) + "\n")
    assumed = Assumptions(
        start_seconds=calibrated.start_seconds(),
        change_seconds=calibrated.change_seconds(),
        detection_seconds=max(0.0, calibrated.failure_seconds() - calibrated.change_seconds()),
    )
    layout = "data=4,zero_stage=0"  # so that all members hold the whole state
    job = SimulatedJob.read(folder / "profile.json", folder / "cluster.toml", layout, assumed, 1, AT_MOST)
    found = play(job, read_trace(folder / "trace.jsonl", job.topology), RIVALS[:1]).policies[0]
    return assumed, found.goodput, found.lost_steps


def main() -> None:
    """Play both storms, simulate the second one, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--calibration-events", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs=2, default=[1, 3], help="of the calibration, and of the other storm")
    parser.add_argument("--keep", type=Path, help="a folder for what the storms wrote")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends this process also ends the job
    folder = Path(tempfile.mkdtemp(prefix="dynatrain-simulate-"))
    calibrated, played = (storm(*each) for each in zip(args.seeds, (args.calibration_events, args.events), strict=True))
    (folder / "storms.json").write_text(json.dumps([vars(calibrated), vars(played)]))
    if args.keep is not None:
        shutil.copytree(folder, args.keep, dirs_exist_ok=True)
    assumed, predicted, lost = simulated(calibrated, played, folder)
    seconds, step = played.end - played.begin, played.step_seconds()
    measured = played.steps * step / seconds
    again = len({(row["step"], row["generation"]) for row in played.rows if row["event"] == "step"})
    again -= len({row["step"] for row in played.rows if row["event"] == "step"})
    off = abs(predicted / measured - 1)
    faults = [*calibrated.faults, *played.faults, *([f"goodput is off by {100 * off:.0f} %"] if off > 0.1 else [])]
    text = f"Measured on: {machine()}. Storms of {args.calibration_events} and {args.events} events, seeds "
    text += f"{args.seeds[0]} and {args.seeds[1]}; {seconds:.0f} s, steps of {1e3 * step:.1f} ms. Calibrated: "
    text += ", ".join(f"{name} {getattr(assumed, name):.3g}" for name in sorted(assumed.model_fields_set)) + ".\n\n"
    rows: list[list[object]] = [
        ["goodput", f"{predicted:.3f}", f"{measured:.3f}", f"{100 * off:.1f} %"],
        ["steps lost", f"{lost:.0f}", again, ""],
    ]
    conclude("simulate_storm", text + table(["", "predicted", "measured", "off by"], rows), folder, faults, args.write)


if __name__ == "__main__":
    main()
