"""DeepSpeed's configuration for one layout, derived from the user's. It does not depend on the installed world."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig

from ds_dynatrain.data import BatchArithmetic
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.space import Layout

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""DeepSpeed's keys for batch sizes. Any two of them determine the third."""


Settings = tuple[dict[str, Any], Any]
"""DeepSpeed's configuration for a layout: the dictionary and its parsed form."""


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of a configuration, in samples, completed for the initial number of data ranks.

    in_leaves: whether a micro-batch (then called a leaf) has the same samples in every world.
    """

    train_batch_size: int
    micro_batch_size: int
    in_leaves: bool = False

    @staticmethod
    def of(config: dict[str, Any], data: int, in_leaves: bool = False) -> BatchSizes:
        """Return the batch sizes of a configuration, completed by DeepSpeed's own rules.

        Unlike in DeepSpeed, data ranks need not divide the batch evenly.

        data: the number of data ranks.
        in_leaves: whether micro-batches hold the same samples in every world.

        Raises ConfigError, with the arithmetic, if all three sizes are given and disagree, or if neither batch size is
        given.
        """
        batch, micro, steps = (config.get(key) for key in SIZES)
        for key in SIZES:
            value = config.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{key} is {value!r}; give a whole number, 1 or more")
        if batch is not None and micro is not None and steps is not None and batch != micro * steps * data:
            raise ConfigError(
                f"train_batch_size {batch} != {micro} samples x {steps} accumulation steps x data={data}; leave out "
                "gradient_accumulation_steps: it follows from the other two in every world"
            )
        if batch is None and micro is None:
            raise ConfigError(
                "the configuration has neither train_batch_size nor train_micro_batch_size_per_gpu; give one of them"
            )
        if batch is None:
            batch = micro * (steps or 1) * data  # type: ignore[operator]
        if micro is None:
            micro = -(-batch // (data * (steps or 1)))
        return BatchSizes(batch, micro, in_leaves)


def layout_config(config: dict[str, Any], layout: Layout, batch: BatchArithmetic) -> Settings:
    """Return DeepSpeed's configuration for `layout`, as a dictionary and parsed.

    The parsed configuration has the user's `train_batch_size`. At stage 3 DeepSpeed reads the dictionary again and
    checks that its first batch size is the product of the other two. In lower stages the dictionary has only the batch
    sizes that the user wrote, because code that reads `engine.config` may count ranks other than those of the data
    axis.
    """
    micro_batch_size = batch.largest_slot
    adapted = copy.deepcopy(config)
    adapted.setdefault("zero_optimization", {})["stage"] = layout.zero_stage
    adapted.pop("sequence_parallel_size", None)  # DeepSpeed would divide the data axis by it
    adapted["train_micro_batch_size_per_gpu"] = micro_batch_size
    adapted["gradient_accumulation_steps"] = batch.accumulation
    adapted["train_batch_size"] = micro_batch_size * batch.accumulation * layout.data
    parsed = DeepSpeedConfig(adapted, SimpleNamespace(get_data_parallel_world_size=lambda: layout.data))
    parsed.train_batch_size = batch.train_batch_size
    if layout.zero_stage < 3:
        for size in SIZES:
            if size not in config:
                del adapted[size]
    return adapted, parsed
