"""The extension that makes a job exact (bitwise reproducible): it checks the job, and records each step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.exact.adapters.refusals import (
    exact_config,
    machine,
    refuse_inexact_job,
    refuse_inexact_model,
    unchanged_buffers,
)
from ds_dynatrain.exact.bits.rows import EXACT_STAGES, usage
from ds_dynatrain.exact.bits.steps import ExactSteps
from ds_dynatrain.extension import Extension
from ds_dynatrain.space import Layout
from ds_dynatrain.support.checks import is_low


class Exact(Extension):
    """The extension for `"exact": true` in the `dynatrain` block, which makes a job bitwise reproducible.

    steps: the value of `engine.exact`.
    """

    name = "exact"
    has_leaves = True
    steps: ExactSteps

    def __init__(self, settings: DynatrainConfig) -> None:
        self._settings = settings
        self._every_steps: int = settings.exact.digest_every_steps

    def check_job(self, config: Mapping[str, Any], model: Any, mpu: Any) -> None:
        """Raise UnsupportedError if the job uses anything that was not tested in exact (bitwise reproducible) jobs.

        Raises ConfigError if a batch size is missing.
        """
        batch, micro = (config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
        if batch is None or micro is None:
            raise ConfigError(
                "dynatrain.exact: a leaf is train_micro_batch_size_per_gpu of train_batch_size samples, in every "
                f"world: give both, not {batch} and {micro}"
            )
        refuse_inexact_job(config, model, mpu)
        if self._settings.balance is not None and self._settings.balance.measures:
            raise usage("exact: a key of the dynatrain block").error("dynatrain.balance beside dynatrain.exact")

    def check_model(self, config: Mapping[str, Any], model: Any, mpu: Any) -> None:
        """Raise UnsupportedError if the model has parts that were not tested in exact jobs."""
        refuse_inexact_model(config, model, mpu)

    def deepspeed_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return DeepSpeed's configuration with settings that make all ZeRO stages bitwise identical."""
        return exact_config(config)

    def described(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the settings that determine how this process rounds."""
        return {f"dynatrain.exact: {name}": value for name, value in machine(is_low(config)).items()}

    def engine_class(self, kind: type[Any]) -> type[Any]:
        """Return the engine class that trains leaves (micro-batches of fixed size), with or without pipelines."""
        from ds_dynatrain.engine.pipeline_engine import DynatrainPipelineEngine
        from ds_dynatrain.exact.adapters.exact_engine import LeafEngine
        from ds_dynatrain.exact.adapters.exact_pipeline import LeafPipelineEngine

        return LeafPipelineEngine if issubclass(kind, DynatrainPipelineEngine) else LeafEngine

    def check_layout(self, layout: Layout, batch: BatchSizes, has_stages: bool) -> None:
        """Raise SwitchRefused if the layout's axes or ZeRO stage would add gradients in a different order."""
        alike = Layout(data=layout.data, zero_stage=layout.zero_stage, order=layout.order)
        if has_stages:
            alike = alike.replace(pipe=layout.pipe, boundaries=layout.boundaries, order=layout.order)
            if batch.train_batch_size % batch.micro_batch_size:
                raise usage("exact: a smaller last leaf").refused(
                    f"train_batch_size {batch.train_batch_size} in leaves of {batch.micro_batch_size} samples"
                )
        if layout != alike or layout.zero_stage not in EXACT_STAGES:
            raise usage("exact: a layout").refused(str(layout))

    def attach(self, engine: Any) -> None:
        """Start recording the steps of this engine."""
        super().attach(engine)
        self.steps = ExactSteps(engine._parts, self._every_steps)

    def around_forward(self) -> AbstractContextManager[None]:
        """Return a context manager that raises UnsupportedError if a forward pass of training changes a buffer."""
        module = self.engine.module
        return unchanged_buffers(module) if module.training else nullcontext()

    def after_forward(self, output: Any) -> None:
        """Keep the output of the forward pass for the record of the step if it is a loss."""
        self.steps.note_loss(output)

    def after_backward(self, loss: Any) -> None:
        """Record the loss passed to `engine.backward`, which may differ from the output of the forward pass."""
        self.steps.note_loss(loss)

    def after_batch(self) -> None:
        """Keep the losses of the global batch that the optimizer has just used."""
        self.steps.close_batch()

    def after_step(self) -> None:
        """Sum the losses, gradient norm and digests of the step over all ranks, and write them. All ranks must call
        this.
        """
        self.steps.finish_step()

    def on_batch_forgotten(self) -> None:
        """Discard the losses of a global batch whose optimizer step has not been taken."""
        self.steps.forget_batch()
