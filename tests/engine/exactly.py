"""Exact jobs on ranks: what every step of one had in bits, and the settings that they are tried with."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from tests.engine import jobs, oracle
from tests.engine.models import LENGTH, WORDS, SmallGPT, decay_groups, small_gpt

STEPS = 6
LEAVES = 7
NOT_ON_DEVICE = pytest.mark.not_on_device("exact jobs are refused there: its kernels' bits were not measured")
Place = tuple[int, int]
"""(step, leaf)."""


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences, some words of which are drawn when they are read, by all three generators of a process."""

    def __init__(self, length: int = 31) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = (torch.arange(LENGTH) * (index + 3) + index) % WORDS
        inputs[int(torch.randint(LENGTH, ()))] = int(np.random.randint(WORDS))
        inputs[random.randrange(LENGTH)] = random.randrange(WORDS)
        return inputs, (inputs * 5 + torch.roll(inputs, 1)) % WORDS


def settings(start: jobs.Sizes, **more: Any) -> dict[str, Any]:
    """An exact job of seven leaves, the last one smaller; `more` is merged over it at the top."""
    block = {**jobs.config(start=start)["dynatrain"], "exact": True, **more.pop("dynatrain", {})}
    sizes = {"train_batch_size": 13, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.4}
    return jobs.config(start=start, **{**sizes, **more}, dynatrain=block)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups: matrices decay, vectors do not, one vector has a learning rate of its own."""
    first, second = decay_groups(model)
    own = second["params"].pop()  # type: ignore[attr-defined]
    return [first, second, {"params": [own], "lr": 5e-4, "weight_decay": 0.3}]


@dataclass
class Bits:
    """losses: (step, leaf) -> loss, of this rank; norms: by step. state: of the end, the same on all that worked.

    scales: by step the loss scale after it, and how many steps were skipped until then.
    """

    losses: dict[Place, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    scales: dict[int, tuple[float, int]] = field(default_factory=dict)
    state: oracle.State | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def run(
    start: jobs.Sizes,
    steps: int = STEPS,
    schedule: jobs.Schedule | None = None,
    each: Callable[[Any, Bits], None] | None = None,
    tokens: bool = False,
    torch_style: bool = False,
    width: int = 15,
    data: Any = None,
    workers: int = 0,
    seed: int = 5,
    load: str | None = None,
    save: str | None = None,
    model: Callable[[], nn.Module] | None = None,
    exploding: Collection[Place] = (),
    **more: Any,
) -> Bits:
    """Train an exact job with dropout, clipping and three groups; over several passes, each with a short last batch.

    exploding: leaves whose gradients are not finite.
    """
    torch.manual_seed(seed)
    bits, schedule = Bits(), dict(schedule or {})
    made = small_gpt(dropout=0.2, width=width) if model is None else model()
    with jobs.job(settings(start, **more), made, model_parameters=groups_of(made)) as job:
        engine = job.engine
        loader = engine.loader(Noisy() if data is None else data, num_workers=workers, name="noisy")
        if load is not None and not engine.idle:
            engine.load(load)
        while engine.idle or engine.global_steps < steps:
            for batch in loader:
                _train_leaf(engine, batch, bits, tokens, torch_style, exploding)
                if engine.micro_steps % engine.gradient_accumulation_steps():
                    continue
                bits.norms[engine.global_steps - 1] = float(engine.get_global_grad_norm())
                bits.scales[engine.global_steps - 1] = (float(engine.optimizer.loss_scale), engine.skipped_steps)
                if each is not None:
                    each(engine, bits)
                if engine.global_steps in schedule:
                    jobs.ask(engine, schedule.pop(engine.global_steps))
                if engine.global_steps >= steps:
                    if save is not None:  # in the pass, which the other job goes on with
                        engine.save(save)
                    break
        bits.state = oracle.gather(engine)
    return bits


def _train_leaf(
    engine: Any, batch: Any, bits: Bits, tokens: bool, torch_style: bool, exploding: Collection[Place]
) -> None:
    step = engine._host.micro_step
    leaf = engine.data_rank if step is None else step.number * engine.layout.data + engine.data_rank
    torch.rand(leaf % 3), np.random.rand(), random.random()  # whatever else draws makes no difference to the next one
    place, borrowed = (engine.global_steps, leaf), engine.slot_is_borrowed
    loss = engine(*batch)
    if place in exploding:
        loss = loss * (3e4 if engine.fp16_enabled() else float("inf"))  # a few elements overflow in fp16
    if torch_style:
        (engine.scale(loss) if engine.fp16_enabled() else loss).backward()
    else:
        engine.backward(loss, tokens=batch[0].numel() + leaf) if tokens else engine.backward(loss)
    if not borrowed:
        bits.losses[place] = float(loss.detach())
    engine.step()


def together(ranks: list[Bits | None]) -> Bits:
    """What all ranks have seen, as one; AssertionError where two of them disagree."""
    found = Bits()
    for bits in ranks:
        for name in ("losses", "norms", "scales"):
            for key, value in getattr(bits, name).items() if bits is not None else ():
                assert getattr(found, name).setdefault(key, value) == value, (name, key)
        found.state = found.state or (bits.state if bits is not None else None)
    return found


def differences(one: Bits, other: Bits) -> list[str]:
    """What differs between two runs, in words: nothing at all is what an exact job is for."""
    found = []
    for name in ("losses", "norms", "scales"):
        mine, theirs = getattr(one, name), getattr(other, name)
        places = sorted(mine.keys() | theirs.keys() if name == "losses" else mine.keys() & theirs.keys())
        differ = [place for place in places if mine.get(place) != theirs.get(place)]
        if differ:
            first = differ[0]
            found.append(
                f"{name}: {len(differ)} of {len(places)}, first {first}: {mine.get(first)}, {theirs.get(first)}"
            )
    assert one.state is not None and other.state is not None
    return found + oracle.differences(one.state, other.state)


class Sparing(SmallGPT):
    """Leaves its second block out of some leaves, by a draw."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As the model's, of one block or two."""
        blocks = self.blocks
        self.blocks = blocks if torch.rand(()) < 0.5 else blocks[:1]
        try:
            return super().forward(inputs, targets)
        finally:
            self.blocks = blocks


def sparing() -> nn.Module:
    """The same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Sparing(dropout=0.2)


class Reentrant(SmallGPT):
    """Its second block is its first one again, each time under checkpointing that runs backward passes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:1]

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch."""
        hidden = self.words(inputs) + self.places
        for _ in range(2):
            hidden = checkpoint(self.blocks[0], hidden, use_reentrant=True)
        logits = self.out(self.last_norm(hidden) * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RootMeanSquare(nn.Module):
    """A norm that uses its input twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As Llama's."""
        return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6))


def with_several_uses() -> nn.Module:
    """Blocks whose norm and whose residual connection add up to three uses of one tensor; the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = SmallGPT(dropout=0.2)
        for block in model.blocks:
            block.norm = RootMeanSquare(block.norm.weight.numel())
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Of a loop of one's own."""
    return torch.zeros(2, LENGTH, dtype=torch.int64), torch.zeros(2, LENGTH, dtype=torch.int64)
