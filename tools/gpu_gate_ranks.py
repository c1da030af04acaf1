"""The step "gate" of `gpu_steps.py`: measures what the gate of elastic jobs adds to a step of a rank with its own card.

torchrun --nproc-per-node=2 gpu_gate_ranks.py FOLDER '{"device": "cuda", "size": "125M", "batch": 32, "rounds": 5}'

Rank 0 trains, by torch alone, with and without the gate. Rank 1 does not train, and only meets rank 0 at the gate.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as td
from launch import Notes

WARM_STEPS, STEPS = 5, 20
"""Steps that do not count, and steps in a row with or without the gate, repeated "rounds" times."""
LENGTH = 256


def meet(number: int = 0) -> None:
    """Wait for the other rank."""
    td.all_reduce(torch.zeros(1))


def made_step(device: str, size: str, batch: int) -> Callable[[bool], None]:
    """Return a function that makes one step, with the gate or without it."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if device == "lab":
        importlib.import_module("tests.device.accelerator").use()
    from workload import GPT, SIZES

    from ds_dynatrain.adapters.groups.device import compute_device
    from ds_dynatrain.adapters.groups.managed_process_group import Gate

    model = GPT(**SIZES[size]).to(compute_device(), torch.bfloat16)
    tokens = torch.randint(SIZES[size]["vocabulary"], (batch, LENGTH + 1)).to(compute_device())
    optimizer, gate = torch.optim.AdamW(model.parameters(), fused=device == "cuda"), Gate()

    def step(has_gate: bool) -> None:
        model(tokens).backward()
        gate.begin()
        if has_gate:
            gate.agree(meet)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure, and write the milliseconds of a step."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    td.init_process_group("gloo")
    rounds = wanted["rounds"]
    if td.get_rank() == 1:
        for _ in range(2 * STEPS * rounds):
            meet()
        return
    step, times = made_step(wanted["device"], wanted["size"], wanted["batch"]), {True: 0.0, False: 0.0}
    from ds_dynatrain.adapters.groups.device import synchronize

    for _ in range(WARM_STEPS):
        step(False)
    for _ in range(rounds):
        for has_gate in times:
            synchronize()
            begin = time.perf_counter()
            for _ in range(STEPS):
                step(has_gate)
            synchronize()
            times[has_gate] += time.perf_counter() - begin
    each = {has_gate: 1e3 * took / STEPS / rounds for has_gate, took in times.items()}
    Notes(folder, 0).write({"with": each[True], "without": each[False]})


if __name__ == "__main__":
    main()
