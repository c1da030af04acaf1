"""DeepSpeed's pipeline engine where columns run different numbers of micro-batches.

A column is a data index, one rank of each stage; DeepSpeed runs one schedule in each. Columns meet in its last
instructions alone, where gradients and losses are added up, so each may have a schedule of its own length. What has to
change is by what sums are divided: by the mean number of micro-batches of a column, in place of
`gradient_accumulation_steps()`, which is that of the longest one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import BackwardPass

from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.space import Columns, Layout


class ColumnEngine(PipelineEngine):  # type: ignore[misc]
    """Where all columns run as many micro-batches it is DeepSpeed's engine."""

    dp_group_loss: torch.Tensor
    _columns: Columns
    _divisor: float
    """By which a column divides the sum of its losses."""

    def _enter_columns(self, layout: Layout) -> None:
        """Be in a column of a layout, whose configuration and grid are in place."""
        sizes = int(self.train_batch_size()), int(self.train_micro_batch_size_per_gpu())
        self._columns = Columns.of(*sizes, layout.data, layout.shares)
        self._divisor = self._columns.mean
        self.micro_batches = self._columns.counts[self.grid.get_data_parallel_id()]

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """DeepSpeed's; `seed_layers` seeds by the passes of the longest column, so that columns stay alike."""
        passes = self.module.micro_offset
        loss: torch.Tensor = super().train_batch(data_iter)
        self.module.micro_offset = passes + self._columns.longest
        return loss

    def eval_batch(
        self,
        data_iter: Any,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """DeepSpeed's: as many micro-batches as in training, or so many in every column, and the mean over all."""
        if num_micro_batches is None:
            longest, divisor = self._columns.longest, self._columns.mean
        else:
            longest, divisor = num_micro_batches, float(num_micro_batches)
        passes = self.module.micro_offset
        with replaced(self, "_divisor", divisor):
            found = super().eval_batch(
                data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
            )
        self.module.micro_offset = passes + longest
        return found

    def _scale_loss_by_gas(self, prescaled_loss: Any, eval_micro_batches: int | None = None) -> Any:
        return super()._scale_loss_by_gas(prescaled_loss, eval_micro_batches=self._divisor)

    def _aggregate_total_loss(self) -> torch.Tensor:
        """DeepSpeed's; the mean loss of this column is over its own micro-batches."""
        found: torch.Tensor = super()._aggregate_total_loss()
        if not self._columns.is_even:
            self.dp_group_loss = self.dp_group_loss * (self._divisor / self.micro_batches)
        return found

    def _exec_backward_pass(self, buffer_id: int) -> None:
        if self._columns.is_even or not self.is_last_stage():
            super()._exec_backward_pass(buffer_id)
        else:
            DeepSpeedEngine.backward(self, self.loss / self._divisor, scale_wrt_gas=False)

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        BackwardPass: _exec_backward_pass,
    }
