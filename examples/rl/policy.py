"""A policy with 27,000 parameters and a task: count from a digit up to 9, then output END.

The right answer to 5 is 6, 7, 8, 9, END. The reward is the fraction of the answer before the first mistake.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt import Block

NUMBERS = 10
END = NUMBERS
LONGEST = NUMBERS
"""Number of tokens in the longest answer."""


class Policy(nn.Module):
    """A transformer that returns the logits of each next token."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(NUMBERS + 1, width)
        self.place = nn.Embedding(1 + LONGEST, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUMBERS + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) of tokens to (batch, length, NUMBERS + 1)."""
        hidden = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def log_probabilities(logits: Tensor, answers: Tensor) -> Tensor:
    """Return (batch, LONGEST): the log-probability that the policy gives to each token of the answers."""
    return F.log_softmax(logits, dim=-1).gather(2, answers.unsqueeze(2)).squeeze(2)


@torch.no_grad()
def answer(policy: Policy, prompts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Sample an answer to each prompt. Return tokens and their log-probabilities, both (batch, LONGEST).

    The result depends only on weights, prompts and seed. Short answers are padded with END.
    """
    draws = torch.Generator().manual_seed(seed)
    tokens = prompts.unsqueeze(1)
    found = []
    is_over = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(LONGEST):
        chances = F.log_softmax(policy(tokens)[:, -1], dim=-1)
        drawn = torch.multinomial(chances.exp(), 1, generator=draws)
        drawn[is_over] = END
        found.append(chances.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
        is_over |= drawn.squeeze(1) == END
        if is_over.all():
            break
    missing = LONGEST - len(found)
    return F.pad(tokens[:, 1:], (0, missing), value=END), F.pad(torch.cat(found, dim=1), (0, missing))


def is_said(answers: Tensor) -> Tensor:
    """Return a mask of the tokens of each answer up to and including the first END."""
    return (answers == END).cumsum(1) - (answers == END).long() == 0


def rewards(prompts: Tensor, answers: Tensor) -> Tensor:
    """Return the fraction of each right answer before the first mistake, from 0 to 1."""
    right = (prompts.unsqueeze(1) + 1 + torch.arange(LONGEST)).clamp(max=END)
    length = NUMBERS - prompts
    before_mistake = (answers == right).long().cumprod(1).sum(1)
    return torch.minimum(before_mistake, length) / length
