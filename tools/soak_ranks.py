"""One rank of `soak.py`: makes random switches, and records what this process holds after each.

torchrun ... soak_ranks.py FOLDER '{"switches": 100, "seed": 0, "dtype": "bf16"}'
"""

from __future__ import annotations

import gc
import json
import random
import sys
from typing import Any

import deepspeed
import memory
import torch
import torch.distributed as td
from launch import Notes
from torch.distributed import distributed_c10d as c10d
from workload import GPT, SIZES, Samples, config, quiet

import ds_dynatrain

BATCH, LENGTH = 12, 8
START = {"data": 2, "zero_stage": 1}


def layouts(count: int, seed: int, processes: int) -> list[dict[str, int]]:
    """Return random layouts, each different from the previous one."""
    chance, before, found = random.Random(seed), START, []
    for _ in range(count):
        after = before
        while after == before:
            after = {"data": chance.randint(1, processes), "zero_stage": chance.randint(0, 3)}
        found.append(after)
        before = after
    return found


def held() -> dict[str, int]:
    """Return the figures that must not grow."""
    gc.collect()
    return {
        "resident": memory.resident(),
        "threads": memory.threads(),
        "descriptors": memory.descriptors(),
        "groups": len(c10d._world.pg_map),
    }


def main() -> None:
    """Train, and switch."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    member, processes = td.get_rank(), td.get_world_size()
    notes, shape = Notes(folder, member), SIZES["tiny"]
    walk = layouts(wanted["switches"], wanted["seed"], processes)
    settings: dict[str, Any] = config(wanted["dtype"], START["zero_stage"], BATCH)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 1000
    settings["dynatrain"] = {"layout": START, "timeout_seconds": 60}
    torch.manual_seed(0)
    data = Samples(10**6, LENGTH, shape["vocabulary"])
    engine, *_ = ds_dynatrain.initialize(model=GPT(**shape), config=settings)
    loader = engine.loader(data, num_workers=0)

    def note(event: ds_dynatrain.SwitchEvent) -> None:
        notes.write({"switch": event.generation - 1, "pause_ms": event.pause_ms, "idle": engine.idle, **held()})

    engine.on_switch(note)
    for tokens in loader:
        before = engine.global_steps
        engine.backward(engine(tokens))
        engine.step()
        if engine.global_steps == before:
            continue
        last = engine.last_switch
        if last is not None and last.outcome != "committed":
            raise RuntimeError(f"switch {last.generation - 1} was rolled back: {last.reason}")
        if engine.generation > len(walk):
            break
        engine.switch(at=engine.global_steps, **walk[engine.generation - 1])


if __name__ == "__main__":
    main()
