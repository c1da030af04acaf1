"""Thin forwarders: `initialize` hands these out once, and they speak for whatever DeepSpeed has at present."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ds_dynatrain.engine.engine import DynatrainEngine


class OptimizerForwarder:
    """The optimizer of the present world. Attributes (`param_groups`, `state_dict`, ...) are those of
    `engine.optimizer`, which is DeepSpeed's own object and another one after a switch."""

    def __init__(self, engine: DynatrainEngine) -> None:
        self._engine = engine

    @property
    def current(self) -> Any:
        """DeepSpeed's present optimizer object."""
        return self._engine.optimizer

    @property
    def basic(self) -> torch.optim.Optimizer:
        """The torch optimizer underneath: one object for the whole job."""
        return self._engine.basic_optimizer  # type: ignore[no-any-return]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The present parameter groups."""
        return self.current.param_groups  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.optimizer, name)

    def __repr__(self) -> str:
        return f"OptimizerForwarder({self.current!r})"
