"""One rank of `bench_step.py`: a plain DeepSpeed engine and one of ds_dynatrain, with a step of each in turn.

torchrun ... step_ranks.py FOLDER '{"size": "30M", "dtype": "bf16", "stage": 1, "steps": 40, "batch": 4, "length": 32}'
"""

from __future__ import annotations

import json
import sys

import deepspeed
import torch
import torch.distributed as td
from launch import Notes
from workload import GPT, SIZES, Samples, Trainer, config, quiet

import ds_dynatrain

WARM_UP = 4


def main() -> None:
    """Train both, and record the seconds of each step."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    notes, shape, world = Notes(folder, td.get_rank()), SIZES[wanted["size"]], td.get_world_size()
    data = Samples(10**6, wanted["length"], shape["vocabulary"])
    settings = config(wanted["dtype"], wanted["stage"], wanted["batch"])
    trainers = {}
    for form in ("plain", "dynatrain"):
        torch.manual_seed(0)
        if form == "dynatrain":
            settings = {**settings, "dynatrain": {"layout": {"data": world, "zero_stage": wanted["stage"]}}}
        start = deepspeed.initialize if form == "plain" else ds_dynatrain.initialize
        engine, *_ = start(config=settings, model=GPT(**shape))
        make = engine.deepspeed_io if form == "plain" else engine.loader
        workers = {"num_local_io_workers" if form == "plain" else "num_workers": 0}
        trainers[form] = Trainer(engine, make(data, **workers))
    for number in range(WARM_UP + wanted["steps"]):
        order = ("plain", "dynatrain") if number % 2 else ("dynatrain", "plain")
        times = {form: trainers[form].step() for form in order}
        if number >= WARM_UP:
            notes.write(times)


if __name__ == "__main__":
    main()
