"""Small models for pipelines, as lists of layers: tied embedding, layers of uneven sizes, functions, ready modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as td
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from tests.engine.models import WORDS, Block

WIDTH = 15


class Words(nn.Module):
    """Token embedding; a frozen table of places rides along with the tie, trained weights do not."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, width) * 0.1)
        self.places = nn.Parameter(torch.randn(width) * 0.1, requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.embedding(inputs, self.weight) + self.places


class Wide(nn.Module):
    """A layer much larger than the others, with a buffer that its constructor computes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)
        self.register_buffer("slope", torch.linspace(0.5, 1.5, width), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.slope.to(hidden.dtype) * self.down(torch.tanh(self.up(hidden)))


class Counted(nn.Module):
    """A norm that counts its forward passes in training and keeps a running mean."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(hidden.detach().float().mean((0, 1)), 0.5)
        normed: torch.Tensor = self.norm(hidden)
        return normed


class RoutedBlock(nn.Module):
    """A norm and native experts that drop no token."""

    def __init__(self, experts: int, k: int, size: int = 1, width: int = WIDTH) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(width, 19), nn.GELU(), nn.Linear(19, width))
        options = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.norm = nn.LayerNorm(width)
        self.feed = MoE(width, expert, experts, ep_size=size, k=k, **options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        fed: torch.Tensor = self.feed(self.norm(hidden))[0]
        return hidden + fed


class Pruned(nn.Module):
    """A layer that changes while it trains: a mask, the rows that are left, a buffer that comes later, a capacity.

    Its threshold is a plain attribute.
    """

    def __init__(self, width: int = WIDTH, hidden: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.register_buffer("mask", torch.ones(width))
        self.register_buffer("rows", torch.arange(hidden))
        self.capacity, self.threshold = width, 0.0

    def prune(self, step: int) -> None:
        """To what it is after so many steps."""
        self.mask = (torch.arange(len(self.mask)) % (step + 2) > 0).to(self.mask)
        self.rows = torch.arange(len(self.down.weight.t()))[step + 1 :]
        self.register_buffer("scale", torch.tensor(1.0 + 0.5 * step), persistent=False)
        self.capacity, self.threshold = len(self.mask) - step, 0.1 * step

    def get_extra_state(self) -> dict[str, int]:
        return {"capacity": self.capacity}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.capacity = state["capacity"]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = self.scale if "scale" in self._buffers else 1.0
        inner = torch.tanh(F.linear(hidden, self.up.weight[self.rows], self.up.bias[self.rows]))
        added = F.linear(inner, self.down.weight[:, self.rows], self.down.bias) * self.mask * scale
        return torch.cat((hidden[..., : self.capacity] + added[..., : self.capacity], hidden[..., self.capacity :]), -1)


def logits(words: Words, hidden: torch.Tensor) -> torch.Tensor:
    """The tied embedding as the last layer."""
    return hidden @ words.weight.t()


def double(hidden: torch.Tensor) -> torch.Tensor:
    """A layer that is a function."""
    return hidden * 2


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss of a micro-batch."""
    return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


def _tied() -> list[Any]:
    return [
        TiedLayerSpec("words", Words, WIDTH),
        *(LayerSpec(Block, WIDTH, 21, 0.0) for _ in range(4)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("words", Words, WIDTH, forward_fn=logits),
    ]


def _uneven() -> list[Any]:
    return [
        LayerSpec(Words, WIDTH),
        double,
        LayerSpec(Wide, WIDTH),
        Block(WIDTH, 21, 0.0),
        Counted(WIDTH),
        LayerSpec(Block, WIDTH, 9, 0.0),
        nn.Linear(WIDTH, WORDS),
    ]


def _inner_tie() -> list[Any]:
    """A tie of the second and the third quarter, and one of the first and the last."""
    return [
        TiedLayerSpec("words", Words, WIDTH),
        LayerSpec(Block, WIDTH, 21, 0.0),
        TiedLayerSpec("middle", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"]),
        LayerSpec(Block, WIDTH, 21, 0.0),
        TiedLayerSpec("middle", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"]),
        LayerSpec(Block, WIDTH, 9, 0.0),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("words", Words, WIDTH, forward_fn=logits),
    ]


def routed(size: int = 1) -> list[Any]:
    """Two layers of experts; with three and four stages there is one without any. size: of the expert axis."""
    return [
        TiedLayerSpec("words", Words, WIDTH),
        LayerSpec(RoutedBlock, 4, 1, size),
        LayerSpec(Block, WIDTH, 21, 0.0),
        LayerSpec(RoutedBlock, 8, 2, size),
        LayerSpec(nn.LayerNorm, WIDTH),
        LayerSpec(Block, WIDTH, 21, 0.0),
        TiedLayerSpec("words", Words, WIDTH, forward_fn=logits),
    ]


def _pruned() -> list[Any]:
    return [
        LayerSpec(Words, WIDTH),
        *(LayerSpec(Pruned) for _ in range(4)),
        nn.Linear(WIDTH, WORDS),
    ]


def _vectors() -> list[Any]:
    """Its inputs are numbers, which could require a gradient."""
    return [nn.Linear(WIDTH, WIDTH), *(LayerSpec(Block, WIDTH, 21, 0.0) for _ in range(5)), nn.Linear(WIDTH, WORDS)]


LAYERS: Mapping[str, Callable[[], list[Any]]] = {
    "tied": _tied,
    "uneven": _uneven,
    "inner tie": _inner_tie,
    "routed": routed,
    "pruned": _pruned,
    "vectors": _vectors,
}


def pipeline(name: str, stages: int = 1, seed: int = 7, **arguments: Any) -> PipelineModule:
    """One of `LAYERS` with the same weights on every rank, whatever the number of stages.

    The caller's random stream is left as it was.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = PipelineModule(LAYERS[name](), num_stages=stages, loss_fn=loss, **arguments)
        if stages > 1:  # DeepSpeed draws what it builds, and it builds what the stage has
            torch.manual_seed(seed)
            whole = PipelineModule(LAYERS[name](), num_stages=1, loss_fn=loss).state_dict()
            module.load_state_dict({key: whole[key] for key in module.state_dict()})
    return module


def buffer_bytes_taken(engine: Any, held: Collection[str]) -> int:
    """Of buffers that members of this place did not hold before, in all; a collective of all working ranks.

    held: the names of those that this member held.
    """
    mine = sum(buffer.nbytes for name, buffer in engine.module.named_buffers() if name not in held)
    everyone: list[int] = [0] * td.get_world_size()
    td.all_gather_object(everyone, mine)
    return sum(everyone)
