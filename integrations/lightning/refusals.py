"""Refusals of Lightning Trainer features that cannot follow a world. Each refusal names an alternative."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import callbacks
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader

from ds_dynatrain.data import DataSource
from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.integrations.lightning.settings import layout_of
from ds_dynatrain.integrations.shared.batches import GlobalBatches
from ds_dynatrain.integrations.shared.refusal import AXES, BLOCK, Refusal, refuse


def _is_on(name: str) -> Callable[[Any], bool]:
    return lambda trainer: bool(getattr(trainer, name))


def _has_callback(*names: str) -> Callable[[Any], bool]:
    kinds = tuple(getattr(callbacks, name) for name in names)
    return lambda trainer: any(isinstance(each, kinds) for each in trainer.callbacks)


STRATEGY = (
    Refusal(
        "a layout with pipe, tensor, expert or sequence",
        lambda strategy: any((layout_of(strategy.config).get(axis) or 1) > 1 for axis in AXES),
        "Lightning gives each rank samples of its own",
        "take data and zero_stage here, or the other axes in a loop with ds_dynatrain.initialize",
    ),
    Refusal(
        "dynatrain.resume",
        lambda strategy: bool(strategy.config[BLOCK].get("resume")),
        "Lightning restores its own counts by another way",
        'take trainer.fit(ckpt_path=...), which may be "last"',
    ),
    Refusal(
        "load_full_weights",
        lambda strategy: bool(strategy.load_full_weights),
        "a file of weights alone is no state of a training",
        "load the weights into the module before trainer.fit",
    ),
    Refusal(
        "exclude_frozen_parameters",
        lambda strategy: bool(strategy.exclude_frozen_parameters),
        "a checkpoint here has all state, for every world",
        "leave it out",
    ),
)
"""Refusals for a strategy, checked when it is made."""

TRAINER = (
    Refusal(
        "manual optimization",
        lambda trainer: not trainer.lightning_module.automatic_optimization,
        "how many backward passes an optimizer step has follows from the world",
        "leave automatic_optimization on, or write the loop with ds_dynatrain.initialize",
    ),
    Refusal(
        "training_step(dataloader_iter)",
        lambda trainer: is_param_in_hook_signature(
            trainer.lightning_module.training_step, "dataloader_iter", explicit=True
        ),
        "it draws batches by itself, and a change of the world would come between them",
        "take training_step(batch, batch_idx)",
    ),
    Refusal(
        "overfit_batches",
        _is_on("overfit_batches"),
        "it cuts an epoch by batches of one world",
        "give a smaller data set (torch.utils.data.Subset)",
    ),
    Refusal(
        "limit_train_batches",
        lambda trainer: trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run,
        "an epoch is all of the data set in every world",
        "give max_steps, or a smaller data set (torch.utils.data.Subset)",
    ),
    Refusal(
        "use_distributed_sampler=False",
        lambda trainer: not trainer._accelerator_connector.use_distributed_sampler,
        "samples are dealt by index in every world, not by a sampler that knows one",
        "leave it on, and put an order of your own into the data set itself",
    ),
    Refusal(
        "reload_dataloaders_every_n_epochs",
        _is_on("reload_dataloaders_every_n_epochs"),
        "the position in the data is counted in one data set",
        "leave it out, and let the data set's __getitem__ follow the epoch",
    ),
    Refusal(
        "GradientAccumulationScheduler",
        _has_callback("GradientAccumulationScheduler"),
        "accumulation follows from the world, and a global batch is the same size for the whole job",
        "give train_batch_size in the DeepSpeed configuration",
    ),
    Refusal(
        "StochasticWeightAveraging and WeightAveraging",
        _has_callback("StochasticWeightAveraging", "WeightAveraging"),
        "they keep a copy of the whole model, which no world holds",
        "average by engine.register_for_checkpointing, see docs/models.md",
    ),
    Refusal(
        "BatchSizeFinder and LearningRateFinder",
        _has_callback("BatchSizeFinder", "LearningRateFinder"),
        "they train and go back in the middle of a job",
        "find the number in a run of its own with Lightning's deepspeed strategy",
    ),
    Refusal(
        "BaseFinetuning and ModelPruning",
        _has_callback("BaseFinetuning", "ModelPruning"),
        "they change the optimizer's groups or the parameters behind the engine",
        "set requires_grad and call trainer.strategy.engine.update_param_groups(), see docs/models.md",
    ),
    Refusal(
        "SLURM's auto-requeue",
        lambda trainer: getattr(trainer.strategy.cluster_environment, "auto_requeue", False),
        "it saves at whichever line the signal comes, in the middle of an optimizer step",
        'take plugins=[SLURMEnvironment(auto_requeue=False)] and "dynatrain": {"fallback": {"on_sigterm": true, ...}}',
    ),
    Refusal(
        "OnExceptionCheckpoint and ModelCheckpoint(save_on_exception=True)",
        lambda trainer: (
            _has_callback("OnExceptionCheckpoint")(trainer)
            or any(getattr(each, "save_on_exception", False) for each in trainer.checkpoint_callbacks)
        ),
        "a save takes all processes, and one that has failed is no longer with them",
        'take "dynatrain": {"fallback": {...}}, which saves by itself, see docs/checkpoint.md',
    ),
)
"""Refusals for a Trainer and its module, checked before the engine is made."""


def refuse_strategy(strategy: Any) -> None:
    """Raise UnsupportedError for the first setting of the strategy that cannot follow the world."""
    refuse(STRATEGY, strategy)


def refuse_trainer(trainer: Any) -> None:
    """Raise UnsupportedError for the first feature of the Trainer that cannot follow the world."""
    refuse(TRAINER, trainer)


def refuse_loader(loader: object, has_one: bool) -> None:
    """Raise UnsupportedError for a second training loader, and DataError if the samples of the loader cannot be divided
    among a different number of ranks.
    """
    if has_one:
        raise UnsupportedError(
            "several training DataLoaders: a global batch is of one; join the data sets "
            "(torch.utils.data.ConcatDataset, StackDataset)"
        )
    if not isinstance(loader, DataLoader):
        raise UnsupportedError(
            f"the training loader is a {type(loader).__name__}: its samples cannot be dealt again when the world "
            "changes; give a torch DataLoader over a map-style data set"
        )
    DataSource.build(loader)


def refuse_other_epochs(training: GlobalBatches, batch: int, saved: Mapping[str, Any]) -> None:
    """Raise ConfigError for a stock checkpoint whose job's epochs are not a whole number of this job's steps.

    saved: the DeepSpeed configuration of the checkpoint, which has the same global batch size.

    Lightning's sampler pads the data set to equal parts for all ranks, and its accumulation windows continue in the
    next epoch.
    """
    micro, accumulation = saved.get("train_micro_batch_size_per_gpu"), saved.get("gradient_accumulation_steps", 1)
    if not (isinstance(micro, int) and isinstance(accumulation, int)):
        return
    samples, steps = len(training.dataset), len(training)
    of_rank = -(-samples // (batch // (micro * accumulation)))
    micro_batches = of_rank // micro if training.drop_last else -(-of_rank // micro)
    if micro_batches != steps * accumulation:
        raise ConfigError(
            f"the checkpoint is of a job whose epochs of {samples} samples have {micro_batches} micro-batches of each "
            f"rank, {accumulation} for an optimizer step; here an epoch has {steps} whole steps of {batch} samples. "
            f"Train on a data set whose length is a multiple of {batch}, or start from the checkpoint's weights alone"
        )
