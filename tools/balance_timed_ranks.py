"""One rank of `bench_balance.py --timed`: a pipeline of two stages, whose layers burn processor time, is timed.

torchrun ... balance_timed_ranks.py FOLDER '{"seconds": [0.001, ...], "rounds": 40, "batch": 16, "micro_batch": 2}'

In each round there is a step without balance, one between windows and one in a window, so that what else the machine
does falls on all three alike. Then the boundaries become those that are proposed, and all is done again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import deepspeed
import torch
import torch.distributed as td
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass
from launch import Notes
from torch import nn
from workload import quiet

import ds_dynatrain
from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.balance.advice import Advice
from ds_dynatrain.balance.profile import Profile

WIDTH = 8
ROUND = ("off", "between", "window")


def burn(seconds: float) -> None:
    """Processor time of this thread."""
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


class Burn(torch.autograd.Function):
    """Hands a tensor on, and its gradient back, each after so many seconds of processor time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Burn, and copy."""
        ctx.seconds = seconds
        burn(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Burn twice as long."""
        burn(2 * ctx.seconds)
        return gradient, None


class Burning(nn.Module):
    """A small matrix, and the seconds of a large one for each micro-batch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.matrix, self._seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, WIDTH] to the same."""
        return Burn.apply(self.matrix(x), self._seconds)  # type: ignore[no-any-return, no-untyped-call]


class Points(torch.utils.data.Dataset[Any]):
    """Always the same."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(WIDTH), torch.zeros(WIDTH)


class Apart:
    """The processor time of a rank's passes, taken around DeepSpeed's instructions."""

    def __init__(self, engine: Any) -> None:
        self.seconds, known = 0.0, engine._INSTRUCTION_MAP
        self.passes = {**known, **{kind: self._timed(known[kind]) for kind in (ForwardPass, BackwardPass)}}

    def _timed(self, run: Callable[..., None]) -> Callable[..., None]:
        def call(engine: Any, **given: Any) -> None:
            begin = time.thread_time()
            run(engine, **given)
            self.seconds += time.thread_time() - begin

        return call


def steps_of(engine: Any, kind: str) -> float:
    """Seconds of one step of a kind."""
    balancer = engine._parts.balancer
    if kind == "window":
        balancer.note("timed now")
    engine._parts.balancer = None if kind == "off" else balancer
    begin = time.perf_counter()
    engine.train_batch()
    took = time.perf_counter() - begin
    engine._parts.balancer = balancer
    return took


def measure(engine: Any, rounds: int) -> tuple[dict[str, Any], Advice]:
    """What a rank says of a layout."""
    for _ in range(4):
        engine.train_batch()
    found: dict[str, list[float]] = {kind: [] for kind in ROUND}
    summed, busy = [], []
    place = engine.layout.coordinate(engine.rank)["pipe"]
    for _ in range(rounds):
        for kind in ROUND:
            found[kind].append(steps_of(engine, kind))
        summed.append(_stage(engine.balancer.profile, engine.balancer.advise().present.boundaries, place))
        apart = Apart(engine)
        with replaced(engine, "_INSTRUCTION_MAP", apart.passes):
            steps_of(engine, "off")
        busy.append(apart.seconds / engine.gradient_accumulation_steps())
    advice = engine.balancer.advise()
    said = {
        "boundaries": list(advice.present.boundaries),
        **{kind: median(each) for kind, each in found.items()},
        "summed": median(summed),
        "busy": median(busy),
        "predicted": advice.present_time.seconds,
    }
    return said, advice


def _stage(profile: Profile, boundaries: Sequence[int], place: int) -> float:
    layers = profile.layers[boundaries[place] : boundaries[place + 1]]
    return sum(layer.forward_seconds + layer.backward_seconds for layer in layers)


def main() -> None:
    """Measure in even boundaries, and in those that are proposed."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    notes, count = Notes(folder, td.get_rank()), len(wanted["seconds"])
    layers = [LayerSpec(Burning, each) for each in wanted["seconds"]]
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
