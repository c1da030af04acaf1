"""Ranks of plain torch: FSDP2 (fp32 shards, computing in bf16), saved and loaded by `torch.distributed.checkpoint`.

It shards as ZeRO-3 does and has no other stage, so of a change it takes part in the number of ranks alone.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as td
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ds_dynatrain.comparison.digests import of_torch
from ds_dynatrain.comparison.job import BATCH, Task
from ds_dynatrain.comparison.notes import Notes
from ds_dynatrain.comparison.workload import LEARNING_RATE, Samples, model_of, share


class Trainer:
    """A sharded model, its optimizer, and the number of steps done."""

    def __init__(self, task: Task, notes: Notes) -> None:
        self.notes, self.done = notes, 0
        if not td.is_initialized():
            td.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (td.get_world_size(),))
        self.model = model_of(task.size)
        notes.write("model", parameters=sum(parameter.numel() for parameter in self.model.parameters()))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._samples = Samples((task.before + task.after + 1) * BATCH)

    def step(self) -> None:
        """One step, noted."""
        tokens, numbers = share(self._samples, self.done, td.get_rank(), td.get_world_size())
        begin = time.monotonic()
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        seconds = time.monotonic() - begin
        self.notes.write("step", number=self.done, seconds=seconds, loss=loss.item(), samples=numbers)

    def state(self) -> dict[str, Any]:
        """What is saved, by reference."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "done": self.done}

    def load(self, folder: str) -> None:
        """Take over what was saved, in whatever world."""
        state = self.state()
        load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.done = state["done"]

    def digest(self, when: str) -> None:
        """Note the digest of all state; a collective."""
        self.notes.write("digest", when=when, value=of_torch(self.model, self.optimizer))


def run(task: Task, notes: Notes) -> None:
    """The old job or the new one."""
    torch.set_num_threads(1)
    (_old if task.part == "old" else _new)(task, notes)
    td.destroy_process_group()


def _old(task: Task, notes: Notes) -> None:
    trainer = Trainer(task, notes)
    for _ in range(task.before):
        trainer.step()
    trainer.digest("before")
    notes.begin()
    with notes.phase("save"):
        save(trainer.state(), checkpoint_id=task.folder)
        td.barrier()
    notes.stamp("saved")
    notes.memory()


def _new(task: Task, notes: Notes) -> None:
    with notes.phase("initialize"):
        trainer = Trainer(task, notes)
    with notes.phase("load"):
        trainer.load(task.folder)
    notes.stamp("ready")
    notes.write("resumed", step=trainer.done)
    notes.memory()
    trainer.digest("after")
    with notes.first_step():
        trainer.step()
    for _ in range(task.after - 1):
        trainer.step()
