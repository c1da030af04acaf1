"""State that DeepSpeed's modules keep about "the" world: its groups, by axis.

`point_at` sets all of it for a world of ours, `forget` clears it. Under a layout of data (and expert) alone it is what
DeepSpeed itself has without an `mpu`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as td
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups

from ds_dynatrain.adapters.world import World


def point_at(world: World) -> None:
    """Make DeepSpeed's modules speak of `world`."""
    forget()
    layout, mpu = world.layout, world.mpu
    spans = len(world.ranks("data")) == layout.world_size
    groups._WORLD_GROUP = world.group("data" if spans else "default")
    name = f"ep_size_{layout.expert}"
    for kind, table, ranks in _EXPERT_TABLES:
        table[name] = world.group(kind)
        ranks[name] = list(world.ranks(kind))
    if world.has_sequence or layout.sequence > 1:
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = world.group("sequence")
        parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = world.group("data")
    if mpu is not None:
        groups.mpu = mpu
        groups._TENSOR_MODEL_PARALLEL_GROUP = world.group("tensor")
        groups._MODEL_PARALLEL_GROUP = world.group("model")
        groups._DATA_PARALLEL_GROUP = world.group("data")


def forget() -> None:
    """Clear everything that `point_at` sets, and what DeepSpeed sets beside it. The tables stay the same objects.

    The content of `parallel_state_sp` stays: scripts use it between the calls of several engines, too. See `let_go`.
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
    """Remove groups that are taken down from DeepSpeed's modules."""
    if any(group is groups._WORLD_GROUP for group in gone):
        forget()
    if any(group is parallel_state_sp._SEQUENCE_PARALLEL_GROUP for group in gone):
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None


_EXPERT_TABLES = (
    ("expert", groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS),
    ("expert_data", groups._EXPERT_DATA_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP_RANKS),
)
"""Kind of group -> DeepSpeed's tables of it, by "ep_size_N"; an engine keeps references to them."""
