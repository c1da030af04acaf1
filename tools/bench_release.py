"""Measure a job of four nodes that needs fewer members after nine of twelve layers are frozen: who stays, and the cost.

python tools/bench_release.py
python tools/bench_release.py --simulate

Four real torchrun agents with one worker each train a GPT in four stages, with "members": "release"; another job keeps
all members. The steps that such members would make on processors of their own are predicted from the profile that the
job has measured. Takes about three minutes on two cores. With --simulate no step is trained: each of twelve blocks
takes as long as a block in `bench_balance.py`, and the first nine have no backward pass.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_balance import Blocks
from figures import keep, machine, table
from nodes import TIMES, Job

from ds_dynatrain.balance.choose import Members, Search, choose
from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.partition import uniform
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.step_time import step_time
from ds_dynatrain.space import Layout

NODES, FREEZE_AT, STEPS, MICRO_BATCHES = "abcd", 12, 120, 8
WITHIN, GONE_SECONDS = 1.01, 5.0
SCRIPT = Path(__file__).with_name("release_ranks.py")


@dataclass(frozen=True)
class Found:
    """The results of a job.

    losses: the loss of each step.
    remain: the nodes that remained.
    gone: the seconds from the request to leave to the end of each agent.
    """

    losses: dict[int, float]
    remain: int
    gone: list[float]
    saved: float
    pending: float
    profile: Profile


def run(folder: Path, members: str, slower: float) -> Found:
    """Run one job, and return its results."""
    balance = {
        **{"mode": "act", "every_steps": 10, "slow_ratio": None},
        **{"least_gain": 0.1, "members": members, "at_most_slower": slower},
    }
    layouts = {str(size): {"data": 1, "pipe": size, "zero_stage": 1} for size in range(1, 5)}
    settings: dict[str, Any] = {
        "train_batch_size": 4 * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"partition": "uniform"},
        "dynatrain": {"buddies": {"mode": "off"}, "layout": layouts["4"], "layouts": layouts, "balance": balance},
    }
    variables = {"SETTINGS": json.dumps(settings), "FREEZE_AT": str(FREEZE_AT), "DS_ACCELERATOR": "cpu"}
    times = {**TIMES, "silent_seconds": 10.0}
    job = Job(folder, "1:4", variables=variables, times=times, script=SCRIPT, seconds=400.0)
    try:
        job.coordinator("coordinator")
        for node in NODES:
            job.node(node, is_host=0)
        told, gone = dict[str, float](), dict[str, float]()
        while max((row["step"] for row in job.rows("step")), default=0) < STEPS:
            for node in NODES:
                if node not in told and "told to leave" in (folder / f"{node}.log").read_text():
                    told[node] = time.monotonic()
                if node not in gone and job.processes[node].poll() is not None:
                    if job.processes[node].poll() != 0:
                        raise RuntimeError(job.logs())
                    gone[node] = time.monotonic()
            time.sleep(0.05)
        job.end(ahead=4)
        if any(job.code(node) for node in NODES):
            raise RuntimeError(job.logs())
        rows = job.rows("step")
        losses = {row["step"]: row["loss"] for row in rows}
        frozen = min(row["time"] for row in rows if row["step"] == FREEZE_AT)
        fewer = min((row["time"] for row in rows if row["members"] < 4), default=frozen)
        seconds = [gone[node] - told[node] for node in gone]
        saved = max(row["saved"] for row in rows)
        return Found(losses, 4 - len(gone), seconds, saved, fewer - frozen, Profile.load(folder / "profile.json"))
    finally:
        job.clean_up()


def predicted(profile: Profile) -> str:
    """Return a table of the best predicted step for each number of members, each on a processor of its own."""
    profile = Profile(**{**vars(profile), "speeds": (1.0,)})
    layers = len(profile.layers)
    search = Search(zero_stages=(1,), micro_batches=MICRO_BATCHES, count=1)
    start = Layout(zero_stage=1)
    best = [
        choose(profile, start, Members((1.0,) * count), search, lambda layout: layout.data > 1)[0]
        for count in range(1, 5)
    ]
    even = start.replace(pipe=4, boundaries=uniform(layers, 4))
    rows = [("4, even", even, step_time(profile, even, Deal.of(profile, even, MICRO_BATCHES, True)))]
    rows += [(str(count), each.layout, each.time) for count, each in enumerate(best, 1)]
    four = best[-1].time.seconds
    return table(
        ["members", "boundaries", "a step, ms", "÷ 4 balanced", "÷ 4 even"],
        [
            [
                name,
                ", ".join(map(str, layout.boundaries or (0, layers))),
                f"{1e3 * took.seconds:.1f}",
                f"{took.seconds / four:.2f}",
                f"{took.seconds / rows[0][2].seconds:.2f}",
            ]
            for name, layout, took in rows
        ],
    )


def main() -> None:
    """Measure or simulate, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    parser.add_argument("--simulate", action="store_true", help="predict alone, from layers of equal cost")
    asked = parser.parse_args()
    text = simulated() if asked.simulate else measured()
    print(text)
    if asked.write:
        keep(asked.write, "bench_release", text)


def simulated() -> str:
    """Return the table for twelve equal blocks."""
    dense = Blocks.dense(12)
    backward = np.where(np.arange(12) < 9, 0.0, dense.backward)
    return predicted(Blocks(dense.forward, backward, dense.parameters).profile(MICRO_BATCHES))


def measured() -> str:
    """Run three jobs, and return text about their results."""
    found = list[Found]()
    for members, slower in (("keep", 0.01), ("release", 0.01), ("release", 1.0)):
        with tempfile.TemporaryDirectory() as folder:
            found.append(run(Path(folder), members, slower))
    kept, lines = found[0], list[str]()
    for slower, each in zip((0.01, 1.0), found[1:], strict=True):
        common = kept.losses.keys() & each.losses.keys()
        alike = all(kept.losses[step] == each.losses[step] for step in common)
        lines.append(
            f"`at_most_slower` {slower:g}: {each.remain} of 4 nodes remain; the others were gone "
            f"{max(each.gone, default=0.0):.1f} s after they were told (bar {GONE_SECONDS:g}), members were idle "
            f"{each.pending:.1f} s after the freezing; {each.saved:.0f} member-seconds saved; losses of {len(common)} "
            f"steps are {'bit-equal' if alike else 'not equal'} to those of a job that keeps all."
        )
    return f"Measured on: {machine()}. {' '.join(lines)}\n\n{predicted(found[1].profile)}"


if __name__ == "__main__":
    main()
