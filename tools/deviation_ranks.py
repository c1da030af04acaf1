"""One rank of `deviation.py`: trains a GPT with dropout on real text, and writes the loss of each of its micro-batches.

torchrun ... deviation_ranks.py FOLDER '{"exact": true, "schedule": {"75": 3}, "steps": 300, "stage": 2}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as td
from launch import Notes
from torch import Tensor, nn
from workload import config, quiet

import ds_dynatrain

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, Block, Windows, texts

LEAVES, SAMPLES = 12, 2
"""Number of leaves of a global batch, and of samples of a leaf. Worlds of 1 to 4 ranks have equally many on each
rank."""
RATE = 1e-3


class NoisyBlock(Block):
    """A transformer block with dropout on both branches, as in GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + nn.functional.dropout(self.attend(self.norm_attention(x)), 0.1, self.training)
        return x + nn.functional.dropout(self.feed(self.norm_feed(x)), 0.1, self.training)


def model() -> GPT:
    """Return the model, with the same weights on every rank."""
    torch.manual_seed(0)
    made = GPT(layers=2, width=64)
    made.blocks = nn.ModuleList(NoisyBlock(64, 4) for _ in range(2))
    return made


def main() -> None:
    """Train, switch at the scheduled steps, and write (step, loss) of every micro-batch."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    schedule = {int(step): data for step, data in wanted["schedule"].items()}
    settings = config("fp32", wanted["stage"], LEAVES * SAMPLES)
    settings["optimizer"]["params"]["lr"] = RATE
    settings |= {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_clipping": 1.0}
    block = {"layout": {"data": wanted["data"], "zero_stage": wanted["stage"]}, "exact": wanted["exact"]}
    windows = Windows(texts()[0], wanted["steps"] * LEAVES * SAMPLES)
    engine, _, loader, _ = ds_dynatrain.initialize(
        config={**settings, "dynatrain": block}, model=model(), training_data=windows
    )
    notes = Notes(folder, td.get_rank())
    for x, y in loader:
        step, loss = engine.global_steps, engine(x, y)
        engine.backward(loss)
        notes.write({"step": step, "loss": float(loss.detach())})
        engine.step()
        if engine.global_steps in schedule:
            engine.switch(data=schedule.pop(engine.global_steps))


if __name__ == "__main__":
    main()
