"""What transformers and Accelerate remember of the world, which they ask once: put right after each change."""

from __future__ import annotations

from typing import Any

import torch.distributed as td
from accelerate.state import AcceleratorState, PartialState
from transformers.trainer_callback import ProgressCallback


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


def refresh_trainer(trainer: Any) -> None:
    """A trainer over a working engine: ranks, stage, who reports, and evaluation loaders, which are cut by ranks."""
    refresh_ranks()
    refresh_stage(trainer.accelerator, trainer.deepspeed.layout.zero_stage, trainer.args.hf_deepspeed_config)
    state = trainer.state
    reported, state.is_world_process_zero = state.is_world_process_zero, trainer.is_world_process_zero()
    state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.__dict__.pop("_eval_dataloaders", None)
    if state.is_world_process_zero and not reported:
        _begin_to_report(trainer)


def _begin_to_report(trainer: Any) -> None:
    """This process has become rank 0: other reporters set themselves up when they are first asked, the bar does not."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback) and callback.training_bar is None:
            callback.on_train_begin(trainer.args, trainer.state, trainer.control)
