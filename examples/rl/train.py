"""GRPO with one pool of processes: all of them train, and during a rollout one keeps the state while the others
generate.

torchrun --standalone --nproc-per-node=4 examples/rl/train.py --keep
torchrun --standalone --nproc-per-node=4 examples/rl/train.py

The first run, for comparison, keeps its size: each rank generates its share of each rollout, and keeps its part of the
state meanwhile. Both runs write into OUT, and the plot OUT/rl.png shows all runs in that folder.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ds_dynatrain

sys.path.append(str(Path(__file__).parents[1]))  # the model's blocks are shared with the other examples
from rl.picture import REWARDS, SWITCHES, Timeline, show, write
from rl.policy import LONGEST, Policy, is_said, log_probabilities, rewards
from rl.rollouts import ANSWERS, PIECES, SIZE, Rollouts

UPDATES = 2  # optimizer steps per rollout
CLIP = 0.2


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=40, help="rollouts (default 40)")
    parser.add_argument("--keep", action="store_true", help="keep the trainer's size")
    parser.add_argument("--trainers", type=int, default=1, help="ranks that keep the state in a rollout (default 1)")
    parser.add_argument("--zero-stage", type=int, default=1, help="ZeRO stage (default 1)")
    parser.add_argument("--out", type=Path, default=Path("build/rl"), help="folder for all files (default build/rl)")
    return parser.parse_args()


def generate(engine: Any, rollouts: Rollouts, number: int) -> None:
    """Generate a rollout on all processes, after which all of them train. Called on the processes that hold the state.

    The switch is requested first, so that it is prepared while completions are generated.
    """
    with rollouts.timeline.during("switch"):
        engine.switch(data=rollouts.processes, at=engine.global_steps)
    rollouts.publish(engine, number)
    while rollouts.work():
        pass
    rollouts.read(number)
    with rollouts.timeline.during("switch"):
        engine.boundary()


def generate_in_lockstep(engine: Any, rollouts: Rollouts, number: int) -> None:
    """Generate this rank's share of a rollout. Called on all ranks of a trainer that keeps its size."""
    rollouts.publish(engine, number)
    for piece in range(engine.data_rank, PIECES, engine.layout.data):
        rollouts.generate(number, piece)


def update(engine: Any, prompts: Tensor, answers: Tensor, before: Tensor) -> float:
    """Train the completions of a rollout in `UPDATES` optimizer steps. Return their mean reward."""
    scores = rewards(prompts, answers).view(-1, ANSWERS)
    gains = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(engine.global_steps))
    for rows in order.chunk(UPDATES):
        engine.boundary()
        for slot in engine.batch.deal(len(rows)).rank(engine.data_rank):
            mine = rows[list(slot.positions)]
            logits = engine(torch.cat([prompts[mine, None], answers[mine, :-1]], dim=1))
            ratio = (log_probabilities(logits, answers[mine]) - before[mine]).exp()
            better = torch.minimum(ratio * gains[mine], ratio.clamp(1 - CLIP, 1 + CLIP) * gains[mine])
            loss = -(better * is_said(answers[mine])).sum(1).mean() / LONGEST
            engine.backward(loss * slot.weight)
            engine.step()
    return scores.mean().item()


def main() -> None:
    """Alternate between rollouts and updates."""
    args = arguments()
    logging.getLogger("ds_dynatrain").setLevel(logging.WARNING)  # the plot shows the switches
    folder = args.out / ("keep" if args.keep else "pool")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SWITCHES).unlink(missing_ok=True)
    timeline = Timeline(folder)
    rollouts = Rollouts(folder / "weights", timeline)
    keeps, ranks = args.keep, rollouts.processes if args.keep else args.trainers
    config = {
        "train_batch_size": SIZE // UPDATES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": args.zero_stage},
        "dynatrain": {"layout": {"data": ranks}, "report": {"jsonl": str(folder / SWITCHES)}},
    }

    def on_idle(engine: Any) -> None:
        if not rollouts.work():
            time.sleep(0.005)

    torch.manual_seed(0)
    engine, *_ = ds_dynatrain.initialize(model=Policy(), config=config, on_idle=on_idle)
    done: list[dict[str, float]] = []
    while engine.global_steps < args.rollouts * UPDATES:
        number, begin = engine.global_steps // UPDATES, time.time()
        engine.boundary()  # members that become idle generate in here until they train again
        if engine.layout.data == ranks:
            timeline.note("switch", begin)
            (generate_in_lockstep if keeps else generate)(engine, rollouts, number)
        completions = rollouts.read(number)
        if not keeps and number + 1 < args.rollouts:
            with timeline.during("switch"):
                engine.switch(data=ranks, at=(number + 1) * UPDATES)  # prepared during the update
        with timeline.during("train"):
            reward = update(engine, *completions)
        done.append({"rollout": number, "reward": reward, "time": time.time()})
        if engine.global_rank == 0 and number % 5 == 4:
            print(f"rollout {number + 1}: reward {reward:.3f}", flush=True)

    timeline.close(engine.member)
    torch.distributed.barrier()
    if engine.global_rank == 0:
        write(folder / REWARDS, done)
        show(args.out)


if __name__ == "__main__":
    main()
