"""Trainers of a tiny GPT-2 on CPU ranks: what a job logged, stock or elastic."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from deepspeed.accelerator import get_accelerator
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ds_dynatrain.adapters.groups.device import is_accelerated
from ds_dynatrain.integrations.transformers import SwitchCallback, elastic

WORDS, LENGTH = 64, 16
CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 10**9,
    "zero_optimization": {"stage": 1, "stage3_gather_16bit_weights_on_model_save": True},
}
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "epoch")


def allow_ranks() -> None:
    """Accelerate has DeepSpeed on accelerators alone that it knows: on a CPU each process would be alone.

    Nor does anybody have to wait for a compiler, as in the other scripts of tests.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    device = get_accelerator()
    found = ("gloo", DistributedType.MULTI_CPU)
    if is_accelerated():  # ranks share it
        os.environ["ACCELERATE_TORCH_DEVICE"] = device.device_name(device.current_device())
        found = (device.communication_backend_name(), DistributedType.MULTI_GPU)
    PartialState._prepare_backend = lambda *_, **__: found


def forget_ranks() -> None:
    """A process of Accelerate's has one job; here it has one after the other."""
    for state in (AcceleratorState, PartialState):
        state._shared_state.clear()
    GradientState._shared_state.clear()


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Token sequences; ragged: with labels for a part of each, of another length for each."""

    def __init__(self, length: int = 96, ragged: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randint(1, WORDS, (length, LENGTH), generator=generator)
        self.labels = self.inputs.clone()
        for row in self.labels if ragged else []:
            row[: int(torch.randint(0, LENGTH - 2, (1,), generator=generator))] = -100

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.inputs[index], "labels": self.labels[index]}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The same token sequences without an index."""

    def __init__(self, length: int) -> None:
        self.texts = Texts(length)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.texts[index] for index in range(len(self.texts)))


def model() -> GPT2LMHeadModel:
    """Two layers without dropout."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def arguments(
    folder: Path,
    block: Mapping[str, Any] | None,
    stage: int = 1,
    kind: type[TrainingArguments] = TrainingArguments,
    **more: Any,
) -> TrainingArguments:
    """Of a job that logs each step; block: `dynatrain`, None for a stock one. `config`: merged over DeepSpeed's."""
    config = copy.deepcopy(CONFIG)
    config["zero_optimization"]["stage"] = stage
    config.update(more.pop("config", {}))
    if block is not None:
        config["dynatrain"] = dict(block)
    given: dict[str, Any] = {
        "per_device_train_batch_size": 3, "max_steps": 8, "logging_steps": 1, "learning_rate": 1e-2, "seed": 0,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "per_device_eval_batch_size": 4,
        "dataloader_num_workers": 0, "dataloader_pin_memory": False,
    }  # fmt: skip
    return kind(output_dir=str(folder), deepspeed=config, **{**given, **more})


def train(
    folder: Path,
    block: Mapping[str, Any] | None,
    schedule: Mapping[int, Mapping[str, Any]] | None = None,
    ragged: bool = False,
    samples: int = 96,
    resume: str | bool | None = None,
    kind: type[Trainer] = Trainer,
    callbacks: tuple[TrainerCallback, ...] = (),
    data: Callable[[int], Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A whole job; its log, and where this process was at its end. Idle processes that are let go have none."""
    os.environ.setdefault("ACCELERATE_USE_CPU", "false")
    allow_ranks()
    forget_ranks()
    args = arguments(folder, block, **more)
    made = kind if block is None else elastic(kind)
    listening = [*callbacks, *([] if schedule is None else [SwitchCallback(schedule)])]
    trained = Texts(samples, ragged) if data is None else data(samples)
    trainer: Any = made(model=model(), args=args, train_dataset=trained, eval_dataset=Texts(48), callbacks=listening)
    return carried_out(trainer, resume)


def logged(trainer: Any) -> list[dict[str, Any]]:
    """The rows of a trainer's log."""
    rows = trainer.state.log_history
    return [{name: row[name] for name in ("step", *LOGGED) if name in row} for row in rows]


def carried_out(trainer: Any, resume: str | bool | None = None) -> dict[str, Any]:
    """Train to the end; see `train`."""
    args, found = trainer.args, dict[str, Any](log=[])
    try:
        trainer.train(resume_from_checkpoint=resume)
        found["world"] = args.world_size
        found["layout"] = str(getattr(trainer.deepspeed, "layout", None))
        found["best"] = trainer.state.best_model_checkpoint
        found["words"] = trainer.model.get_input_embeddings().weight.detach().clone()
    except SystemExit as end:
        if end.code:
            raise
        found["let go"] = True
    finally:
        found["log"] = logged(trainer)
        found["switches"] = [row for row in trainer.state.log_history if "dynatrain/committed" in row]
        found["rank"] = args.process_index
        with suppress(AttributeError):
            trainer.deepspeed.destroy()
    return found
