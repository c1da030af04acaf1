"""What Accelerate remembers of the world, which it asks once: put right after each change."""

from __future__ import annotations

from typing import Any

import torch.distributed as td
from accelerate.state import AcceleratorState, PartialState


def refresh_ranks() -> None:
    """The number of ranks and this one's, from which `num_processes`, `args.world_size` and samplers are taken."""
    numbers = {"num_processes": td.get_world_size(), "process_index": td.get_rank()}
    for state in (PartialState, AcceleratorState):
        state._shared_state.update(numbers)


def refresh_stage(accelerator: Any, stage: int, *configurations: Any) -> None:
    """The ZeRO stage in all copies of the configuration, and in what was derived from them.

    configurations: further objects of `HfDeepSpeedConfig`.
    """
    plugin = accelerator.deepspeed_plugin
    held = [plugin.hf_ds_config, *configurations]
    for config in (accelerator.deepspeed_config, plugin.deepspeed_config, *(each.config for each in held)):
        config.setdefault("zero_optimization", {})["stage"] = stage
    for each in held:
        each._stage = stage
    plugin.zero_stage = stage
