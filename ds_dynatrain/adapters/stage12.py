"""ZeRO stages 1 and 2: per optimizer group one flat weight buffer on every rank, and one part of it as fp32 master.

Muon's momentum is that of all of `params_in_partition[group]`, whole, in one flat tensor; a rank without such a
parameter has none. What it stages for a step (`_muon_pending_momentum`) is written before it is read: no state.

`param._hp_mapping` is not read: it is derived, and wrong under `round_robin_gradients` (see `fragments`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import deepspeed.comm as dist
import torch

from ds_dynatrain.adapters.flat import FlatGroups, Slots, is_empty_group
from ds_dynatrain.adapters.fragments import relink
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.offload import describe_gradients, flat_gradients_census, refill_gradients
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.adapters.versions import flat_offsets
from ds_dynatrain.space import HOST_GRAD


class FlatStages(FlatGroups):
    """Stages 1 and 2; see the module."""

    def flats(self, held: Any) -> Sequence[torch.Tensor]:
        """See `FlatGroups`."""
        return list(held.bit16_groups_flat)

    def masters(self, held: Any) -> Sequence[torch.Tensor]:
        """See `FlatGroups`."""
        return list(held.single_partition_of_fp32_groups)

    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        """From the flat order that DeepSpeed keeps for its reduction."""
        number = {id(parameter): index for index, parameter in enumerate(model.parameters)}
        ordered = zip(held.round_robin_bit16_groups[group], flat_offsets(held, group), strict=True)
        size = int(held.partition_size[group])  # 0.18 has a float
        low = dist.get_rank(group=held.real_dp_process_group[group]) * size
        return low, [(number[id(parameter)], offset, parameter.numel()) for parameter, offset in ordered]

    def put_weights(self, held: Any, model: ModelMap, group: int, flat: torch.Tensor) -> None:
        """Their parts, too."""
        held.bit16_groups_flat[group] = flat
        held._update_model_bit16_weights(group)
        held.parallel_partitioned_bit16_groups[group] = held.get_data_parallel_partitions(flat, group)

    def whole(self, held: Any, group: int) -> Iterable[torch.Tensor]:
        """All of which the rank has a part."""
        parameters: Iterable[torch.Tensor] = held.params_in_partition[group]
        return parameters

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        """Offloaded gradients, too."""
        buffers, scalars = super().describe(engine, model)
        describe_gradients(engine.optimizer, self.masters(engine.optimizer), "group", buffers)
        for kind, name in list(buffers):
            if kind == HOST_GRAD and is_empty_group(model, name.index):
                buffers[kind, name] = buffers[kind, name][:0]
        return buffers, scalars

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Offloaded gradients, too."""
        return super().census(engine, model) + flat_gradients_census(engine.optimizer, model)

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Offloaded gradients, too; fragment maps are linked anew."""
        super().refill(engine, model, buffers, scalars)
        refill_gradients(engine.optimizer, self.masters(engine.optimizer), "group", buffers)
        relink(engine.optimizer)
