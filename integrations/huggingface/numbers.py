"""Updates, after each change, of the numbers that Accelerate reads only once from the world."""

from __future__ import annotations

from typing import Any

import torch.distributed as td
from accelerate.state import AcceleratorState, PartialState


def refresh_ranks() -> None:
    """Set the number of ranks and this process's rank in Accelerate's state.

    `num_processes`, `args.world_size` and samplers are derived from them.
    """
    numbers = {"num_processes": td.get_world_size(), "process_index": td.get_rank()}
    for state in (PartialState, AcceleratorState):
        state._shared_state.update(numbers)


def refresh_stage(accelerator: Any, stage: int, *configurations: Any) -> None:
    """Set the ZeRO stage in all copies of the configuration, and in the values derived from them.

    configurations: further `HfDeepSpeedConfig` objects.
    """
    plugin = accelerator.deepspeed_plugin
    asked = getattr(plugin, "dschf", None)  # transformers asks it whether parameters are partitioned
    held = [plugin.hf_ds_config, *configurations, *([] if asked is None else [asked])]
    for config in (accelerator.deepspeed_config, plugin.deepspeed_config, *(each.config for each in held)):
        config.setdefault("zero_optimization", {})["stage"] = stage
    for each in held:
        each._stage = stage
    plugin.zero_stage = stage
