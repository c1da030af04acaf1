"""The training script of `training.py` without this library: plain DeepSpeed, with its own checkpoints.

Started by agents of stock torchrun, with $OUT as folder for its lines and for the checkpoints, and $WANTED:
'{"stage": 1, "every": 10.0, "step_seconds": 0.3}'

A checkpoint of as many ranks is loaded as it is; one of another number is converted to DeepSpeed's universal format
before, by rank 0 and in its process, which saves it from importing DeepSpeed once more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as td
from deepspeed.checkpoint import ds_to_universal

from tests.elastic.kinds import settings
from tests.engine.models import Sequences, decay_groups, small_gpt

OUT = Path(os.environ["OUT"])
SAVED = OUT / "saved"
BATCH = 12


def agreed(value: float) -> float:
    """Rank 0's."""
    number = torch.tensor([value], dtype=torch.float64)
    td.broadcast(number, 0)
    return float(number)


def newest() -> tuple[str, int]:
    """(tag, ranks) of the newest checkpoint that is whole; none is ("", 0)."""
    file = SAVED / "newest.json"
    return tuple(json.loads(file.read_text())) if file.exists() else ("", 0)


def convert(tag: str) -> str:
    """To the universal format; the tag of that."""
    universal = f"{tag}-universal"
    if not (SAVED / universal / "zero").exists():
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(SAVED / tag),
                output_folder=str(SAVED / universal),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    return universal


class Trainer:
    """The same model, samples and steps as `tests/elastic/training.py` has."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        self.rank, self.size, self.wanted = td.get_rank(), td.get_world_size(), wanted
        tag, ranks = newest() if self.rank == 0 else ("", 0)
        is_other = bool(agreed(float(bool(tag) and ranks != self.size)))
        if self.rank == 0 and is_other:
            tag = convert(tag)
        found = [tag]
        td.broadcast_object_list(found, 0)
        given = settings(wanted["stage"], {"checkpoint": {"load_universal": is_other}})
        del given["dynatrain"]
        given["train_micro_batch_size_per_gpu"] = BATCH // self.size
        model = small_gpt(width=15)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=decay_groups(model), config=given)
        if found[0]:
            self.engine.load_checkpoint(str(SAVED), tag=found[0])
        self.generation = int(agreed(1e3 * time.time()))
        self.saved_at, self.data = time.monotonic(), Sequences()

    def run(self) -> None:
        """Until `$OUT/stop` is there."""
        with (OUT / f"{os.getpid()}.jsonl").open("a", buffering=1) as lines:
            while not agreed((OUT / "stop").exists()):
                step = int(self.engine.global_steps)
                self.step(step)
                line = {"event": "step", "generation": self.generation, "rank": self.rank, "size": self.size}
                line |= {"pid": os.getpid(), "step": step, "time": time.monotonic()}
                lines.write(json.dumps(line) + "\n")
                time.sleep(self.wanted["step_seconds"])
                if agreed(time.monotonic() - self.saved_at > self.wanted["every"]):
                    self.save(f"step{step + 1}")

    def step(self, step: int) -> None:
        """One optimizer step."""
        share = BATCH // self.size
        first = step * BATCH + self.rank * share
        samples = [self.data[(first + place) % len(self.data)] for place in range(share)]
        inputs, targets = (torch.stack(each) for each in zip(*samples, strict=True))
        self.engine.backward(self.engine(inputs, targets))
        self.engine.step()

    def save(self, tag: str) -> None:
        """The checkpoint before this one stays until this one is whole."""
        before = newest()[0]
        self.engine.save_checkpoint(str(SAVED), tag=tag)
        td.barrier()
        if self.rank == 0:
            (SAVED / "new").write_text(json.dumps([tag, self.size]))
            (SAVED / "new").rename(SAVED / "newest.json")
            for gone in (before, f"{before}-universal") if before else ():
                shutil.rmtree(SAVED / gone, ignore_errors=True)
        self.saved_at = time.monotonic()


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nobody has to wait for a compiler
    Trainer(json.loads(os.environ["WANTED"])).run()
    td.destroy_process_group()
