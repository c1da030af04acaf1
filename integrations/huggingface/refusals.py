"""Refusals of Trainer features that cannot follow a world, made before anything is built.

Each refusal names the feature and an alternative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainingArguments

from ds_dynatrain.elastic.environment import worker_place
from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.integrations.shared.refusal import AXES, BLOCK, Refusal, refuse


def _is_on(name: str) -> Callable[[TrainingArguments], bool]:
    return lambda args: bool(getattr(args, name, False))


def _accelerator(name: str) -> Callable[[TrainingArguments], bool]:
    return lambda args: bool(getattr(args.accelerator_config, name, None))


def _has_axes(args: TrainingArguments) -> bool:
    layout = args.hf_deepspeed_config.config[BLOCK].get("layout") or {}
    return any((layout.get(axis) or 1) > 1 for axis in AXES)


def _has_autotp(args: TrainingArguments) -> bool:
    return int(args.hf_deepspeed_config.config.get("tensor_parallel", {}).get("autotp_size", 1)) > 1


ARGUMENTS = (
    Refusal(
        "train_sampling_strategy='batch_rebalance'",
        lambda args: getattr(args, "train_sampling_strategy", "random") == "batch_rebalance",
        "its order of samples is cut by the number of ranks at the start",
        "take 'group_by_length', or pack the data set ahead",
    ),
    Refusal(
        "auto_find_batch_size",
        _is_on("auto_find_batch_size"),
        "it starts the training anew in each process by itself, when its own memory is full",
        "give per_device_train_batch_size: the most samples that a micro-batch ever holds",
    ),
    Refusal(
        "enable_jit_checkpoint",
        _is_on("enable_jit_checkpoint"),
        "it takes SIGTERM for itself, and processes do not agree on the step",
        'take "dynatrain": {"fallback": {"on_sigterm": true}}',
    ),
    Refusal(
        "dispatch_batches and split_batches",
        lambda args: _accelerator("dispatch_batches")(args) or _accelerator("split_batches")(args),
        "batches are cut for the number of ranks at the start",
        "leave them out of accelerator_config: each rank reads its own samples",
    ),
    Refusal(
        "ParallelismConfig",
        lambda args: getattr(args, "parallelism_config", None) is not None,
        "its meshes are made once, for the world of the start",
        "leave it out",
    ),
    Refusal(
        "tensor_parallel.autotp_size (tp_model_init)",
        _has_autotp,
        "it cuts the model for the world of the start",
        "take dynatrain.layout.tensor in a loop of your own",
    ),
    Refusal(
        "a layout with pipe, tensor, expert or sequence",
        _has_axes,
        "Trainer gives each rank samples of its own, and counts tokens over all ranks",
        "take data and zero_stage here, or the other axes in a loop of your own",
    ),
    Refusal(
        "ignore_data_skip",
        _is_on("ignore_data_skip"),
        "samples would be trained twice",
        "leave it out: resuming goes to the next sample at once, nothing is read on the way",
    ),
)

TRAINERS = ("DistillationTrainer", "OnlineDPOTrainer", "GKDTrainer", "PPOTrainer")
"""TRL trainers that assign prompts to the initial ranks, and gather answers over these ranks."""


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise UnsupportedError for the first argument that cannot follow the world."""
    refuse(ARGUMENTS, args)


def refuse_trainer(kind: type[Any]) -> None:
    """Raise UnsupportedError for a trainer that assigns samples by itself."""
    named = [each.__name__ for each in kind.__mro__ if each.__name__ in TRAINERS]
    if named:
        raise UnsupportedError(
            f"{named[0]}: it deals prompts to the ranks of the start and gathers answers over them; train on pairs, "
            "texts or prompts (SFTTrainer, DPOTrainer, GRPOTrainer), or write the loop with ds_dynatrain.initialize"
        )


def refuse_loader(loader: object, batch_size: int) -> None:
    """Raise UnsupportedError if `get_train_dataloader` does not return a DataLoader.

    Raises ConfigError if the DataLoader's batches have another size. Custom samplers and batch samplers are refused
    when the engine takes the DataLoader apart.
    """
    if not isinstance(loader, DataLoader):
        raise UnsupportedError(
            f"get_train_dataloader() returned a {type(loader).__name__}: samples are dealt to a world that changes, "
            "which needs a torch DataLoader; return one, as it is or from accelerator.prepare"
        )
    if loader.batch_size not in (None, batch_size):
        raise ConfigError(
            f"the DataLoader of get_train_dataloader() has batches of {loader.batch_size} samples, and "
            f"per_device_train_batch_size is {batch_size}: it is the most samples that a micro-batch ever holds; make "
            "them equal"
        )


def refuse_second_training(engine: Any) -> None:
    """Raise UnsupportedError if not all processes of the launch will make a second call of `train`."""
    if worker_place() is not None:
        raise UnsupportedError(
            "a second trainer.train() in an elastic launch: a node that joins would begin with the first one; train in "
            "one call, or start a new job from a checkpoint (resume_from_checkpoint)"
        )
    idle = len(engine._parts.candidates) - len(engine.members)
    if idle:
        raise UnsupportedError(
            f"a second trainer.train() while {idle} of {len(engine._parts.candidates)} processes are idle: they end "
            "with the first call; switch to all processes before its end, or start the script again"
        )
