"""Exact jobs of pipelines on ranks: what every step had in bits, as `exactly` has it of jobs without stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynatrain.space import Layout
from tests.engine import exactly, jobs, oracle
from tests.engine.exactly import STEPS, Bits, Noisy
from tests.engine.models import WORDS, Block
from tests.engine.pipelines import WIDTH, Words, logits, loss

LEAVES = 7
SAMPLES = 2 * LEAVES


def seed(number: int) -> None:
    """What `seed_layers` seeds by: one of several generators."""
    torch.manual_seed(number)


class RootMean(nn.Module):
    """As Llama's norm and the connection around it: its input is used three times. What it gives is not contiguous."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.up, self.drop = nn.Linear(width, width), nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.tensor(0.5))  # autograd saves it

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        self.calls += self.training
        normed = self.weight * self.scale * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5))
        turned = self.drop(torch.tanh(self.up(normed))).transpose(1, 2).contiguous()
        return hidden.transpose(1, 2).add(turned).transpose(1, 2)


def layers(dropout: float = 0.2) -> list[Any]:
    """Nine layers with a tie of the first and the last one, and one of three layers in the middle."""
    middle = ("middle", nn.Linear, WIDTH, WIDTH)
    ties = [TiedLayerSpec(*middle, tied_weight_attr=["weight", "bias"]) for _ in range(3)]
    return [
        TiedLayerSpec("words", Words, WIDTH),
        LayerSpec(Block, WIDTH, 21, dropout),
        ties[0],
        nn.Dropout(dropout),
        ties[1],
        LayerSpec(RootMean, WIDTH, dropout),
        ties[2],
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("words", Words, WIDTH, forward_fn=logits),
    ]


def half_frozen() -> PipelineModule:
    """Six layers without a tie, of which the first three are frozen: on some stages nothing goes backward."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        blocks = [LayerSpec(Block, WIDTH, 21, 0.2) for _ in range(4)]
        made = PipelineModule(
            [LayerSpec(Words, WIDTH), *blocks, nn.Linear(WIDTH, WORDS)],
            num_stages=1,
            loss_fn=loss,
            partition_method="uniform",
        )
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(int(name.partition(".")[0]) > 2)
    return made


def model(dropout: float = 0.2, stages: int = 1, **arguments: Any) -> PipelineModule:
    """The same on every rank, or the layers of its stage."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        made = PipelineModule(layers(dropout), num_stages=1, loss_fn=loss, **arguments)
        if stages == 1:
            return made
        whole, staged = made.state_dict(), PipelineModule(layers(dropout), num_stages=stages, loss_fn=loss, **arguments)
        staged.load_state_dict({key: whole[key] for key in staged.state_dict()})
        return staged


def settings(start: Layout, **more: Any) -> dict[str, Any]:
    """Seven leaves of one size."""
    sizes = {"train_batch_size": SAMPLES, "dataloader_drop_last": True}
    made = exactly.settings((start.data, start.zero_stage), **{**sizes, **more})
    made["zero_optimization"] = {**more.get("zero_optimization", {}), "stage": start.zero_stage}
    return {**made, "dynatrain": {**made["dynatrain"], "layout": start.to_dict()}}


def run(
    start: Layout,
    steps: int = STEPS,
    schedule: Mapping[int, Layout] | None = None,
    each: Callable[[Any, Bits], None] | None = None,
    dropout: float = 0.2,
    load: str | None = None,
    save: str | None = None,
    stages: int = 1,
    groups: Callable[[nn.Module], Any] = exactly.groups_of,
    make: Callable[[], PipelineModule] | None = None,
    arguments: Mapping[str, Any] | None = None,
    **more: Any,
) -> Bits:
    """Train an exact job of a pipeline. Notes: the losses that `train_batch` gave, by step."""
    torch.manual_seed(5)
    bits, schedule = Bits(), dict(schedule or {})
    made = model(dropout, stages, **(arguments or {})) if make is None else make()
    with jobs.job(settings(start, **more), made, model_parameters=groups(made)) as job:
        engine = job.engine
        engine.set_dataiterator(engine.loader(Noisy(), num_workers=0, name="noisy"))
        if load is not None and not engine.idle:
            engine.load(load)
        while engine.idle or engine.global_steps < steps:
            _train(engine, bits)
            if each is not None:
                each(engine, bits)
            if engine.global_steps in schedule:
                engine.switch(schedule.pop(engine.global_steps), at=engine.global_steps)
        bits.notes["calls"] = sum(int(held) for name, held in engine.module.named_buffers() if name.endswith("calls"))
        bits.state = oracle.gather(engine)
        if save is not None:
            engine.save(save)
    return bits


def _train(engine: Any, bits: Bits) -> None:
    mean = engine.train_batch()
    step = engine.global_steps - 1
    bits.norms[step] = float(engine.get_global_grad_norm())
    bits.losses[step, -1] = float(mean)
    if engine.is_last_stage():
        for micro_step, leaf_loss in enumerate(engine.fwd_outputs):
            leaf = micro_step * engine.layout.data + engine.data_rank
            if leaf < LEAVES:
                bits.losses[step, leaf] = float(leaf_loss)
