"""One rank of `bench_late.py`: makes changes, and records the event of each and the duration of its first step."""

from __future__ import annotations

import json
import sys
import time

import deepspeed
import torch.distributed as td
from launch import Notes
from variants import gpt_step, model_of
from workload import SIZES, Samples, config, quiet

import ds_dynatrain

BATCH, CALM_STEPS = 12, 2


def main() -> None:
    """Train, and make the changes of the walk."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    notes, shape = Notes(folder, td.get_rank()), SIZES[wanted["size"]]
    settings = config(wanted["dtype"], wanted["start"]["zero_stage"], BATCH)
    settings["dynatrain"] = {"layout": wanted["start"], "timeout_seconds": 120}
    data, model = Samples(10**6, wanted["length"], shape["vocabulary"]), model_of(None, shape)
    engine, *_ = ds_dynatrain.initialize(model=model, config=settings)
    batches = iter(engine.loader(data, num_workers=0))
    walk, events = wanted["walk"], list[ds_dynatrain.SwitchEvent]()
    engine.on_switch(events.append)
    pending, calm = None, 0
    while True:
        begin = time.perf_counter()
        gpt_step(engine, batches)
        if events:
            step_ms = 1e3 * (time.perf_counter() - begin)
            event = events[-1]  # the event before it may be the switch by which this member went idle
            events.clear()
            notes.write({**walk[event.generation - 2], "event": json.loads(event.to_json()), "step_ms": step_ms})
            calm = 0
        calm += 1
        if engine.global_steps < 2 or (pending is not None and not pending.done) or calm < CALM_STEPS:
            continue
        done = engine.generation - 1
        if done == len(walk):
            break
        pending = engine.switch(late=walk[done]["late"], **walk[done]["target"])


if __name__ == "__main__":
    main()
