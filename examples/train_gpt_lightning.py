"""Train the same GPT with PyTorch Lightning in a world that changes, and continue in another one.

torchrun --standalone --nproc-per-node=4 examples/train_gpt_lightning.py
torchrun --standalone --nproc-per-node=3 examples/train_gpt_lightning.py --resume

The first run starts on two of four processes, switches to all four with ZeRO 3, and then to three with ZeRO 2. The
second run continues from the last checkpoint on all of its three processes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from ds_dynatrain.integrations.lightning import DynatrainStrategy, SwitchCallback
from gpt import GPT, Windows, texts

BATCH = 12


class Language(lightning.LightningModule):  # type: ignore[misc]
    """The model of `gpt.py` as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        loss: torch.Tensor = self.model(*batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss on the held-out text."""
        self.log("held out", self.model(*batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the same optimizer as in `train_gpt.py`."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    """Train, from the start or from a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default 60)")
    parser.add_argument("--out", type=Path, default=Path("build/lightning"), help="folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --out, in any world")
    args = parser.parse_args()
    train_text, held_out_text = texts()
    block = {} if args.resume else {"layout": {"data": 2}}
    config = {"train_batch_size": BATCH, "zero_optimization": {"stage": 1}, "dynatrain": block}
    third = args.steps // 3
    changes = {third: {"data": 4, "zero_stage": 3}, 2 * third: {"data": 3, "zero_stage": 2}}
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=args.steps + (third if args.resume else 0),
        val_check_interval=third,
        check_val_every_n_epoch=None,
        strategy=DynatrainStrategy(config=config),
        callbacks=[
            ModelCheckpoint(args.out, every_n_train_steps=third, save_top_k=-1, save_last="link"),
            *([] if args.resume else [SwitchCallback(changes)]),
        ],
        logger=False,
    )
    training = DataLoader(Windows(train_text, 100 * BATCH), batch_size=3, num_workers=1)
    held_out = DataLoader(Windows(held_out_text, 4 * BATCH), batch_size=4, num_workers=1)
    trainer.fit(Language(), training, held_out, ckpt_path="last" if args.resume else None)
    if trainer.is_global_zero:
        found = float(trainer.callback_metrics["held out"])
        print(f"step {trainer.global_step}: {found:.3f} on text held out, {trainer.strategy.engine.layout}", flush=True)


if __name__ == "__main__":
    main()
