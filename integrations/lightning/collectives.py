"""Collectives that Lightning's loops call, over the working ranks of a world that may be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from ds_dynatrain.errors import WorldChanged
from ds_dynatrain.integrations.shared.together import together
from ds_dynatrain.report import logger

if TYPE_CHECKING:
    from typing import Any as Below
else:
    Below = object

T = TypeVar("T")


class Collectives(Below):
    """Mix-in over Lightning's DeepSpeedStrategy whose collectives cover the working ranks.

    In a world that is lost, a collective of the training returns this process's own part, because its global batch is
    discarded. An evaluation ends with WorldChanged, because its numbers would be those of a part of the samples.
    """

    engine: Any
    lightning_module: Any

    @property
    def is_lost(self) -> bool:
        """Whether the world was lost in this global batch or since it was trained."""
        return self.engine is not None and bool(self.engine.is_discarded)

    def _together(self, name: str, call: Callable[[], T], alone: T) -> T:
        return self._whole(together(self.engine, name, call, alone))

    def _whole(self, found: T) -> T:
        """Return a result. Raises WorldChanged outside of training if the world was lost."""
        if self.is_lost and not self.lightning_module.trainer.training:
            raise WorldChanged("the world was lost in this evaluation, which saw only a part of the samples")
        return found

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        """Evaluate a batch the way Lightning does. Raises WorldChanged if the world is lost meanwhile."""
        return self._whole(super().validation_step(*arguments, **named))

    def test_step(self, *arguments: Any, **named: Any) -> Any:
        """Test a batch the way Lightning does. Raises WorldChanged if the world is lost meanwhile."""
        return self._whole(super().test_step(*arguments, **named))

    def predict_step(self, *arguments: Any, **named: Any) -> Any:
        """Predict a batch the way Lightning does. Raises WorldChanged if the world is lost meanwhile."""
        return self._whole(super().predict_step(*arguments, **named))

    def barrier(self, *arguments: Any, **named: Any) -> None:
        """Wait for the working processes, the way Lightning does. An idle process does not wait."""
        self._together("a barrier", lambda: super(Collectives, self).barrier(*arguments, **named), None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast among the working processes, the way Lightning does.

        An idle process, and one whose world is lost meanwhile, gets its own object back.
        """
        return self._together("a broadcast", lambda: super(Collectives, self).broadcast(obj, src), obj)

    def reduce(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        """Reduce over the working processes, the way Lightning does.

        An idle process, and one whose world is lost meanwhile, gets its own tensor back.
        """
        own = tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
        return self._together("a reduce", lambda: super(Collectives, self).reduce(tensor, *arguments, **named), own)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide together, the way Lightning does. Returns False in a lost world, where nothing is to be decided."""
        return bool(super().reduce_boolean_decision(decision, all)) and not self.is_lost

    def all_gather(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        """Gather from the working processes, the way Lightning does.

        An idle process, and one whose world is lost meanwhile, gets its own tensor back.
        """
        gather = super().all_gather
        return self._together("a gather", lambda: gather(tensor, *arguments, **named), tensor)

    def _follow_metrics(self, module: torch.nn.Module) -> None:
        """Have the module's metrics gather over a world that may be lost."""

        def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
            return self._together("a metric", lambda: gather_all_tensors(tensor, group), [tensor])

        for metric in module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is None:
                metric.dist_sync_fn = gather


def surviving(loop: _EvaluationLoop) -> Callable[[], Any]:
    """Return a `run` for the evaluations of a training. An evaluation ends early if the world is lost in it."""
    stock = loop.run

    def run() -> Any:
        try:
            return stock()
        except WorldChanged as error:
            logger.warning(
                "step %d: the evaluation is left out, for the world has changed in it (%s); the next one is made when "
                "it is due",
                *(loop.trainer.global_step, error),
            )
            loop._on_evaluation_model_train()
            loop.trainer._logger_connector.reset_results()
            return []

    return run
