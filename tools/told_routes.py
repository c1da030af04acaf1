"""Routers of AutoEP that are told how many tokens each expert gets, so that a measurement knows the skew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from torch import nn

from ds_dynatrain.adapters.versions.replaced import replaced


def zipf(experts: int, skew: float) -> list[float]:
    """Shares of tokens that fall like 1 / place ** skew: without a map, the heaviest experts are on one rank."""
    weights = [place**-skew for place in range(1, experts + 1)]
    return [weight / sum(weights) for weight in weights]


@contextmanager
def told(module: Callable[[], nn.Module], shares: Callable[[str], Sequence[float]]) -> Iterator[None]:
    """In it every router sends these shares of its tokens to its experts, in each forward pass in another order.

    module: function that returns the model; a switch may give it other routers. shares: of the router of this name.
    """
    whole = TokenChoiceTopKRouter.forward
    chance = torch.Generator().manual_seed(7)

    def forward(router: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        scores, chosen, counts = whole(router, x, bias)
        mine = shares(next(name for name, part in module().named_modules() if part is router))
        ends = torch.tensor(mine, dtype=torch.float64).cumsum(0)
        places = (torch.arange(chosen.numel()) + 0.5) / chosen.numel()
        experts = torch.searchsorted(ends, places.double()).clamp(max=len(mine) - 1)
        experts = experts[torch.randperm(len(experts), generator=chance)].view(chosen.shape).to(chosen)
        return scores, experts, torch.bincount(experts.flatten(), minlength=len(mine)).to(counts)

    with replaced(TokenChoiceTopKRouter, forward=forward):
        yield
