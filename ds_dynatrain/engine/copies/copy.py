"""A copy, in host memory, of the state that only one rank of a layout held at one step.

It has the flat buffers of all state kinds that are divided among ranks (including frozen weights if they are divided),
and the rank's extra state and random streams. Trained weights are left out, because they can be cast from their
masters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.errors import LayoutError, TransferError
from ds_dynatrain.membership.whole import Mark
from ds_dynatrain.plan import has_one_holder, is_copied
from ds_dynatrain.plan.copies import is_trained_weight
from ds_dynatrain.reshard.certificate import Digests, only
from ds_dynatrain.reshard.encoding import fingerprint
from ds_dynatrain.space import WEIGHT, Layout, VirtualParameterSpace, of_kind
from ds_dynatrain.transfer import digest_pieces


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy of a rank's state; see the docstring of the module. It is not changed while it is in `Kept.copies`.

    mark: the point in training at which the copy was taken.
    rank: the rank in the layout of that point.
    buffers: a map from (kind, buffer) to a flat CPU tensor, padding included, with the names of `Host.state_buffers`.
    said: the state outside the buffers, as plain JSON: the encoded extra state ("shared" by all ranks and, for this
        rank alone, "rest"), "streams" as `streams.capture` returns them, the job's "seed", and "kinds", all state kinds
        that the rank held.
    tensors: the tensors of the encoded "rest", on the CPU.
    digests: for each state kind, one number per logical tensor, computed from the buffers.
    said_digest: the digest of `said` and `tensors`.
    """

    mark: Mark
    rank: int
    buffers: Buffers
    said: dict[str, Any]
    tensors: list[torch.Tensor]
    digests: Mapping[str, Digests]
    said_digest: str

    def is_sound(self, vps: VirtualParameterSpace) -> bool:
        """Recompute all digests, and return whether the copy is unchanged. A single flipped bit is detected.

        vps: the engine's parameter space. A copy taken before trained parameters were changed does not fit this space,
            and counts as changed.
        """
        try:
            found = digests_of(vps, self.mark.layout, self.rank, self.buffers)
            said = digest_of_said(self.said, self.tensors)
        except (LayoutError, TransferError):
            return False
        return (
            said == self.said_digest
            and found.keys() == self.digests.keys()
            and all(np.array_equal(found[kind], self.digests[kind]) for kind in found)
        )


def copied(vps: VirtualParameterSpace, layout: Layout, buffers: Buffers, everything: bool = False) -> Buffers:
    """Return those of a rank's buffers that must be in its copy; see `is_copied`.

    everything: whether to include all kinds that other ranks hold as well, except weights.
    """
    return {key: held for key, held in buffers.items() if is_copied(vps, layout, *key, everything)}


def lacks_frozen(vps: VirtualParameterSpace, layout: Layout) -> bool:
    """Return whether copies of ranks of a layout leave out some frozen weights, because several ranks hold them."""
    return any(not tensor.trainable for tensor in vps.tensors) and not has_one_holder(vps, layout, WEIGHT)


def frozen_elsewhere(vps: VirtualParameterSpace, layout: Layout, buffers: Buffers) -> Buffers:
    """Return the buffers of a rank's frozen weights that its copy leaves out, because other ranks hold them as well."""
    if has_one_holder(vps, layout, WEIGHT):
        return {}
    return {key: held for key, held in buffers.items() if key[0] == WEIGHT and not is_trained_weight(vps, *key)}


def digests_of(vps: VirtualParameterSpace, layout: Layout, rank: int, buffers: Buffers) -> dict[str, Digests]:
    """Return the digests of a rank's buffers: for each state kind, one number per logical tensor.

    Raises TransferError if the buffers do not fit, LayoutError for a kind or a rank that the space does not have.
    """
    found = {}
    for kind in sorted({kind for kind, _ in buffers}):
        held, pieces = of_kind(buffers, kind), vps.holding(layout, rank, kind)
        found[kind] = digest_pieces(only(pieces, tuple(held)), held, vps.bases)
    return found


def digest_of_said(said: Mapping[str, Any], tensors: list[torch.Tensor]) -> str:
    """Return the digest of a copy's state outside its buffers: the fields `said` and `tensors` of `Copy`."""
    return fingerprint([dict(said), tensors])
