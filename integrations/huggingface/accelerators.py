"""Arguments of an Accelerator, translated to a job whose world changes, and refusals of unsupported arguments."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ds_dynatrain.elastic.environment import worker_place
from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.integrations.shared.refusal import AXES, BLOCK, Refusal, refuse

GIVEN = (
    Refusal(
        "several DeepSpeed plug-ins",
        lambda accelerator: isinstance(plugins := accelerator.state.deepspeed_plugins, dict) and len(plugins) > 1,
        "each has an engine of its own, and an Accelerator follows the world of one",
        "write the loop with ds_dynatrain.initialize, or put a model that is not trained on accelerator.device by hand",
    ),
    Refusal(
        "split_batches and dispatch_batches",
        lambda accelerator: bool(accelerator.split_batches or accelerator.dispatch_batches),
        "batches are cut for the number of ranks at the start",
        "leave them out of DataLoaderConfiguration: each rank reads its own samples",
    ),
    Refusal(
        "use_stateful_dataloader",
        lambda accelerator: bool(accelerator.use_stateful_dataloader),
        "its position is that of one rank in one world",
        "leave it out: save_state has the job's position, and load_state goes there",
    ),
    Refusal(
        "ParallelismConfig",
        lambda accelerator: accelerator.parallelism_config is not None,
        "its meshes are made once, for the world of the start",
        "leave it out",
    ),
    Refusal(
        "tensor_parallel.autotp_size (tp_model_init)",
        lambda accelerator: int(config_of(accelerator).get("tensor_parallel", {}).get("autotp_size", 1)) > 1,
        "it cuts the model for the world of the start",
        "write the loop with ds_dynatrain.initialize and dynatrain.layout.tensor",
    ),
    Refusal(
        "a layout with pipe, tensor, expert or sequence",
        lambda accelerator: any((layout_of(accelerator).get(axis) or 1) > 1 for axis in AXES),
        "Accelerate counts each rank as one with samples of its own",
        "take data and zero_stage here, or the other axes in a loop with ds_dynatrain.initialize",
    ),
)


def refuse_given(accelerator: Any) -> None:
    """Raise UnsupportedError for the first argument that cannot follow the world.

    Raises ConfigError if there is no `dynatrain` block.
    """
    plugin = accelerator.deepspeed_plugin
    if plugin is None or BLOCK not in plugin.deepspeed_config:
        lacks = "no DeepSpeed plug-in" if plugin is None else f"no {BLOCK!r} block in its configuration"
        raise ConfigError(
            f"this Accelerator needs DeepSpeedPlugin(hf_ds_config=...), a configuration with a {BLOCK!r} block, which "
            f"may be empty; here is {lacks}"
        )
    refuse(GIVEN, accelerator)


def refuse_parts(given: tuple[Any, ...], has_engine: bool) -> None:
    """Raise UnsupportedError for objects that are prepared separately from the objects to which they belong."""
    kinds = {kind: any(isinstance(each, kind) for each in given) for kind in (nn.Module, Optimizer)}
    has_optimizer = kinds[Optimizer] or any(type(each).__name__ == "DummyOptim" for each in given)
    if has_engine and kinds[nn.Module]:
        raise UnsupportedError(
            "accelerator.prepare of a second model: an Accelerator follows the world of one engine; put a model that "
            "is not trained on accelerator.device by hand, or write the loop with ds_dynatrain.initialize"
        )
    if kinds[nn.Module] != has_optimizer:
        alone = "a model without its optimizer" if kinds[nn.Module] else "an optimizer without its model"
        raise UnsupportedError(
            f"accelerator.prepare of {alone}: DeepSpeed makes one engine of both, prepare them in one call; put a "
            "model that is not trained on accelerator.device by hand"
        )
    if not kinds[nn.Module] and any(hasattr(each, "step") and hasattr(each, "get_last_lr") for each in given):
        raise UnsupportedError(
            "accelerator.prepare of a scheduler without its model: Accelerate gives it back as it is, and it would not "
            "travel with the job; prepare model, optimizer and scheduler in one call"
        )


def config_of(accelerator: Any) -> dict[str, Any]:
    """Return DeepSpeed's configuration, as completed by Accelerate."""
    found: dict[str, Any] = accelerator.deepspeed_plugin.deepspeed_config
    return found


def layout_of(accelerator: Any) -> dict[str, Any]:
    """Return the settings of the initial layout that are given."""
    block = {} if accelerator.deepspeed_plugin is None else config_of(accelerator).get(BLOCK, {})
    found: dict[str, Any] = block.get("layout") or {}
    return found


def settle_sizes(accelerator: Any, batch_size: int | None) -> float:
    """Fill in the batch sizes the way Accelerate does, but only from the training DataLoader.

    batch_size: the training DataLoader's batch size; None if there is no such DataLoader yet.

    Returns the number of processes in a global batch.

    Raises ConfigError if the DataLoader and the configuration disagree, or if nodes may join and leave and
    `train_batch_size` is not a number.
    """
    config = config_of(accelerator)
    accelerator.deepspeed_plugin.fill_match(
        "gradient_accumulation_steps", must_match=False, gradient_accumulation_steps=_accumulation(accelerator)
    )
    micro = config.get("train_micro_batch_size_per_gpu", "auto")
    if micro == "auto":
        if batch_size is None:
            raise ConfigError(
                'train_micro_batch_size_per_gpu is "auto" and no training DataLoader is prepared: prepare it in the '
                "same call as the model, or give the number"
            )
        micro = batch_size
    elif batch_size not in (None, micro):
        raise ConfigError(
            f"train_micro_batch_size_per_gpu is {micro} and the training DataLoader has batches of {batch_size}: it is "
            'the most samples that a micro-batch ever holds; make them equal, or take "auto"'
        )
    each = micro * config["gradient_accumulation_steps"]
    given = config.get("train_batch_size", "auto")
    if given == "auto" and worker_place() is not None:
        raise ConfigError(
            "train_batch_size is 'auto': where nodes come and go it is the job's, not a node's; give the number of "
            "samples of an optimizer step in the DeepSpeed configuration (it stays the same in every world)"
        )
    size = each * accelerator.num_processes if given == "auto" else given
    config.update(train_micro_batch_size_per_gpu=micro, train_batch_size=size)
    return float(size / each)


def _accumulation(accelerator: Any) -> int:
    return int(accelerator.gradient_accumulation_steps)


def whole(processes: float) -> int:
    """Return the number of processes for which a schedule is stepped.

    Raises ConfigError if the sizes do not give a whole number.
    """
    if processes != int(processes):
        raise ConfigError(
            f"train_batch_size is {processes:.2f} times a DataLoader's batch and its accumulation steps, and "
            "Accelerate steps a schedule once for each of as many processes: give a multiple, or "
            "Accelerator(step_scheduler_with_optimizer=False) and step it `if accelerator.sync_gradients`"
        )
    return int(processes)
