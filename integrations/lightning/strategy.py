"""Lightning's DeepSpeed strategy over an engine whose world changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import deepspeed
import torch.distributed as td
from lightning.fabric.strategies.deepspeed import _validate_device_index_selection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

import ds_dynatrain
from ds_dynatrain.adapters.deepspeed.start import start_without_compiler
from ds_dynatrain.elastic.environment import worker_place
from ds_dynatrain.engine.changes import Change
from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.integrations.lightning import refusals, settings
from ds_dynatrain.integrations.lightning.carried import PROGRESS, TrainerProgress
from ds_dynatrain.integrations.lightning.checkpoints import Checkpoints
from ds_dynatrain.integrations.lightning.collectives import Collectives, surviving
from ds_dynatrain.integrations.lightning.steps import Window, WindowOptimization
from ds_dynatrain.integrations.shared.batches import GlobalBatches, is_stream
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.report.monitors import metrics

if TYPE_CHECKING:
    from typing import Any as Below
else:
    Below = DeepSpeedStrategy


ENDLESS = 2**40
"""More global batches than a pass over any stream has."""


class Windows(GlobalBatches):
    """Training loader over which Lightning iterates. Its items are `Window`s."""

    @property
    def is_at_end(self) -> bool:
        """Whether the global batch that was fetched last is the last one of its pass."""
        return not self.loader.order.size(self.loader.cursor)

    def __len__(self) -> int:
        """Return the number of global batches in a pass; more than there are in a stream, whose end is not known.

        Lightning fetches a batch ahead if it knows no length, and would do so in a world that does not train it.
        """
        return ENDLESS if is_stream(self.dataset) else super().__len__()

    def __iter__(self) -> Iterator[Any]:
        return (Window(parts) for parts in super().__iter__())


class DynatrainStrategy(Checkpoints, Collectives, Below):
    """Lightning's DeepSpeedStrategy, with its arguments, over our engine.

    config: DeepSpeed's configuration, with a `dynatrain` block; by default Lightning's own, stage 2, over all
        processes.
    trust_pickle: whether to run code in checkpoints of Lightning's own strategy that hold more than tensors and plain
        values.

    Raises ConfigError if the configuration has no block, and UnsupportedError, naming the feature, for features that
    cannot follow the world.
    """

    strategy_name = "dynatrain"

    def __init__(self, *arguments: Any, trust_pickle: bool = False, **named: Any) -> None:
        super().__init__(*arguments, **named)
        is_given = self._load_config(named.get("config")) is not None
        self.config: dict[str, Any] = settings.with_block(self.config, is_given)
        self.trust_pickle = trust_pickle
        self._engine: Any = None
        self._training: Windows | None = None
        self._sizes: settings.Sizes | None = None
        self._schedule: Any = None
        self._steps: WindowOptimization | None = None
        refusals.refuse_strategy(self)

    @property
    def engine(self) -> Any:
        """The ds_dynatrain engine, from the start of `trainer.fit` on; None before that."""
        return self._engine

    @property
    def samples(self) -> int:
        """Number of this rank's own samples in the micro-batch of `training_step`.

        It is 0 if the micro-batch repeats another rank's sample.
        """
        return 0 if self._steps is None else self._steps.samples

    # ---- the world ---------------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return self._engine is not None and bool(self._engine.idle)

    @property
    def world_size(self) -> int:
        """Size of the current world or, before the engine is made, the number of started processes."""
        if self._engine is None:
            return int(super().world_size)
        return 1 if self._is_idle else td.get_world_size()

    @property
    def global_rank(self) -> int:
        """Rank in the current world; -1 on an idle process."""
        return int(super().global_rank if self._engine is None else self._engine.rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments of the sampler that gives each rank its evaluation samples."""
        return {"num_replicas": self.world_size, "rank": max(self.global_rank, 0)}

    def _see_change(self, change: Change) -> None:
        """Refresh who logs and who evaluates what. Called before a batch is fetched in another world or ZeRO stage."""
        self.set_world_ranks()
        self.lightning_module.trainer.fit_loop.epoch_loop.val_loop._combined_loader = None

    def _count(self) -> None:
        """Set Lightning's counts to those of the job. Called when a global batch has been fetched."""
        if self._training is not None:
            step = self._training.loader.cursor.step
            self._progress.settle(self._engine.global_steps, step - 1, is_last=self._training.is_at_end)

    def _log_switch(self, event: SwitchEvent) -> None:
        """Give the numbers of a switch to all loggers, which write them on rank 0."""
        trainer = self.lightning_module.trainer
        named = {f"dynatrain/{name}": value for name, value in metrics(event).items()}
        for each in trainer.loggers:
            try:
                each.log_metrics(named, step=trainer.global_step)
            except Exception as error:  # an error of a logger must not make the switch fail
                logger.warning("switch %d was not written to Lightning's loggers (%s)", event.generation, error)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy for `Trainer(strategy="dynatrain")`."""
        strategy_registry.register(cls.strategy_name, cls, description="DeepSpeed over a world that changes")

    # ---- the start ---------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Set up the environment the way Lightning does, on CPUs too.

        Raises UnsupportedError, naming the feature, for features that cannot follow the world.
        """
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            refusals.refuse_trainer(trainer)
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Set up process groups the way Lightning does, on CPUs too; in an elastic launch, join the job."""
        if self.root_device.type != "cpu":
            _validate_device_index_selection(self.parallel_devices)
        reset_seed()
        self.set_world_ranks()
        start_without_compiler()
        if worker_place() is None:
            self._init_deepspeed_distributed()
            return
        self._process_group_backend = self._get_process_group_backend()
        ds_dynatrain.init_distributed(self._process_group_backend, timeout=self._timeout)
        self.set_world_ranks()  # now of the job, no longer of this node

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context manager around `configure_model`, as in Lightning.

        At ZeRO 3, it partitions parameters as they are made.
        """
        self._init_config_if_needed()
        config = settings.for_model(self.config)
        with deepspeed.zero.Init(
            enabled=self.zero_stage_3, remote_device=self.remote_device, config_dict_or_path=config
        ):
            yield

    def setup(self, trainer: Any) -> None:
        """Make the engine the way Lightning does. After `trainer.fit`, use the current engine for evaluations.

        Raises UnsupportedError for a second `fit`, and for an evaluation without a previous `fit`.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            self._evaluate_with_engine(trainer)
            return
        if self._engine is not None:
            raise UnsupportedError(
                "a second trainer.fit: the job of the first one is still there, with all its processes; give "
                "max_epochs to the first one, or go on in another run by ckpt_path"
            )
        self._settled()
        if self._training is not None and is_stream(self._training.dataset):
            settings.settle_stream(trainer)
        self._steps = trainer.fit_loop.epoch_loop.automatic_optimization = WindowOptimization(trainer)
        super().setup(trainer)
        engine, self._progress = self.engine, TrainerProgress(trainer)
        engine.on_change(self._see_change)
        engine.on_switch(self._log_switch)
        engine.register_for_checkpointing(PROGRESS, self._progress)
        self._follow_metrics(self.lightning_module)
        trainer.fit_loop.epoch_loop.val_loop.run = surviving(trainer.fit_loop.epoch_loop.val_loop)
        if settings.saves_on_sigterm(self.config) or worker_place() is not None:
            _leave_sigterm(trainer)
        self.set_world_ranks()
        if self.cluster_environment.creates_processes_externally:
            self._launcher = None  # the launcher would compare the current world with the one that was started
        _leave_windows(self.lightning_module)
        if self._is_idle:
            trainer.num_sanity_val_steps = 0

    def _evaluate_with_engine(self, trainer: Any) -> None:
        """Use the engine made by `fit` in place of the module."""
        if self._engine is None or self._engine.module is not self.lightning_module:
            raise UnsupportedError(
                f"trainer.{trainer.state.fn.value} without trainer.fit of this module before: there is no engine with "
                'its weights; evaluate with another Trainer (strategy="deepspeed" or "ddp")'
            )
        self.accelerator.setup(trainer)
        self.lightning_module.to(self.root_device)  # at its end, `fit` has moved logged metrics to the CPU
        self.model = self._engine

    def _settled(self) -> settings.Sizes:
        """Return the batch sizes from the training DataLoader.

        Requests the DataLoader now if that has not happened yet.
        """
        if self._sizes is None:
            self.lightning_module.trainer.fit_loop.setup_data()
        if self._sizes is None:
            raise ConfigError("trainer.fit: there is no training DataLoader; give train_dataloaders")
        return self._sizes

    def _auto_select_batch_size(self) -> int:
        """Return the batch size of the training DataLoader."""
        return self._settled().micro_batch

    def _init_optimizers(self) -> tuple[Any, Any]:
        """Make optimizers the way Lightning does, but keep the schedule away from the engine. It stays Lightning's."""
        optimizer, self._schedule = super()._init_optimizers()
        return optimizer, None

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        """Make our engine in place of DeepSpeed's."""
        self._engine, forwarder, _, schedule = ds_dynatrain.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=[each for each in model.parameters() if each.requires_grad],
            config=settings.for_engine(self.config, self._settled()),
            dist_init_required=False,
        )
        if schedule is not None:  # one from the configuration refers to an optimizer that a switch replaces
            schedule.optimizer = forwarder
        if self._training is not None:
            self._training.bind(self._engine, self._count, reshuffle=True)
        return self._engine, forwarder

    def _initialize_deepspeed_train(self, model: Any) -> None:
        """Make the engine the way Lightning does.

        Lightning adopts the engine's schedule; a schedule from `configure_optimizers` replaces it.
        """
        super()._initialize_deepspeed_train(model)
        if self._schedule is not None:
            self.lr_scheduler_configs = [self._schedule]

    def teardown(self) -> None:
        """Tear down everything except the engine, which stays for evaluations until the script ends."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # ---- the batches -------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the training DataLoader as a loader of global batches. Return other DataLoaders unchanged."""
        trainer = self.lightning_module.trainer
        if trainer.state.stage != RunningStage.TRAINING:
            return dataloader
        refusals.refuse_loader(dataloader, self._training is not None)
        size, accumulation = int(dataloader.batch_size), int(trainer.accumulate_grad_batches)
        self._sizes = settings.sizes_of(self.config, size, accumulation, self.world_size)
        trainer.accumulate_grad_batches = 1  # a batch of this loader is an optimizer step
        self._training = Windows(dataloader, self._sizes.global_batch, PROGRESS)
        return self._training

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Move a batch the way Lightning does, but leave a global batch where it is.

        A global batch's micro-batches are moved one by one, when each is trained.
        """
        return batch if isinstance(batch, Window) else super().batch_to_device(batch, device, dataloader_idx)


def _leave_windows(module: Any) -> None:
    """Skip Lightning's hook before the transfer for global batches. It is called for each micro-batch later."""
    stock = module._on_before_batch_transfer

    def hook(batch: Any, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, Window) else stock(batch, dataloader_idx)

    module._on_before_batch_transfer = hook


def _leave_sigterm(trainer: Any) -> None:
    """Leave SIGTERM to the engine, which saves on it or leaves the job.

    Lightning would broadcast that it has come, from its handler and at every step.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
