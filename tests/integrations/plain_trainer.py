"""A script of Hugging Face's that knows nothing of this library: `plain_trainer.py CONFIG.json FOLDER`."""

import json
import sys
from pathlib import Path

from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integrations import trainers

trainers.allow_ranks()
config, folder = sys.argv[1:]
args = TrainingArguments(
    output_dir=folder,
    deepspeed=config,
    per_device_train_batch_size=3,
    max_steps=4,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
)


class Keeping(TrainerCallback):
    """Writes rank 0's log down."""

    def on_train_end(self, args, state, control, **named):  # type: ignore[no-untyped-def]
        if state.is_world_process_zero:
            Path(folder, "log.json").write_text(json.dumps([row["loss"] for row in state.log_history if "loss" in row]))


trainer = Trainer(model=trainers.model(), args=args, train_dataset=trainers.Texts(48), callbacks=[Keeping()])
trainer.train()
print("made by", type(trainer.deepspeed).__name__)
