"""What DeepSpeed's modules keep about "the" world: its groups, by axis, and the `mpu` that it asks for them.

`point_at` sets all of it for a world of ours, `forget` clears it. Under a layout of data (and expert) alone it is what
DeepSpeed itself has without an `mpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Protocol

import torch.distributed as td
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups

from ds_dynatrain.space import Layout

KIND_OF_NAME: Mapping[str, str] = {
    "data_parallel": "data_only",
    "sequence_parallel": "sequence",
    "sequence_data_parallel": "data",
    "tensor_model_parallel": "tensor",
    "slice_parallel": "tensor",
    "pipe_parallel": "pipe",
    "pipeline_model_parallel": "pipe",
    "model_parallel": "model",
}
"""DeepSpeed's name for an axis in the methods of an `mpu` -> the kind of group that answers."""


class Groups(Protocol):
    """What a world tells: its layout, its group of each kind of `peers.KINDS`, and whether the model can have a
    sequence axis.
    """

    layout: Layout
    has_sequence: bool

    def group(self, kind: str) -> td.ProcessGroup:
        """The group of a kind."""

    def ranks(self, kind: str) -> tuple[int, ...]:
        """Its ranks in the world."""

    def tie(self, stages: tuple[int, ...]) -> td.ProcessGroup:
        """The group of some stages of this rank's pipeline, which share a tie."""


def is_wide(layout: Layout) -> bool:
    """Whether a layout needs an `mpu`: an axis besides data and expert is above 1."""
    return layout.pipe * layout.sequence * layout.tensor > 1


def mpu_of(world: Groups) -> SimpleNamespace:
    """An object that answers what DeepSpeed asks of an `mpu`, for as long as the world lives.

    `model_parallel` is pipe x tensor. (DeepSpeed's own for sequence parallelism says sequence there: ZeRO then adds
    norms of gradients up that are whole already, and clips too much.) `get_data_parallel_group` is ZeRO's group, which
    stage 3 cuts parameters over; size and rank are those of the data axis, which share a batch.
    """
    answers: dict[str, Callable[[], object]] = {}
    for name, kind in KIND_OF_NAME.items():
        answers[f"get_{name}_group"] = partial(world.group, kind)
        answers[f"get_{name}_group_ranks"] = partial(world.ranks, kind)
        answers[f"get_{name}_src_rank"] = partial(_first, world, kind)
        answers[f"get_{name}_world_size"] = partial(_size, world, kind)
        answers[f"get_{name}_rank"] = partial(_place, world, kind)
    answers["get_data_parallel_group"] = partial(world.group, "data")
    return SimpleNamespace(**answers)


def _first(world: Groups, kind: str) -> int:
    return world.ranks(kind)[0]


def _size(world: Groups, kind: str) -> int:
    return world.group(kind).size()


def _place(world: Groups, kind: str) -> int:
    return world.group(kind).rank()


def point_at(world: Groups, mpu: SimpleNamespace | None) -> None:
    """Make DeepSpeed's modules speak of `world`.

    mpu: its `mpu_of` where the layout is wide, else None.
    """
    forget()
    layout = world.layout
    spans = len(world.ranks("data")) == layout.world_size
    groups._WORLD_GROUP = world.group("data" if spans else "default")
    name = f"ep_size_{layout.expert}"
    for kind, table, ranks in _EXPERT_TABLES:
        table[name] = world.group(kind)
        ranks[name] = list(world.ranks(kind))
    if world.has_sequence or layout.sequence > 1:
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = world.group("sequence")
        parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = world.group("data")
    if is_wide(layout):
        groups.mpu = mpu
        groups._TENSOR_MODEL_PARALLEL_GROUP = world.group("tensor")
        groups._MODEL_PARALLEL_GROUP = world.group("model")
        groups._DATA_PARALLEL_GROUP = world.group("data")


def forget() -> None:
    """Clear all that `point_at` sets, and what DeepSpeed sets beside it. The tables stay the same objects.

    What `parallel_state_sp` has stays: scripts ask it between the calls of several engines, too. See `let_go`.
    """
    for _, *tables in _EXPERT_TABLES:
        for table in tables:
            table.clear()
    groups._WORLD_GROUP = None
    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = None
    groups._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = groups._MPU_TENSOR_MODEL_PARALLEL_RANK = None
    groups.mpu = groups.mesh_device = None
    groups.expert_tensor_parallel_world_size = 1


def let_go(gone: Collection[td.ProcessGroup]) -> None:
    """Let DeepSpeed's modules speak of none of these groups, which are taken down."""
    if any(group is groups._WORLD_GROUP for group in gone):
        forget()
    if any(group is parallel_state_sp._SEQUENCE_PARALLEL_GROUP for group in gone):
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None


_EXPERT_TABLES = (
    ("expert", groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS),
    ("expert_data", groups._EXPERT_DATA_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP_RANKS),
)
"""Kind of group -> DeepSpeed's tables of it, by "ep_size_N"; an engine keeps references to them."""
