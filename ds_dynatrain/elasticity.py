"""`compute_elastic_config` for programs that import it from `deepspeed.elasticity`, which DeepSpeed 0.19.6 removed.

ms-swift and dlrover are such programs. `python -m ds_dynatrain.run` installs this module as `deepspeed.elasticity`. The
batch sizes are those of version 0.1 of DeepSpeed's elasticity, so a job keeps its `train_batch_size`. A job of
ds_dynatrain needs no such batch sizes: it trains the same batch on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ds_dynatrain.errors import ConfigError

_Count = Annotated[int, Field(ge=1)]
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)
"""Numbers with more divisors than any smaller number."""


class ElasticityBlock(BaseModel):
    """The `elasticity` block of a DeepSpeed configuration, with the keys that determine the batch size."""

    enabled: Literal[True]
    max_train_batch_size: _Count
    micro_batch_sizes: Annotated[list[_Count], Field(min_length=1)]
    min_gpus: _Count = 1
    max_gpus: _Count = 10_000
    prefer_larger_batch: bool = True
    version: Annotated[float, Field(ge=0.1, le=0.1)]


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """Return the batch size that the most world sizes divide, and these world sizes.

    If a world size is given, a third value is the largest micro-batch size with which that many ranks train the batch.

    target_deepspeed_version: ignored, because the rules are the same for all versions.
    Raises ConfigError if the block is missing, disabled, invalid or of version 0.2, or if the world size does not
    divide the batch.
    """
    try:
        block = ElasticityBlock.model_validate(ds_config.get("elasticity"))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("elasticity", *first["loc"])))
        raise ConfigError(f"{key}: {first['msg']}; give an enabled block of version 0.1") from error
    if return_microbatch and not world_size:
        raise ConfigError("world_size: 0, and a micro-batch size depends on the world size; give the world size")
    batch = _batch_size(block)
    worlds = _world_sizes(batch, block)
    if not world_size:
        return batch, worlds
    fitting = [size for size in block.micro_batch_sizes if batch % (size * world_size) == 0]
    if world_size not in worlds or not fitting:
        raise ConfigError(
            f"elasticity: {world_size} ranks cannot divide a batch of {batch} into micro-batches of "
            f"{block.micro_batch_sizes}; start one of {worlds} ranks, or give `train_batch_size` in place of the "
            "block: with a `dynatrain` block any number of ranks trains any batch"
        )
    return batch, worlds, max(fitting)


def _batch_size(block: ElasticityBlock) -> int:
    """Return the candidate batch size that the most world sizes can train; among equals the largest, or the smallest if
    `prefer_larger_batch` is false.

    Candidates are the micro-batch sizes and their least common multiple, each times the largest highly composite number
    with which it stays within the limit.
    """
    limit, sizes = block.max_train_batch_size, block.micro_batch_sizes
    if max(sizes) > limit:
        raise ConfigError(
            f"elasticity: micro_batch_sizes {sizes} has a size above max_train_batch_size {limit}; raise the limit"
        )
    candidates = {
        base * max((factor for factor in _HIGHLY_COMPOSITE if factor * base <= limit), default=1)
        for base in (*sizes, math.lcm(*sizes))
    }
    sign = 1 if block.prefer_larger_batch else -1
    best = max(candidates, key=lambda batch: (len(_world_sizes(batch, block)), sign * batch))
    if not _world_sizes(best, block):
        raise ConfigError(
            f"elasticity: no batch of at most {limit} samples in micro-batches of {sizes} is divided by "
            f"{block.min_gpus} to {block.max_gpus} ranks; raise max_train_batch_size, or lower min_gpus"
        )
    return best


def _world_sizes(batch: int, block: ElasticityBlock) -> list[int]:
    """Return the numbers of ranks, within the block's limits, that train the batch in equal micro-batches."""
    counts = {batch // size for size in block.micro_batch_sizes if batch % size == 0}
    most = min(block.max_gpus, max(counts, default=0))
    return [ranks for ranks in range(block.min_gpus, most + 1) if any(count % ranks == 0 for count in counts)]
