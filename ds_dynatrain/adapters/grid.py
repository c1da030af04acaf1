"""DeepSpeed's grid of pipeline stages over process groups that exist already."""

from __future__ import annotations

import torch.distributed as td
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid

from ds_dynatrain.adapters.world import World


class StageGrid(PipelineParallelGrid):  # type: ignore[misc]
    """A grid for one rank of a world; it makes no group, so building it is no collective.

    Ranks count pipe first, then data, as in DeepSpeed's.
    """

    def __init__(self, world: World, rank: int) -> None:
        layout = world.layout
        self._topo = PipeDataParallelTopology(num_pp=layout.pipe, num_dp=layout.data)
        self._world = world
        self.global_rank, self.world_size = rank, layout.world_size
        self.data_parallel_size, self.pipe_parallel_size = layout.data, layout.pipe
        self.model_parallel_size = self.slice_parallel_size = 1
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == layout.pipe - 1
        self.dp_groups = self._topo.get_axis_comm_lists("data")
        self.dp_group = self.dp_groups[self.stage_id]
        self.dp_proc_group = world.group("data")
        self.pipe_groups = self._topo.get_axis_comm_lists("pipe")
        self.pp_group = self.pipe_groups[self.data_parallel_id]
        self.pp_proc_group = world.group("pipe")
        self.ds_model_proc_group = self.pp_proc_group
        self.ds_model_world_size, self.ds_model_rank = layout.pipe, self.stage_id
        self.slice_group, self.slice_proc_group = [rank], None
        self.p2p_groups = self._build_p2p_groups()

    def tied_group(self, stages: tuple[int, ...]) -> td.ProcessGroup:
        """Return the group of the stages that share a tie, in this rank's pipeline."""
        return self._world.tie(stages)
