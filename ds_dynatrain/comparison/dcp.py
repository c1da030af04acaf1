"""Ranks of plain torch: FSDP2 (fp32 shards, computing in bf16), saved and loaded by `torch.distributed.checkpoint`.

FSDP2 always shards the way ZeRO stage 3 does, so only the number of ranks changes here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ds_dynatrain.comparison import workload
from ds_dynatrain.comparison.job import MOMENTS, Task
from ds_dynatrain.comparison.notes import Notes


class DcpTrainer(workload.Trainer):
    """A trainer whose model is sharded by FSDP2."""

    def __init__(self, task: Task, notes: Notes) -> None:
        super().__init__(task, notes)
        if not td.is_initialized():
            td.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (td.get_world_size(),))
        self.model = self.model_made()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=workload.LEARNING_RATE)

    def train(self, tokens: Tensor) -> Tensor:
        """Train one micro-batch, which is a whole optimizer step. Return its loss."""
        loss: Tensor = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss

    def state(self) -> Iterator[Tensor]:
        """Yield every weight (fp32, so there is no separate master) and its moments, as whole tensors.

        All ranks must call this.
        """
        for parameter in self.model.parameters():
            for value in (parameter, *(self.optimizer.state[parameter][name] for name in MOMENTS)):
                yield value.full_tensor()

    def _saved(self) -> dict[str, Any]:
        """Return the state to save. It refers to the tensors of the model and the optimizer without copying them."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "done": self.done}

    def save(self) -> None:
        """Save all state, and wait until all ranks have saved theirs."""
        save(self._saved(), checkpoint_id=self.task.folder)
        td.barrier()

    def load(self) -> None:
        """Load the state that `save` wrote. The number of ranks may differ."""
        state = self._saved()
        load(state, checkpoint_id=self.task.folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.done = state["done"]


def run(task: Task, notes: Notes) -> None:
    """Run the job before or after the restart, as the task says."""
    workload.restarted(task, notes, DcpTrainer)
    td.destroy_process_group()
