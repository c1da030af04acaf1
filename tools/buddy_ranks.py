"""One rank of `bench_buddies.py`: an elastic job that takes a copy after every second step, and records what it cost.

Started by torchrun agents. $OUT is the folder for its lines, and $WANTED has its settings: '{"size": "30M", "dtype":
"fp32", "stage": 1, "steps": 40, "batch": 8, "length": 32}'
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from workload import GPT, SIZES, Samples, config, quiet

import ds_dynatrain
from ds_dynatrain.engine.copies.copy import copied
from ds_dynatrain.space import MASTER

WARM_UP = 6
EVERY_STEPS = 2
"""Steps between two copies, so that steps with and without a copy on its way are measured in the same minute."""


class Watch:
    """A replacement of the `at_boundary` of buddies that times the call, and a plain copy of the same buffers."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._parts = engine, engine._parts
        self._buddies = self._parts.extension("buddies")
        self._look = self._buddies.at_boundary
        self._scratch: list[torch.Tensor] = []
        self.last: dict[str, Any] = {}
        self._buddies.at_boundary = self._at_boundary

    def _at_boundary(self) -> None:
        parts, taken = self._parts, self._engine.buddies.taken
        state = copied(parts.vps, parts.layout, parts.host.state_buffers()[0])
        held = [*state.values()]
        if [len(each) for each in held] != [len(each) for each in self._scratch]:
            self._scratch = [torch.zeros_like(each) for each in held]
        begin = time.perf_counter()
        for there, here in zip(self._scratch, held, strict=True):
            there.copy_(here)
        plain = time.perf_counter()
        self._look()
        end, now = time.perf_counter(), self._engine.buddies
        masters = [each for (kind, _), each in state.items() if kind == MASTER]
        self.last = {
            "is_taken": now.taken > taken,
            "plain_ms": 1e3 * (plain - begin),
            "boundary_ms": 1e3 * (end - plain),
            "take_ms": now.take_ms,
            "ship_ms": now.ship_ms,
            "sent_bytes": now.sent_bytes,
            "memory_bytes": now.memory_bytes,
            "skipped": now.skipped,
            "state_bytes": sum(each.numel() * each.element_size() for each in held),
            "elements": sum(map(len, masters)),
        }


def main() -> None:
    """Train, and write a line for each step."""
    wanted = json.loads(os.environ["WANTED"])
    quiet()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # so that no rank waits for a compiler
    shape = SIZES[wanted["size"]]
    block = {"buddies": {"mode": "copy", "every_steps": EVERY_STEPS}}
    settings = {**config(wanted["dtype"], wanted["stage"], wanted["batch"]), "dynatrain": block}
    settings["gradient_clipping"] = 1.0
    torch.manual_seed(0)
    engine, *_ = ds_dynatrain.initialize(config=settings, model=GPT(**shape))
    watch = Watch(engine)
    loader = engine.loader(Samples(10**6, wanted["length"], shape["vocabulary"]), num_workers=0)
    with (Path(os.environ["OUT"]) / f"{os.getpid()}.jsonl").open("a", buffering=1) as lines:
        begin, step = time.perf_counter(), 0
        for tokens in loader:
            boundary, dealt = watch.last, time.perf_counter()
            engine.backward(engine(tokens))
            engine.step()
            if engine.global_steps == step:
                continue
            end = time.perf_counter()
            line = {"event": "step", "generation": engine.generation, "rank": engine.rank, "step": step}
            line |= {"train_ms": 1e3 * (end - dealt), "whole_ms": 1e3 * (end - begin), **boundary}
            if step >= WARM_UP and engine.data > 1:
                lines.write(json.dumps(line) + "\n")
            begin, step = end, engine.global_steps
            if step >= WARM_UP + wanted["steps"]:
                return


if __name__ == "__main__":
    main()
