"""Hugging Face's Trainer in a world that changes: a small GPT-2 learns the text of Python's standard library.

torchrun --standalone --nproc-per-node=4 examples/huggingface/train.py --out build/hf
torchrun --standalone --nproc-per-node=3 examples/huggingface/train.py --out build/hf --resume

The first run starts on two of four processes, switches to all four with ZeRO 3, and then to three with ZeRO 2. The
second run continues from the last checkpoint on all of its three processes. Without a GPU, set DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ds_dynatrain.integrations.transformers import SwitchCallback, elastic  # imported before TrainingArguments are made

LENGTH = 64
CONFIG = Path(__file__).with_name("ds.json")


class Bytes(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A data set of byte sequences from the standard library's source code."""

    def __init__(self, most: int = 400_000) -> None:
        text = bytearray()
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += file.read_bytes()[: most - len(text)]
        self.rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    """Train, from the start or from a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", default="build/hf")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --out, in any world")
    options = parser.parse_args()
    config = json.loads(CONFIG.read_text())
    if options.resume:
        del config["dynatrain"]["layout"]  # then the layout uses all processes
    args = TrainingArguments(
        output_dir=options.out,
        deepspeed=config,
        per_device_train_batch_size=8,
        max_steps=options.steps,
        learning_rate=1e-3,
        logging_steps=5,
        save_steps=20,
        report_to=[],
    )
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, use_cache=False, **sizes))
    changes = {20: {"data": 4, "zero_stage": 3}, 40: {"data": 3, "zero_stage": 2}}
    trainer = elastic(Trainer)(
        model=model,
        args=args,
        train_dataset=Bytes(),
        callbacks=[] if options.resume else [SwitchCallback(changes)],
    )
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()
