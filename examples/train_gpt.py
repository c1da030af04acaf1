"""Train a small GPT with DeepSpeed, at first on two of the processes, and change the layout during training.

torchrun --standalone --nproc-per-node=4 examples/train_gpt.py --schedule "20:data=4,zero_stage=3 40:data=3"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import ds_dynatrain
from curves import SWITCHES, Record, show
from gpt import GPT, Windows, texts

BATCH = 12


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="train on this file instead of Python's standard library")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default 60)")
    parser.add_argument("--data", type=int, default=2, help="ranks to start with (default 2), the others start idle")
    parser.add_argument("--zero-stage", type=int, default=1, help="ZeRO stage to start with (default 1)")
    parser.add_argument(
        "--schedule", type=schedule, default={}, help='changes by step: "20:data=4,zero_stage=3 40:data=3"'
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for losses (default build/demo)")
    return parser.parse_args()


def schedule(text: str) -> dict[int, dict[str, int]]:
    """Parse text such as "20:data=4,zero_stage=3 40:data=3". Return a map from step to the sizes to request."""
    changes = (entry.split(":") for entry in text.split())
    return {
        int(step): {name: int(size) for name, size in (part.split("=") for part in sizes.split(","))}
        for step, sizes in changes
    }


@torch.no_grad()
def held_out_loss(engine: Any, loader: Any) -> float:
    """Return the mean loss over the held-out text. Every rank evaluates its part of each batch."""
    total = torch.zeros(2)
    engine.eval()
    for batch in loader:
        x, y = (part.to(engine.device) for part in batch)
        total += torch.tensor([engine(x, y).item() * loader.samples, loader.samples])
    engine.train()
    return float(engine.mean(total[0] / total[1], int(total[1])))


def main() -> None:
    """Train for one pass over as many samples as the steps need."""
    args = arguments()
    train_text, held_out_text = texts(args.text)
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 10}},
        "zero_optimization": {"stage": args.zero_stage},
        "dynatrain": {"layout": {"data": args.data}, "report": {"jsonl": f"{args.out}/{SWITCHES}"}},
    }

    torch.manual_seed(0)
    engine, optimizer, loader, scheduler = ds_dynatrain.initialize(
        model=GPT(), config=config, training_data=Windows(train_text, args.steps * BATCH)
    )
    held_out = engine.loader(Windows(held_out_text, 4 * BATCH), evaluation=True)
    record = Record(engine, args.out, "switching" if args.schedule else "static", args.steps)

    for batch in loader:  # a requested switch takes effect here
        step = engine.global_steps
        if step in args.schedule:
            engine.switch(**args.schedule.pop(step))
        x, y = (part.to(engine.device) for part in batch)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()

        record.train(step, engine.mean(loss, loader.samples))
        if engine.global_steps % 10 == 0:
            record.held_out(engine.global_steps, held_out_loss(engine, held_out))

    record.close()
    if engine.global_rank == 0:
        show(args.out)


if __name__ == "__main__":
    main()
