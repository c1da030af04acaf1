"""Measure the computation of a whole plan's bytes, and compute changes of 70B and 235B models on 16 nodes of 8 GPUs.

python tools/bench_whole_plan.py
python tools/bench_whole_plan.py --write docs/figures

In the large worlds members keep their ranks, so only the computation of the bytes is timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from figures import keep, machine, table

from ds_dynatrain.dry_run.change import answered
from ds_dynatrain.dry_run.planned_job import PlannedJob, layout_of
from ds_dynatrain.plan import Topology, memory_of, picture_of, plan_switch

CLUSTER = Path(__file__).parents[1] / "examples/clusters/a800-16x8.toml"
LARGE = (
    ("llama-3-70b", "data={0},zero_stage=1", "data={1}"),
    ("llama-3-70b", "data={0},zero_stage=3", "data={1}"),
    ("llama-3-70b", "data={8},pipe=8,zero_stage=1", "data={16},pipe=16"),
    ("qwen3-235b-a22b", "data={4},pipe=4,expert=32,zero_stage=1", "data={8},pipe=8,expert=16"),
)
"""Models and layouts, in which {1} is one rank less than all, and {4} a fourth of all ranks."""
NAMED = (
    ("llama-3-70b", "data=128,zero_stage=1", "data=120"),
    ("llama-3-70b", "pipe=4,data=32,zero_stage=1", "pipe=8,data=16"),
    ("llama-3-70b", "tensor=8,data=16,zero_stage=1", "tensor=4,data=32"),
    ("qwen3-235b-a22b", "data=128,expert=64,zero_stage=1", "expert=32"),
    ("qwen3-235b-a22b", "pipe=4,data=32,expert=32,zero_stage=1", "pipe=8,data=16,expert=16"),
)
"""Changes on 16 x 8 GPUs with published figures; the paper does not name its layouts."""


def large_row(ranks: int, model: str, source: str, target: str) -> list[object]:
    """Time the computation for one large world, and return a row."""
    sizes = {0: ranks, 1: ranks - 1, 4: ranks // 4, 8: ranks // 8, 16: ranks // 16}
    before, after = (text.format(*(sizes.get(each, 0) for each in range(17))) for text in (source, target))
    job, here = PlannedJob.read(model, None), layout_of(before)
    there = layout_of(after, present=here)
    nodes = Topology.uniform(-(-ranks // 8), 8).node_of
    begin = time.perf_counter()
    vps = job.space(here, there, range(here.world_size))
    plan = plan_switch(vps, there, range(there.world_size), nodes=nodes)
    found = picture_of(plan, np.array(plan.members) // 8)
    memory_of(plan, found, job.budget_bytes)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [model, f"{before} → {after}", f"{found.gives.sum() / 1e9:,.0f}", f"{seconds:.1f}", f"{peak / 1e6:.0f}"]


def help_seconds() -> float:
    """How long `ds-dynatrain plan --help` takes: the median of nine calls."""
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ds_dynatrain.cli", "plan", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def named_row(model: str, source: str, target: str) -> list[object]:
    """Compute one change on the cluster, and return a row."""
    before = layout_of(source)
    found = answered(PlannedJob.read(model, None), before, layout_of(target, present=before), Topology.read(CLUSTER))
    figures = found.figures
    if figures is None:
        return [model, f"{source} → {target}", found.refusal, "", "", ""]
    moved, seconds = figures.bytes, figures.seconds
    sent = f"{moved.sent / 1e9:,.0f} ({moved.between_nodes / 1e9:,.0f})"
    verdict = "fits" if found.fits else "does not fit" if "its device" in found.refusal else "refused"
    return [model, f"{source} → {target}", sent, f"{seconds.floor:.2f}", f"{seconds.expected:.2f}", verdict]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the tables: docs/figures")
    asked = parser.parse_args()
    large, named = [], []
    for ranks in (1024, 16384):
        for row in LARGE:
            # so that each has memory of its own
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                large.append(pool.submit(large_row, ranks, *row).result())
    for row in NAMED:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            named.append(pool.submit(named_row, *row).result())
    head = "model", "change", "sent GB", "seconds (bar 10; 120)", "peak MB (bar 2,000)"
    text = f"Measured on: {machine()}. `plan --help` takes {help_seconds():.2f} s (bar 0.5).\n\n{table(head, large)}"
    of_named = "model, 16 x 8", "change", "sent GB (between nodes)", "floor s", "expected s", "verdict"
    text += f"\n\nComputed, not run:\n\n{table(of_named, named)}"
    print(text)
    if asked.write:
        keep(asked.write, "bench_whole_plan", text)


if __name__ == "__main__":
    main()
