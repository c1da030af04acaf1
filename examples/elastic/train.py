r"""Train a small GPT with DeepSpeed on nodes that join, leave and die.

The loop is that of ../train_gpt.py, with fallback checkpoints, from which the job continues when it starts.

torchrun --nnodes=1:4 --nproc-per-node=1 --rdzv-backend=dynatrain --rdzv-endpoint=127.0.0.1:29400 \
    examples/elastic/train.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import ds_dynatrain

sys.path.append(str(Path(__file__).parents[1]))  # the model and the text are shared with the other examples
from gpt import GPT, Windows, texts

BATCH = 12
STEPS_BETWEEN = 20  # steps between two printed lines


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps (default 400)")
    parser.add_argument("--zero-stage", type=int, default=1, help="ZeRO stage (default 1)")
    parser.add_argument("--out", type=Path, default=Path("build/elastic"), help="a folder that all nodes see")
    return parser.parse_args()


def main() -> None:
    """Train until all steps are made, or until the file OUT/stop exists. Rank 0 writes a line for each step."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": args.zero_stage},
        "dynatrain": {
            "fallback": {"path": str(args.out / "fallback"), "every_steps": 20, "on_sigterm": True},
            "resume": {"path": str(args.out / "fallback")},
        },
    }
    torch.manual_seed(0)
    engine, optimizer, loader, scheduler = ds_dynatrain.initialize(
        model=GPT(), config=config, training_data=Windows(texts()[0], args.steps * BATCH)
    )
    for batch in loader:  # members join and leave here
        step = engine.global_steps
        x, y = (part.to(engine.device) for part in batch)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        if engine.global_steps == step:  # the global batch is not complete yet, or a death has discarded this step
            continue
        mean = engine.mean(loss, loader.samples)
        if engine.global_steps <= step:  # a death has undone this step in the meantime
            continue
        note(engine, args.out, step, mean)
        if engine.mean(float((args.out / "stop").exists()), 1) > 0:  # all members stop at the same step
            break


def note(engine: Any, out: Path, step: int, loss: torch.Tensor) -> None:
    """Write a line about a step on rank 0."""
    if engine.global_rank != 0:
        return
    line = {"time": time.time(), "step": step, "loss": loss.item(), "layout": str(engine.layout)}
    if step % STEPS_BETWEEN == 0:
        print(f"step {step}: loss {line['loss']:.3f}, {line['layout']}, {os.environ['WORLD_SIZE']} members", flush=True)
    with (out / "steps.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**line, "members": int(os.environ["WORLD_SIZE"])}) + "\n")


if __name__ == "__main__":
    main()
