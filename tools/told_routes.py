"""Routers of AutoEP that are told how many tokens each expert gets, so that a measurement knows the skew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.moe.ep_router import TokenChoiceTopKRouter

from ds_dynatrain.adapters.versions.replaced import replaced


def zipf(experts: int, skew: float, seed: int) -> list[float]:
    """Shares of tokens that fall like 1 / rank ** skew, in an order by chance."""
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed)).tolist()
    weights = [1 / (1 + place) ** skew for place in order]
    return [weight / sum(weights) for weight in weights]


@contextmanager
def told(module: Any, shares: Sequence[Sequence[float]]) -> Iterator[None]:
    """In it every router sends these shares of its tokens to its experts, in each forward pass in another order.

    module: function that returns the model; a switch may give it other routers. shares: of each layer with experts.
    """
    whole = TokenChoiceTopKRouter.forward
    chance = torch.Generator().manual_seed(7)

    def forward(router: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        scores, chosen, counts = whole(router, x, bias)
        routers = [part for part in module().modules() if isinstance(part, TokenChoiceTopKRouter)]
        mine = shares[next(number for number, other in enumerate(routers) if other is router)]
        ends = torch.tensor(mine, dtype=torch.float64).cumsum(0)
        places = (torch.arange(chosen.numel()) + 0.5) / chosen.numel()
        experts = torch.searchsorted(ends, places.double()).clamp(max=len(mine) - 1)
        experts = experts[torch.randperm(len(experts), generator=chance)].view(chosen.shape).to(chosen)
        return scores, experts, torch.bincount(experts.flatten(), minlength=len(mine)).to(counts)

    with replaced(TokenChoiceTopKRouter, forward=forward):
        yield
