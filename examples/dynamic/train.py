"""Train a small GPT as a pipeline of two stages: unchanged, with changing layers, and with changing layers and balance.

torchrun --standalone --nproc-per-node=2 examples/dynamic/train.py early_exit

Three runs follow one another, with the same samples. The script prints the time of a step in each of them after all
changes, and draws each stage's time and the stage boundaries by step into OUT/NAME.png.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import deepspeed
import torch.distributed as td

sys.path.append(str(Path(__file__).parents[1]))  # the model and the text are shared with the other examples
from dynamic.model import Sizes
from dynamic.picture import draw
from dynamic.runs import DYNAMISMS, Run, train


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dynamism", choices=DYNAMISMS, help="how layers change")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of each run (default 120)")
    parser.add_argument("--blocks", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default 128)")
    parser.add_argument("--out", type=Path, default=Path("build/dynamic"), help="folder (default build/dynamic)")
    return parser.parse_args()


def table(dense: Run, static: Run, balanced: Run) -> str:
    """Return the step times of the three runs as text, with the speed-ups."""
    seconds = [run.at_rest() for run in (dense, static, balanced)]
    own, ours = seconds[0] / seconds[1], seconds[1] / seconds[2]
    rows = [
        ("dense static", seconds[0], ""),
        ("dynamic static", seconds[1], f"x {own:.2f}, the dynamism's own saving"),
        ("dynamic balanced", seconds[2], f"x {ours:.2f} by balance, at most {static.bound():.2f}"),
    ]
    lines = [f"{name:17} {1e3 * each:7.1f} ms a step  {note}".rstrip() for name, each, note in rows]
    cuts = f"stages begin at {static.boundaries[-1][:-1]}, with balance at {balanced.boundaries[-1][:-1]}"
    apart = max(abs(one / other - 1) for one, other in zip(balanced.losses, static.losses, strict=True))
    same = f"losses with and without balance differ by {apart:.1e} of their value at the most"
    return "\n".join([*lines, f"product x {own * ours:.2f}", cuts, same])


def main() -> None:
    """Make the three runs, and print the table and the path of the plot."""
    asked = arguments()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    dynamism, sizes = DYNAMISMS[asked.dynamism], Sizes(asked.blocks, asked.width)
    watching = {"mode": "advise", "every_steps": 10}
    acting = {"mode": "act", "every_steps": 10}
    dense = train(dynamism, sizes, asked.steps, watching, changes=0)
    static = train(dynamism, sizes, asked.steps, watching)
    balanced = train(dynamism, sizes, asked.steps, acting)
    if td.get_rank() == 0:
        print(table(dense, static, balanced))
        print(draw(asked.out / f"{asked.dynamism}.png", asked.dynamism, static, balanced))


if __name__ == "__main__":
    main()
