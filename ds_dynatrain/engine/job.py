"""What is settled once for the whole job, on every process alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_dynatrain.adapters.incoming import Row
from ds_dynatrain.adapters.settings import BatchSizes
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.extension import Extension
from ds_dynatrain.support.axes import PIPELINE, ULYSSES, Features

OnIdle = Callable[[Any], object]
"""Of the user's: called with the engine."""


@dataclass(frozen=True)
class Job:
    """What is settled once for the whole job, the same on every process.

    features: what the model has in it. rows: its parameters, and described: the configuration, as every process has to
    have them. extensions: in the order in which their hooks are called; machine: what they want to be equal on every
    process, by its name. number: of this engine
    among those that the process has made, from 1.
    """

    settings: DynatrainConfig
    user_config: dict[str, Any]
    batch_sizes: BatchSizes
    job_seed: int
    features: Features
    rows: list[Row]
    described: dict[str, str]
    extensions: tuple[Extension, ...]
    machine: dict[str, str]
    on_idle: OnIdle | None
    number: int = 1

    @property
    def has_stages(self) -> bool:
        """Whether the model is a PipelineModule, in whatever number of stages."""
        return PIPELINE in self.features

    @property
    def has_sequence(self) -> bool:
        """Whether the model can have a sequence axis."""
        return ULYSSES in self.features
