"""ZeRO stage 0 in low precision with DeepSpeed's FusedAdam: `FP16_Optimizer`.

Per optimizer group one flat weight buffer and one flat fp32 master, whole on every rank, without padding; frozen
tensors stand alone. The optimizer steps the flat master, so a group has one step count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_dynatrain.adapters.flat import FlatGroups, Slots, end_to_end
from ds_dynatrain.adapters.model import ModelMap


class FusedStage(FlatGroups):
    """Stage 0 over flat groups; see the module."""

    def flats(self, held: Any) -> Sequence[torch.Tensor]:
        """See `FlatGroups`."""
        return list(held.fp16_groups_flat)

    def masters(self, held: Any) -> Sequence[torch.Tensor]:
        """See `FlatGroups`."""
        return list(held.fp32_groups_flat)

    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        """In the order of `fp16_groups`, end to end."""
        return 0, end_to_end(model, held.fp16_groups[group])

    def put_weights(self, held: Any, model: ModelMap, group: int, flat: torch.Tensor) -> None:
        """See `FlatGroups`."""
        held.fp16_groups_flat[group] = flat
        for number, at, numel in end_to_end(model, held.fp16_groups[group]):
            model.parameters[number].data = flat.narrow(0, at, numel).view(model.tensors[number].shape)
