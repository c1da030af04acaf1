"""DeepSpeed's curriculum as an order of samples that is the same in every world.

DeepSpeed's sampler draws each global batch on rank 0, from a random stream that its `state_dict` does not contain, and
sends the batch to the other ranks. In this package every working member draws all batches itself, starting from the
configured seed. A global batch thus depends only on its number, and a position in the data is a number, as in any other
order. Each training process must therefore be able to read the index files. Each process keeps DeepSpeed's clusters
(lists of samples by difficulty) in a folder of its own under `data_cluster_path`, and deletes the folder when the
process ends.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

from ds_dynatrain.adapters.zero.no_alloc import silent_communication
from ds_dynatrain.data import EpochOrder
from ds_dynatrain.errors import DataError

KEPT = 256
"""Number of drawn global batches to keep, because loader workers read ahead and a switch may go back."""

Schedule = Mapping[str, Callable[[int], Any]]


class CurriculumOrder(EpochOrder):
    """The order of samples that `data_efficiency.data_sampling.curriculum_learning` configures."""

    def __init__(self, length: int, train_batch_size: int, block: dict[str, Any]) -> None:
        """Make the order of a data set.

        length: the number of samples in the data set.
        train_batch_size: the number of samples in a global batch.
        block: DeepSpeed's parsed `data_efficiency`.
        """
        self.block = block
        self.schedule: Schedule = {}
        self._sampler: Any = None
        self._remove_folder: weakref.finalize[..., Any] | None = None
        self._next = 0
        self._kept: OrderedDict[int, tuple[torch.Tensor, dict[str, Any]]] = OrderedDict()
        super().__init__(length, train_batch_size, seed=int(block["seed"]))

    @property
    def steps(self) -> int:
        """Number of global batches in one pass over the data: as in DeepSpeed, those of all `num_epochs` plus one."""
        return self.length * int(self.block["data_sampling"]["num_epochs"]) // self.train_batch_size + 1

    def __len__(self) -> int:
        """Return the number of samples in one pass over the data."""
        return self.steps * self.train_batch_size

    def samples(self, step: int) -> int:
        """Return the number of samples in global batch `step`. Raises DataError if a pass over the data has fewer
        batches.
        """
        if not 0 <= step < self.steps:
            raise DataError(
                f"step {step} is outside a pass of {self.steps} global batches; load a position of 0 to "
                f"{self.steps - 1}, or raise data_efficiency.data_sampling.num_epochs"
            )
        return self.train_batch_size

    def batches(self, epoch: int, step: int) -> Iterator[torch.Tensor]:
        """Yield the samples' indices in the data set, for each global batch from `step` to the end of the pass."""
        for number in range(step, self.steps):
            yield self._draw(epoch * self.steps + number)[0]

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return DeepSpeed's difficulties and counts when global batch `step` was drawn, keyed by DeepSpeed's names."""
        return copy.deepcopy(self._draw(epoch * self.steps + step)[1])

    def describe(self) -> dict[str, Any]:
        """Return the settings on which the meaning of a saved position depends. Paths are left out."""
        where = {"data_cluster_path", "index_to_sample_path", "index_to_metric_path"}
        whole = json.dumps(self.block, default=str)
        block = json.loads(whole, object_hook=lambda part: {key: part[key] for key in part.keys() - where})
        text = json.dumps(block, sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return {
            "length": self.length,
            "train_batch_size": self.train_batch_size,
            "curriculum": digest,
            "schedules": sorted(self.schedule),
        }

    def set_schedule(self, schedule: Schedule) -> None:
        """Set the functions that the schedule type `custom` uses: a map from each metric to a function of the step."""
        self.schedule = dict(schedule)
        self._sampler = None

    def _draw(self, number: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return a global batch's sample indices, and the state for DeepSpeed's post-processing function."""
        if number not in self._kept:
            if self._sampler is None or number < self._next:
                self._start()
            while self._next <= number:
                self._draw_next()
        return self._kept[number]

    def _start(self) -> None:
        """Start DeepSpeed's sampler anew.

        The sampler gets the arguments that rank 0 has in a world of one rank, and an empty folder for its clusters
        (lists of samples by difficulty).
        """
        block = copy.deepcopy(self.block)
        curriculum = block["data_sampling"]["curriculum_learning"]
        above = Path(curriculum["data_cluster_path"])
        above.mkdir(parents=True, exist_ok=True)
        if self._remove_folder is not None:
            self._remove_folder()
        curriculum["data_cluster_path"] = folder = tempfile.mkdtemp(prefix="member-", dir=above)
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        with silent_communication():
            self._sampler = DeepSpeedDataSampler(block, self.length, self.train_batch_size, 0, 1, None, 1, 0)
        self._sampler.set_custom_curriculum_learning_schedule(self.schedule)
        self._next = 0
        self._kept.clear()

    def _draw_next(self) -> None:
        sampler = self._sampler
        with silent_communication():
            sampler.get_next_global_batch()
        if len(sampler.batch) != self.train_batch_size:
            raise DataError(
                f"global batch {self._next} of the curriculum has {len(sampler.batch)} of {self.train_batch_size} "
                "samples: a cluster holds too few for its share; raise min_difficulty of the metrics in "
                "data_efficiency.data_sampling.curriculum_learning"
            )
        sampler.consumed_samples += len(sampler.batch)
        state = {name: value for name, value in sampler.state_dict().items() if name != "np_rng_state"}
        self._kept[self._next] = torch.tensor(sampler.batch, dtype=torch.int64), copy.deepcopy(state)
        self._next += 1
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
