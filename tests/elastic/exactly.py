"""`doing.py` in an exact job: dropout, draws as samples are read, three groups; and what each step had in bits.

A step's line has the norm of its gradients, too, and of each tensor and state kind that this rank holds a part of how
many elements that is, and a sum over them that follows from where they lie and from all of their bits.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from tests.elastic import faulted
from tests.elastic.doing import Doing
from tests.elastic.training import KIND, SETTINGS, Numbered
from tests.engine import exact_pipelines, exactly, oracle
from tests.engine.models import LENGTH, WORDS, small_gpt


class Noisy(Numbered):
    """Two words of each sample are drawn when it is read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(inputs, targets, its number)."""
        inputs, targets, number = super().__getitem__(index)
        inputs = inputs.clone()
        inputs[int(torch.randint(LENGTH, ()))] = int(np.random.randint(WORDS))
        inputs[random.randrange(LENGTH)] = random.randrange(WORDS)
        return inputs, targets, number


class Exactly(Doing):
    """See the module."""

    def model(self) -> tuple[torch.nn.Module, Any]:
        """The seed is that of the job, where this process begins one."""
        torch.manual_seed(int(os.environ.get("SEED", "5")))
        model = exact_pipelines.model() if KIND == "pipeline" else small_gpt(dropout=0.2)
        return model, exactly.groups_of(model)

    def samples(self) -> torch.utils.data.Dataset[Any]:
        """96: the last batch of a pass is short, where it may be."""
        return exactly.Noisy(96) if KIND == "pipeline" else Noisy()

    def say(self, **what: Any) -> None:
        """What a step has, beside its losses."""
        if what.get("event") == "step":
            what |= {"rank": self.engine.rank, "size": int(os.environ["WORLD_SIZE"])}
            what |= {"norm": float(self.engine.get_global_grad_norm()), "held": held(self.engine)}
        super().say(**what)


def held(engine: Any) -> dict[str, tuple[int, int]]:
    """Tensor and kind -> (elements, sum modulo 2^64 over them), of this rank."""
    found: dict[str, tuple[int, int]] = {}
    for view in oracle._views(engine):
        bits = oracle._bits(view.flat.detach()).numpy().astype(np.uint64)
        at = np.arange(view.start, view.start + len(bits), dtype=np.uint64)
        mixed = (bits + np.uint64(1)) * (at * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03))
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        count, total = found.get(key := " ".join(view.key), (0, 0))
        found[key] = count + len(bits), (total + int(mixed.sum(dtype=np.uint64))) % (1 << 64)
    return found


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in `training.py`
    if "fp16" in SETTINGS:
        get_accelerator().is_fp16_supported = lambda: True
    if "FAULT" in os.environ:
        faulted.install(os.environ["FAULT"])
    Exactly().run()
    sys.exit(0)
