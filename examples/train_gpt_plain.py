"""Train a small GPT with plain DeepSpeed. `diff train_gpt_plain.py train_gpt.py` shows what live switches add.

torchrun --standalone --nproc-per-node=2 examples/train_gpt_plain.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch

from curves import Record
from gpt import GPT, Windows, texts

BATCH = 12


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="train on this file instead of Python's standard library")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default 60)")
    parser.add_argument("--zero-stage", type=int, default=1, help="ZeRO stage (default 1)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for losses (default build/demo)")
    return parser.parse_args()


@torch.no_grad()
def held_out_loss(engine: Any, loader: Any) -> float:
    """Return the mean loss over the held-out text. Every rank evaluates its part of each batch."""
    total = torch.zeros(2)
    engine.eval()
    for batch in loader:
        x, y = (part.to(engine.device) for part in batch)
        total += torch.tensor([engine(x, y).item() * len(x), len(x)])
    engine.train()
    return mean(total[0] / total[1], int(total[1]))


def mean(value: torch.Tensor, samples: int) -> float:
    """Return the mean of a value over all ranks, weighted by their numbers of samples."""
    total = torch.stack([value.detach() * samples, torch.full_like(value, samples)])
    deepspeed.comm.all_reduce(total)
    return float(total[0] / total[1])


def main() -> None:
    """Train for one pass over as many samples as the steps need."""
    args = arguments()
    train_text, held_out_text = texts(args.text)
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 10}},
        "zero_optimization": {"stage": args.zero_stage},
    }

    torch.manual_seed(0)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=GPT(), config=config, training_data=Windows(train_text, args.steps * BATCH)
    )
    held_out = engine.deepspeed_io(Windows(held_out_text, 4 * BATCH), route="eval")
    record = Record(engine, args.out, "plain", args.steps)

    for batch in loader:
        step = engine.global_steps
        x, y = (part.to(engine.device) for part in batch)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()

        record.train(step, mean(loss, len(x)))
        if engine.global_steps % 10 == 0:
            record.held_out(engine.global_steps, held_out_loss(engine, held_out))

    record.close()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
