"""One rank of `bench_dynamic.py`: a pipeline of two stages whose layers have changed, with balance and without.

torchrun ... dynamic_ranks.py FOLDER '{"name": "pruning", "blocks": 8, "width": 96, "steps": 300, "timed": 6}'

Layers make their whole change after the first step. Then steps are timed while balance acts. In another job, steps are
timed at all possible boundaries, and compared with the predictions for the initial and the best boundaries.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed
import torch
import torch.distributed as td
from launch import Notes
from workload import quiet

from ds_dynatrain.report import read_events

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from dynamic.model import Dynamism, Sizes
from dynamic.runs import DYNAMISMS, boundaries, change_only, job, layer_seconds

RATE = 1e-6
"""Learning rate, so small that the layers' times stay the same."""
SETTLING, AGAIN = 2, 4
"""Steps after a switch that are not timed, and how many times as many steps are timed at the best boundaries."""


def steps_of(engine: Any, count: int) -> list[float]:
    """Train steps, and return the seconds of each."""
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        engine.train_batch()
        found.append(time.perf_counter() - begin)
    return found


def acting(dynamism: Dynamism, sizes: Sizes, steps: int, file: Path) -> dict[str, Any]:
    """Return the seconds of all steps while balance acts, and the result of each move."""
    balance = {"mode": "act"}
    with job(dynamism, sizes, steps, balance, RATE, report={"jsonl": str(file)}) as engine:
        engine.train_batch()
        said = change_only(engine, dynamism, 1.0)
        seconds, cut = steps_of(engine, steps), boundaries(engine)
    moves = [[each.predicted_gain, each.measured_gain] for each in (read_events(file) if file.exists() else [])]
    return {"said": said, "acted": sum(seconds), "steps": steps, "moves": moves, "cut": cut}


def tried(dynamism: Dynamism, sizes: Sizes, timed: int) -> dict[str, Any]:
    """Return the median step at all boundaries. At the initial and the best ones, more steps are timed and
    predicted.
    """
    balance = {"mode": "advise", "every_steps": 10**6}
    with job(dynamism, sizes, 4 * timed, balance, RATE) as engine:
        engine.train_batch()
        change_only(engine, dynamism, 1.0)
        start = boundaries(engine)
        found = {}
        for cut in ((0, at, start[-1]) for at in range(1, start[-1])):
            found[cut] = at_boundaries(engine, cut, timed)["measured"]
        best = min(found, key=lambda cut: found[cut])
        both = [at_boundaries(engine, cut, AGAIN * timed, window=True) for cut in (start, best)]
    return {"start": both[0], "best": both[1], "all": [[cut[1], seconds] for cut, seconds in found.items()]}


def at_boundaries(engine: Any, cut: tuple[int, ...], timed: int, window: bool = False) -> dict[str, Any]:
    """Return the median step at these boundaries, the same on all members.

    window: whether to return a prediction as well.
    """
    if cut != boundaries(engine):
        engine.switch(boundaries=cut, at=engine.global_steps)
    steps_of(engine, SETTLING)
    said: dict[str, Any] = {"cut": cut}
    if window:
        engine.balancer.note("timed now")
        engine.train_batch()
        layers = layer_seconds(engine.balancer.profile)
        said |= {"predicted": engine.balancer.advise().present_time.seconds, "layers": layers}
    took = torch.tensor([median(steps_of(engine, timed))], dtype=torch.float64)
    td.broadcast(took, 0)
    return {**said, "measured": took.item()}


def main() -> None:
    """Measure one kind of change."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed("gloo", verbose=False)
    notes = Notes(folder, td.get_rank())
    dynamism, sizes = DYNAMISMS[wanted["name"]], Sizes(wanted["blocks"], wanted["width"])
    found: Mapping[str, Any] = acting(dynamism, sizes, wanted["steps"], Path(folder) / "switches.txt")
    notes.write({**found, **tried(dynamism, sizes, wanted["timed"])})


if __name__ == "__main__":
    main()
