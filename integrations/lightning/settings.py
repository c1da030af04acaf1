"""Settings that Lightning takes from a DeepSpeed configuration, translated to a job whose world changes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_dynatrain.elastic.environment import worker_place
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.integrations.shared.refusal import BLOCK

_GLOBAL, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"


@dataclass(frozen=True)
class Sizes:
    """Sizes of batches.

    global_batch: number of samples in an optimizer step, in every world.
    micro_batch: maximum number of samples in a forward pass.
    """

    global_batch: int
    micro_batch: int


def with_block(config: Mapping[str, Any], is_given: bool) -> dict[str, Any]:
    """Return a copy of a DeepSpeed configuration with a `dynatrain` block.

    is_given: whether the configuration is the user's.

    Raises ConfigError if the user's configuration has no block.
    """
    found = copy.deepcopy(dict(config))
    if is_given and BLOCK not in found:
        raise ConfigError(
            f"DynatrainStrategy(config=...) needs a configuration with a {BLOCK!r} block, which may be empty; here is "
            "none in it"
        )
    found.setdefault(BLOCK, {})
    return found


def layout_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the initial layout that are given."""
    found: dict[str, Any] = config[BLOCK].get("layout") or {}
    return found


def saves_on_sigterm(config: Mapping[str, Any]) -> bool:
    """Return whether the engine saves by itself on SIGTERM."""
    return bool((config[BLOCK].get("fallback") or {}).get("on_sigterm"))


def sizes_of(config: Mapping[str, Any], batch_size: int, accumulation: int, processes: int) -> Sizes:
    """Return the batch sizes of a job.

    batch_size: the training DataLoader's batch size.
    accumulation: the number of accumulation steps in Lightning's settings.
    processes: number of processes that were started.

    Raises ConfigError if the DataLoader and the configuration disagree, and in an elastic launch if the global batch is
    not given.
    """
    micro = _number(config, _MICRO)
    if micro not in (None, batch_size):
        raise ConfigError(
            f"{_MICRO} is {micro} and the training DataLoader has batches of {batch_size}: it is the most samples that "
            "a micro-batch ever holds; make them equal, or leave the key out"
        )
    given = _number(config, _GLOBAL)
    if given is None and worker_place() is not None:
        raise ConfigError(
            f"{_GLOBAL} is not given: where nodes come and go it is the job's, not a node's; give the number of "
            "samples of an optimizer step in the DeepSpeed configuration (it stays the same in every world)"
        )
    ranks = layout_of(config).get("data") or processes
    return Sizes(given or batch_size * accumulation * ranks, batch_size)


def for_engine(config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return the configuration from which an engine is made. It has no accumulation, which follows from the world."""
    rest = {name: value for name, value in config.items() if name != "gradient_accumulation_steps"}
    return {**rest, _GLOBAL: sizes.global_batch, _MICRO: sizes.micro_batch}


def settle_stream(trainer: Any) -> None:
    """Set what Lightning sets for a data set without a length: an epoch is as long as it is, and evaluated at its end.

    Raises ConfigError for an interval of evaluations in parts of an epoch.
    """
    trainer.fit_loop.max_batches = float("inf")
    if trainer.val_check_interval == 1.0:
        trainer.val_check_batch = float("inf")
    elif isinstance(trainer.val_check_interval, float):
        raise ConfigError(
            f"val_check_interval={trainer.val_check_interval} is a part of an epoch, and a stream has no length; give "
            "a whole number of steps, or 1.0 for the end of a pass"
        )


def for_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with which a model is partitioned while it is built.

    It has no sizes of one world, because all processes take part.
    """
    of_world = (_GLOBAL, _MICRO, "gradient_accumulation_steps", BLOCK)
    return {**{name: value for name, value in config.items() if name not in of_world}, _MICRO: 1}


def _number(config: Mapping[str, Any], key: str) -> int | None:
    given = config.get(key)
    return None if given in (None, "auto") else int(given)
