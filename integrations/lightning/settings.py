"""What a DeepSpeed configuration says to Lightning, in the terms of a job whose world changes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.integrations.shared.refusal import BLOCK

_GLOBAL, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"


@dataclass(frozen=True)
class Sizes:
    """global_batch: samples of an optimizer step, in every world. micro_batch: the most that a forward pass has."""

    global_batch: int
    micro_batch: int


def with_block(config: Mapping[str, Any], is_given: bool) -> dict[str, Any]:
    """A copy of a DeepSpeed configuration that has a `dynatrain` block. is_given: by the user; ConfigError without."""
    found = copy.deepcopy(dict(config))
    if is_given and BLOCK not in found:
        raise ConfigError(
            f"DynatrainStrategy(config=...) needs a configuration with a {BLOCK!r} block, which may be empty; here is "
            "none in it"
        )
    found.setdefault(BLOCK, {})
    return found


def layout_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The layout of the start, as far as it is given."""
    found: dict[str, Any] = config[BLOCK].get("layout") or {}
    return found


def saves_on_sigterm(config: Mapping[str, Any]) -> bool:
    """Whether the engine saves by itself when a process is told to end."""
    return bool((config[BLOCK].get("fallback") or {}).get("on_sigterm"))


def sizes_of(config: Mapping[str, Any], batch_size: int, accumulation: int, processes: int) -> Sizes:
    """Of a job. batch_size: the training DataLoader's. processes: that were started.

    ConfigError where the DataLoader and the configuration say different things.
    """
    micro = _number(config, _MICRO)
    if micro not in (None, batch_size):
        raise ConfigError(
            f"{_MICRO} is {micro} and the training DataLoader has batches of {batch_size}: it is the most samples that "
            "a micro-batch ever holds; make them equal, or leave the key out"
        )
    ranks = layout_of(config).get("data") or processes
    return Sizes(_number(config, _GLOBAL) or batch_size * accumulation * ranks, batch_size)


def for_engine(config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The configuration that an engine is made of: accumulation follows from the world."""
    rest = {name: value for name, value in config.items() if name != "gradient_accumulation_steps"}
    return {**rest, _GLOBAL: sizes.global_batch, _MICRO: sizes.micro_batch}


def for_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The one that a model is cut by as it is built: sizes of batches are of one world, and all processes take part."""
    of_world = (_GLOBAL, _MICRO, "gradient_accumulation_steps", BLOCK)
    return {**{name: value for name, value in config.items() if name not in of_world}, _MICRO: 1}


def _number(config: Mapping[str, Any], key: str) -> int | None:
    given = config.get(key)
    return None if given in (None, "auto") else int(given)
