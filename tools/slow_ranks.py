"""One rank of `bench_slow.py`. Each rank has its own core, and other processes use most of rank 1's core for some time.

torchrun ... slow_ranks.py FOLDER '{"begin": 8, "end": 28, "stop": 48, "neighbors": 2, "balance": {"mode": "act"}}'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
from balance_slow_ranks import BATCH, Paced
from burning import Points
from launch import Notes
from workload import quiet

import ds_dynatrain

AHEAD, PACE = 20, 3.0
"""Steps from rank 0's message that the time is up to the last step, and the factor of a sample's work."""


class Neighbors:
    """Processes that keep this rank's core busy between two times."""

    def __init__(self, count: int, begin: float, end: float) -> None:
        self._count, self._times, self._held = count, [begin, end], list[subprocess.Popen[bytes]]()

    def look(self, now: float) -> None:
        """Start or end the processes if it is time to do so."""
        if not self._times or now < self._times[0]:
            return
        self._times.pop(0)
        if not self._held:  # they inherit the core
            self._held = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(self._count)]
            return
        self.end()

    def end(self) -> None:
        """End the processes."""
        for process in self._held:
            process.kill()
            process.wait()


def main() -> None:
    """Train until the time is up. Rank 0 records when each step ended, and the moves of balance."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # so that no rank waits for a compiler
    deepspeed.init_distributed(verbose=False)
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "dynatrain": {"layout": {"data": 2}, "timeout_seconds": 120, "balance": wanted["balance"]},
    }
    model = Paced()
    model.pace = PACE
    engine, _, loader, _ = ds_dynatrain.initialize(model=model, config=config, training_data=Points())
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[engine.rank]})
    events: list[Any] = []
    engine.on_switch(events.append)
    neighbors = Neighbors(wanted["neighbors"] if engine.rank == 1 else 0, wanted["begin"], wanted["end"])
    is_over, ends, begin, last = Path(folder) / "over", list[float](), time.monotonic(), sys.maxsize
    try:
        while engine.global_steps < last:
            for batch in loader:
                engine.backward(engine(*batch))
                engine.step()
                now = time.monotonic() - begin
                if engine.global_steps > len(ends):  # a rank with many samples has several micro-batches in a step
                    ends.append(now)
                neighbors.look(now)
                if engine.rank == 0 and now >= wanted["stop"] and not is_over.exists():
                    is_over.with_suffix(".new").write_text(str(engine.global_steps + AHEAD))
                    is_over.with_suffix(".new").rename(is_over)
                if last == sys.maxsize and is_over.exists():
                    last = int(is_over.read_text())
                if engine.global_steps >= last:
                    break
    finally:
        neighbors.end()
    if engine.rank == 0:
        moves = [[event.step, str(event.target.layout.get("shares")), event.pause_ms] for event in events]
        told = str(engine.balancer.advise()) if engine.balancer is not None else ""
        Notes(folder, 0).write({"ends": ends, "moves": moves, "advice": told})


if __name__ == "__main__":
    main()
