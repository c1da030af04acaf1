"""The training job that all methods of changing a layout share: a GPT over bytes, its text, and the training steps."""

from __future__ import annotations

import hashlib
import sysconfig
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor, nn
from torch.nn import functional as F

from ds_dynatrain.comparison.job import AFTER, BATCH, BEFORE, LENGTH, SHAPES, Task
from ds_dynatrain.comparison.notes import Notes, Step

TEXT_BYTES = 400_000
LEARNING_RATE = 5e-4


class TransformerBlock(nn.Module):
    """A transformer block: causal attention, then a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        query, key, value = self.qkv(self.norm_attention(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        fed: Tensor = self.down(F.gelu(self.up(self.norm_feed(x))))
        return x + fed


class GPT(nn.Module):
    """A GPT over bytes, which computes the loss of predicting each next byte of a (batch, LENGTH + 1) tensor."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy over all predicted bytes."""
        x = self.byte(tokens[:, :-1]) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens[:, 1:].flatten())


def excerpts(count: int) -> list[tuple[Tensor, int]]:
    """Return excerpts from the source code of Python's standard library, as (LENGTH + 1 bytes, sample number)."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    held, stride = torch.frombuffer(text, dtype=torch.uint8), (len(text) - LENGTH - 1) // count
    return [(held[begin : begin + LENGTH + 1].long(), begin // stride) for begin in range(0, count * stride, stride)]


class Trainer:
    """Base class of the trainers. Each framework has its own trainer.

    done: number of optimizer steps taken.
    """

    done = 0

    def __init__(self, task: Task, notes: Notes) -> None:
        self.task, self.notes = task, notes
        self.samples = excerpts((BEFORE + AFTER + 1) * BATCH)

    def model_made(self) -> GPT:
        """Build the model of the task, with the same weights in every process, and record its number of parameters."""
        torch.manual_seed(0)
        model = GPT(*SHAPES[self.task.size])
        self.notes.parameters = sum(parameter.numel() for parameter in model.parameters())
        return model

    def train(self, tokens: Tensor) -> Tensor:
        """Train one micro-batch, and return its loss."""
        raise NotImplementedError

    def state(self) -> Iterable[Tensor]:
        """Yield every master and moment as a whole tensor. All working ranks must call this together."""
        raise NotImplementedError

    def save(self) -> None:
        """Save all state to the task's folder."""
        raise NotImplementedError

    def load(self) -> None:
        """Load the state that `save` wrote. The number of ranks may differ."""
        raise NotImplementedError

    def step(self) -> Any:
        """Train this rank's share of the next global batch."""
        each = BATCH // td.get_world_size()
        begin = self.done * BATCH + td.get_rank() * each
        numbers = list(range(begin, begin + each))
        self.noted(torch.stack([self.samples[number][0] for number in numbers]), numbers)

    def noted(self, tokens: Tensor, numbers: list[int]) -> None:
        """Train a micro-batch, and record its duration, loss and samples in the notes of the current step.

        numbers: the sample numbers of the micro-batch.
        """
        step, begin = self.notes.steps.setdefault(self.done + 1, Step()), time.monotonic()
        loss = self.train(tokens)
        step.seconds += time.monotonic() - begin
        step.losses.append(loss.item())
        step.samples += numbers

    def digest(self, when: str) -> None:
        """Record one digest of all state. The digest does not depend on how the state is sharded.

        when: the name under which to record it, "before" or "after" the change.
        """
        found = hashlib.sha256()
        for value in self.state():
            found.update(value.detach().contiguous().numpy().data)
        self.notes.digests[when] = found.hexdigest()


def restarted(task: Task, notes: Notes, kind: Callable[[Task, Notes], Trainer]) -> None:
    """Run one of the two jobs of a change with a restart: the old one saves and ends, the new one loads and continues.

    kind: function that makes the trainer.
    """
    if task.part == "old":
        trainer = kind(task, notes)
        for _ in range(BEFORE):
            trainer.step()
        trainer.digest("before")
        notes.begin()
        with notes.phase("save"):
            trainer.save()
        notes.stamp("saved")
        notes.memory()
        return
    with notes.phase("initialize"):
        trainer = kind(task, notes)
    with notes.phase("load"):
        trainer.load()
    go_on(trainer, trainer.step)


def go_on(trainer: Trainer, first: Callable[[], Any]) -> None:
    """Continue training after the change, and take the measurements of the first step.

    first: function that trains the first step, or the first micro-batch of it.
    """
    notes = trainer.notes
    notes.stamp("ready")
    notes.resumed = trainer.done
    notes.memory()
    if not trainer.task.way.is_late:
        trainer.digest("after")
    with notes.first_step():
        first()
        while trainer.done == notes.resumed and trainer.step():
            pass
    while trainer.done < BEFORE + AFTER:
        trainer.step()


def config(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration: bf16, and torch's AdamW, because DeepSpeed's own AdamW needs a compiler.

    stage: the ZeRO stage.
    """
    return {
        "train_batch_size": BATCH,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000},
    }
