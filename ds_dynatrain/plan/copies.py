"""State that is lost when a rank or a node dies, and the buffers of a rank that other ranks must therefore copy."""

from __future__ import annotations

from collections.abc import Sequence

from ds_dynatrain.space import BufferId, Layout, VirtualParameterSpace, row_of
from ds_dynatrain.space.layout import whole_replicas
from ds_dynatrain.space.zero import group_size


def has_one_holder(vps: VirtualParameterSpace, layout: Layout, kind: str) -> bool:
    """Return whether a state kind may have elements that only one rank of the layout holds.

    Values that several stages or tensor ranks compute independently count as held by one rank each, because they may
    have diverged.
    """
    if not vps.is_held(layout, kind):
        return False
    if not vps.is_replicated(layout, kind):
        return True
    has_experts = bool(vps.line.experts.any())
    return group_size(layout) == 1 or (has_experts and group_size(layout, experts=True) == 1)


def is_trained_weight(vps: VirtualParameterSpace, kind: str, name: BufferId) -> bool:
    """Return whether a buffer holds trained weights, which need no copy because they can be cast from their masters."""
    is_frozen = name.place == "partition" or (name.place == "tensor" and not vps.tensors[name.index].trainable)
    return row_of(kind).is_cast and not is_frozen


def has_single_holders(vps: VirtualParameterSpace, layout: Layout) -> bool:
    """Return whether the death of a single rank of the layout may lose state."""
    return any(has_one_holder(vps, layout, kind) for kind in vps.present_kinds(layout))


def needs_copies(vps: VirtualParameterSpace, layout: Layout, nodes: Sequence[str]) -> bool:
    """Return whether the death of a single node may lose state.

    nodes: the name of each rank's node.
    """
    return has_single_holders(vps, layout) or not outlives_a_node(layout, nodes)


def outlives_a_node(layout: Layout, nodes: Sequence[str]) -> bool:
    """Return whether a whole replica of the state survives the death of any single node.

    nodes: the name of each rank's node. If all ranks are on one node, each rank counts as a node of its own.
    """
    names = nodes if len(set(nodes)) > 1 else [str(rank) for rank in range(len(nodes))]
    left = [{rank for rank, name in enumerate(names) if name != lost} for lost in set(names)]
    return all(whole_replicas(layout, alive) for alive in left)


def is_copied(vps: VirtualParameterSpace, layout: Layout, kind: str, name: BufferId, everything: bool = False) -> bool:
    """Return whether a buffer of a rank must be part of the copy of this rank's state that other ranks keep.

    everything: also include kinds that other ranks hold, except weights. The surviving ranks do hold them, but with
        newer values than those of the copy.
    """
    belongs = has_one_holder(vps, layout, kind) or (everything and not row_of(kind).is_cast)
    return belongs and not is_trained_weight(vps, kind, name)
