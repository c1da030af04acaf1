"""Pipelines with experts in two of their layers, of `deepspeed.moe` or under AutoEP, as subjects of `axis_walks`."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynatrain.space import Layout
from tests.engine import oracle, pipelines
from tests.engine.axis_walks import Subject
from tests.engine.models import Block, Sequences, decay_groups

LOCAL = re.compile(r"(\d+)(.*deepspeed_experts\.)(\d+)(\..*)")
COUNTS = {"1": 4, "3": 8}
"""Experts of the two layers that have some, by the layer's number."""


def at(pipe: int, data: int, expert: int = 1, stage: int = 1) -> Layout:
    """A layout of pipelines of experts."""
    return Layout(pipe=pipe, data=data, expert=expert, zero_stage=stage)


def model(size: int = 1, index: int = 0, stages: int = 1) -> PipelineModule:
    """The layers of "routed", where each expert has values of its own; of an expert index, if experts are cut."""
    made = PipelineModule(pipelines.routed(size), num_stages=stages, loss_fn=pipelines.loss)
    for name, held in made.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, whole_name(name, size, index))))
        held.data = torch.randn(held.shape, generator=generator) * 0.2
    return made


def whole_name(name: str, size: int, index: int) -> str:
    """The name with the number of the expert in its whole layer."""
    found = LOCAL.fullmatch(name)
    if found is None:
        return name
    layer, path, number, rest = found.groups()
    return f"{layer}{path}{int(number) + index * COUNTS[layer] // size}{rest}"


def places(engine: Any) -> dict[str, oracle.Place]:
    """Where the parameters of this rank's experts lie in those of all."""
    size = engine.layout.expert
    index = engine.layout.coordinate(engine.rank)["data"] % size
    return {
        name: oracle.Place(whole_name(name, size, index), torch.arange(held.numel()), held.numel())
        for name, held in engine.module.named_parameters()
    }


def groups(made: nn.Module) -> list[dict[str, Any]]:
    """Two of the user's, from which DeepSpeed makes two of experts, too."""
    named = zip(("matrices", "vectors"), decay_groups(made), strict=True)
    return [{"name": name, **group} for name, group in named]


def one_step(engine: Any, batch: Any) -> float:
    """A global batch of one micro-batch."""
    return float(engine.train_batch(iter([batch])))


def subject() -> Subject:
    """Clipping bites."""
    return Subject(model, Sequences, places, {"gradient_clipping": 0.1}, one_step, groups=groups)


# ---- AutoEP ---------------------------------------------------------------------------------------------------------

WIDTH = 16
"""torch's grouped product wants a multiple of 16 bytes."""
AUTOEP = {"enabled": True, "preset_model": "mixtral", "moe_layer_pattern": r"\d+\.mlp", "top_k": 2}


class Mixture(nn.Module):
    """A norm and Mixtral's layer of experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        modeling = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
        shape = {"hidden_size": WIDTH, "intermediate_size": 24, "num_local_experts": experts}
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = modeling.MixtralSparseMoeBlock(modeling.MixtralConfig(**shape, num_experts_per_tok=2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        fed: torch.Tensor = self.mlp(self.norm(hidden))
        return hidden + fed


def mixture(stages: int = 1) -> PipelineModule:
    """Layers of 4 and 8 experts between others, the same on every rank; with three and four stages one has none."""
    layers = [
        TiedLayerSpec("words", pipelines.Words, WIDTH),
        LayerSpec(Mixture, COUNTS["1"]),
        LayerSpec(Block, WIDTH, 21, 0.0),
        LayerSpec(Mixture, COUNTS["3"]),
        LayerSpec(nn.LayerNorm, WIDTH),
        LayerSpec(Block, WIDTH, 21, 0.0),
        TiedLayerSpec("words", pipelines.Words, WIDTH, forward_fn=pipelines.logits),
    ]
    made = PipelineModule(layers, num_stages=stages, loss_fn=pipelines.loss, partition_method="uniform")
    for name, held in made.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        held.data = torch.randn(held.shape, generator=generator) * 0.2
    return made


def stacked(engine: Any) -> dict[str, oracle.Place]:
    """Where the stacks of this rank's experts lie in those of all."""
    size, found = engine.layout.expert, dict[str, oracle.Place]()
    index = engine.layout.coordinate(engine.rank)["data"] % size
    for name, held in engine.module.named_parameters():
        if name.endswith(("experts.w1", "experts.w2", "experts.w3")):
            layer = name.partition(".")[0]
            order = torch.arange(COUNTS[layer])
            if engine.layout.experts is not None:
                order = torch.tensor(engine.layout.experts[list(COUNTS).index(layer)]).flatten()
            mine, each = order.view(size, -1)[index], held.numel() * size // COUNTS[layer]
            places = (mine[:, None] * each + torch.arange(each)).flatten()
            found[name] = oracle.Place(name, places, size * held.numel())
    return found


def autoep(**block: Any) -> Subject:
    """Clipping bites; `block` is merged over what the user says of AutoEP."""
    settings = {"gradient_clipping": 0.1, "expert_parallel": {**AUTOEP, **block}}
    return Subject(mixture, Sequences, stacked, settings, one_step, groups=groups)


WALKS: dict[str, tuple[Layout, ...]] = {
    "every axis at once": (at(2, 2, 2), at(1, 4, 4), at(2, 1), at(1, 2, 2), at(2, 2), at(2, 2, 2)),
    "stages without experts": (at(4, 1), at(1, 4, 2), at(3, 1), at(2, 2, 2), at(4, 1)),
    "without ZeRO": (at(2, 2, 2, 0), at(1, 4, 4), at(3, 1, 1, 0), at(1, 4, 2, 0), at(2, 2, 1, 0), at(2, 2, 2)),
}
"""For experts of either kind; the table of transitions has the same changes, so the first one does for a short run."""
TITLES = [pytest.param(title, marks=pytest.mark.full) for title in WALKS]
