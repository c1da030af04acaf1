"""Settings from a Trainer's arguments and its DeepSpeed configuration, translated to a job whose world changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ds_dynatrain.elastic.environment import worker_place
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.integrations.shared.refusal import BLOCK

_SETTLED = "_dynatrain_global_batch"
"""Attribute of a settled configuration that holds the global batch size.

It is needed because the arguments no longer have the given accumulation.
"""
_OF_ONE_WORLD = ("train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Settings:
    """Settings of a job.

    global_batch: number of samples in an optimizer step, in every world.
    fallback: the folder in which SIGTERM saves; None if it does not save.
    """

    global_batch: int
    fallback: Path | None


def has_block(args: object) -> bool:
    """Return whether the DeepSpeed configuration of a Trainer's arguments has a `dynatrain` block."""
    config = getattr(args, "hf_deepspeed_config", None)
    return config is not None and BLOCK in config.config


def settle(args: TrainingArguments) -> Settings:
    """Set the arguments, and all copies of the configuration, so that a batch of the loader is a whole optimizer step.

    Raises ConfigError if nodes may join and leave and `train_batch_size` is not a number: before the job exists, each
    kind of node would compute a different one.
    """
    held, plugin = args.hf_deepspeed_config, args.deepspeed_plugin
    if plugin is None:
        raise ConfigError(
            "TrainingArguments(deepspeed=...) has made no DeepSpeed plug-in of Accelerate's; give "
            "deepspeed= a dictionary, or the path of a JSON file"
        )
    size = held.__dict__.setdefault(_SETTLED, _global_batch(args))  # for a second trainer with the same arguments
    held.config.update(train_batch_size=size, gradient_accumulation_steps=1)
    # Trainer's objections to these values come from the arithmetic of the first world
    held.mismatches = [each for each in held.mismatches if not any(f"ds {name}=" in each for name in _OF_ONE_WORLD)]
    args.gradient_accumulation_steps = 1
    plugin.deepspeed_config = held.config
    plugin.gradient_accumulation_steps = 1
    fallback = held.config[BLOCK].get("fallback")
    if isinstance(fallback, dict):
        fallback.setdefault("path", str(Path(args.output_dir or ".") / "fallback"))
    return Settings(size, Path(fallback["path"]) if isinstance(fallback, dict) else None)


def _global_batch(args: TrainingArguments) -> int:
    given = HfTrainerDeepSpeedConfig(args.deepspeed).get_value("train_batch_size")
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if worker_place() is not None:
        raise ConfigError(
            f"train_batch_size is {given!r}: where nodes come and go it is the job's, not a node's; give the number of "
            "samples of an optimizer step in the DeepSpeed configuration (it stays the same in every world)"
        )
    layout = args.hf_deepspeed_config.config[BLOCK].get("layout") or {}
    data = layout.get("data") or args.world_size
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * data)


def arguments_in(given: Iterable[Any]) -> TrainingArguments:
    """Return the TrainingArguments among a trainer's arguments.

    Raises ConfigError if their configuration has no `dynatrain` block.
    """
    args = next((each for each in given if isinstance(each, TrainingArguments)), None)
    if args is None or not has_block(args):
        lacks = (
            "no DeepSpeed configuration" if getattr(args, "deepspeed", None) is None else f"no {BLOCK!r} block in it"
        )
        raise ConfigError(
            f"an elastic trainer needs TrainingArguments(deepspeed=...), a configuration with a {BLOCK!r} block, which "
            f"may be empty; here is {lacks}"
        )
    return args
