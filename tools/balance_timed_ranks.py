"""One rank of `bench_balance.py --timed`: times a pipeline of two stages whose layers use processor time.

torchrun ... balance_timed_ranks.py FOLDER '{"seconds": [0.001, ...], "rounds": 40, "batch": 16, "micro_batch": 2}'

Each round has a step without balance, a step between windows and a step in a window, so that other load on the machine
affects all three alike. Then the proposed boundaries are applied, and everything is repeated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import deepspeed
import torch.distributed as td
from burning import Burning, Points, busy
from deepspeed.pipe import LayerSpec, PipelineModule
from launch import Notes
from torch import nn
from workload import quiet

import ds_dynatrain
from ds_dynatrain.balance.advice import Advice
from ds_dynatrain.balance.profile import Profile

ROUND = ("off", "between", "window")


def steps_of(engine: Any, kind: str) -> float:
    """Train one step of this kind, and return its seconds."""
    balance, balancer = engine._parts.extension("balance"), engine.balancer
    if kind == "window":
        balancer.note("timed now")
    balance.balancer = None if kind == "off" else balancer
    begin = time.perf_counter()
    engine.train_batch()
    took = time.perf_counter() - begin
    balance.balancer = balancer
    return took


def measure(engine: Any, rounds: int) -> tuple[dict[str, Any], Advice]:
    """Return this rank's measurements in the current layout, and the balancer's advice."""
    for _ in range(4):
        engine.train_batch()
    found: dict[str, list[float]] = {kind: [] for kind in ROUND}
    summed, stages = [], []
    place = engine.layout.coordinate(engine.rank)["pipe"]
    for _ in range(rounds):
        for kind in ROUND:
            found[kind].append(steps_of(engine, kind))
        summed.append(_stage(engine.balancer.profile, engine.balancer.advise().present.boundaries, place))
        with busy(engine) as apart:
            steps_of(engine, "off")
        stages.append(apart[0] / engine.gradient_accumulation_steps())
    advice = engine.balancer.advise()
    said = {
        "boundaries": list(advice.present.boundaries),
        **{kind: median(each) for kind, each in found.items()},
        "summed": median(summed),
        "busy": median(stages),
        "predicted": advice.present_time.seconds,
    }
    return said, advice


def _stage(profile: Profile, boundaries: Sequence[int], place: int) -> float:
    layers = profile.layers[boundaries[place] : boundaries[place + 1]]
    return sum(layer.forward_seconds + layer.backward_seconds for layer in layers)


def main() -> None:
    """Measure with even boundaries, and with those that the balancer proposes."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    notes, count = Notes(folder, td.get_rank()), len(wanted["seconds"])
    layers = [LayerSpec(Burning, each, 2 * each) for each in wanted["seconds"]]
    model = PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss())
    layout = {"data": 1, "pipe": 2, "zero_stage": 1, "boundaries": [0, count // 2, count]}
    config = {
        "train_batch_size": wanted["batch"],
        "train_micro_batch_size_per_gpu": wanted["micro_batch"],
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "dynatrain": {"layout": layout, "timeout_seconds": 120, "balance": {"every_steps": 10**6}},
    }
    engine, *_ = ds_dynatrain.initialize(model=model, config=config, training_data=Points())
    said, advice = measure(engine, wanted["rounds"])
    notes.write(said)
    if advice.proposed != advice.present:
        engine.switch(advice.proposed, at=engine.global_steps)
        notes.write(measure(engine, wanted["rounds"])[0])


if __name__ == "__main__":
    main()
