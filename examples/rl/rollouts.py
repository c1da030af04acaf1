"""Rollouts: weights go out through a folder, and completions come back through a key-value store.

A rollout is divided into pieces of a few prompts. Processes take pieces by incrementing a counter, so a process that is
done first takes the next piece. A completion depends on the weights, the prompt and the piece's seed, but not on the
process that generates it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ds_dynatrain.weights import send
from ds_dynatrain.weights.receivers.version_folders import Folder, newest, read
from rl.picture import Timeline
from rl.policy import NUMBERS, Policy, answer

PROMPTS = 32  # prompts in a rollout
ANSWERS = 8  # answers to each prompt
PIECES = 16  # pieces of a rollout
SIZE = PROMPTS * ANSWERS
"""Number of completions in a rollout."""


def prompts_of(number: int) -> Tensor:
    """Return the prompts of a rollout, each repeated once per answer."""
    draws = torch.Generator().manual_seed(number)
    return torch.randint(NUMBERS, (PROMPTS,), generator=draws).repeat_interleave(ANSWERS)


class Rollouts:
    """One process's part in all rollouts. Make it on every process, before the engine.

    folder: a folder for weights that all processes share.
    """

    def __init__(self, folder: Path, timeline: Timeline) -> None:
        store, _, self.processes = next(rendezvous("env://"))  # torchrun's own store
        self.store: Store = PrefixStore("rollouts", store)
        self.weights, self.timeline = Folder(folder), timeline
        self.policy = Policy()
        self.held: Path | None = None

    # ---- on the ranks that train -------------------------------------------------------------------------------------

    def publish(self, engine: Any, number: int) -> None:
        """Send the weights, and let all processes start on the pieces of a rollout. Called on all working ranks."""
        with self.timeline.during("weights"):
            send(engine, self.weights)
        if engine.global_rank == 0:
            for piece in range(PIECES if number else 0):
                self.store.delete_key(f"{number - 1}/{piece}")  # all processes have read these completions
            self.store.add("published", 1)

    def read(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for all pieces of a rollout. Return prompts, completions and their log-probabilities."""
        with self.timeline.during("wait"):
            pieces = [json.loads(self.store.get(f"{number}/{piece}")) for piece in range(PIECES)]
        answers, chances = (torch.tensor([row for piece in pieces for row in piece[part]]) for part in (0, 1))
        return prompts_of(number), answers, chances

    # ---- on everyone who generates -----------------------------------------------------------------------------------

    def work(self) -> bool:
        """Generate a piece of the newest rollout. Return False if no piece is left."""
        number = self.store.add("published", 0) - 1
        if number < 0 or (piece := self.store.add(f"{number}/taken", 1) - 1) >= PIECES:
            return False
        self.generate(number, piece)
        return True

    def generate(self, number: int, piece: int) -> None:
        """Generate a piece of a rollout with the newest weights, and store the completions."""
        version = newest(self.weights.path)
        if version is not None and version != self.held:
            with self.timeline.during("weights"):
                self.policy.load_state_dict(read(version))
            self.held = version
        with self.timeline.during("generate"):
            found = answer(self.policy, prompts_of(number).chunk(PIECES)[piece], seed=number * PIECES + piece)
        self.store.set(f"{number}/{piece}", json.dumps([part.tolist() for part in found]))
