"""What `deepspeed.initialize` does around the engine's constructor, for an engine class of our own."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from deepspeed import zero
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_dynatrain.adapters.model import ModelMap

E = TypeVar("E", bound=DeepSpeedEngine)


def engine_around(kind: type[E], **arguments: Any) -> E:
    """An engine of class `kind`, built as `deepspeed.initialize` builds one (0.19.8); the world must be installed.

    The configuration is made by the layout, not by asking the world how large it is.
    """
    from deepspeed import set_optimizer_flags

    from ds_dynatrain.adapters.settings import layout_config
    from ds_dynatrain.data import BatchArithmetic

    zero.partition_parameters.shutdown_init_context()
    sizes, layout = arguments["batch_sizes"], arguments["layout"]
    batch = BatchArithmetic(sizes.train_batch_size, sizes.micro_batch_size, layout.data)
    micro = -(-batch.train_batch_size // batch.slots)
    config, parsed = layout_config(
        arguments["user_config"], layout, batch.train_batch_size, micro, batch.accumulation
    )
    set_optimizer_flags(parsed, arguments["model"])
    engine = kind(config=config, config_class=parsed, **arguments)
    zero.partition_parameters.restore_init_context()
    engine._configure_python_gc()
    return engine


def model_is_float(model: ModelMap) -> bool:
    """Whether the parameters are fp32, so that a weight and its master are the same bytes."""
    return model.dtype == torch.float32
