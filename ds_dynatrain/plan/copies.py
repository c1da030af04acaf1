"""Effects of a death on the state, and the part of a rank's state that belongs into a copy that others keep."""

from __future__ import annotations

from collections.abc import Sequence

from ds_dynatrain.space import BufferId, Layout, VirtualParameterSpace, row_of
from ds_dynatrain.space.layout import whole_replicas
from ds_dynatrain.space.zero import group_size


def has_one_holder(vps: VirtualParameterSpace, layout: Layout, kind: str) -> bool:
    """Return whether a state kind may have elements that a single rank of the layout holds.

    Values that stages or tensor ranks each compute for themselves count as held once: their copies may have drifted
    apart.
    """
    if not vps.is_held(layout, kind):
        return False
    if not vps.is_replicated(layout, kind):
        return True
    has_experts = bool(vps.line.experts.any())
    return group_size(layout) == 1 or (has_experts and group_size(layout, experts=True) == 1)


def is_trained_weight(vps: VirtualParameterSpace, kind: str, name: BufferId) -> bool:
    """Return whether a buffer has trained weights, which need no copy: they are cast from their masters."""
    is_frozen = name.place == "partition" or (name.place == "tensor" and not vps.tensors[name.index].trainable)
    return row_of(kind).is_cast and not is_frozen


def has_single_holders(vps: VirtualParameterSpace, layout: Layout) -> bool:
    """Return whether the death of one rank of the layout may take elements away."""
    return any(has_one_holder(vps, layout, kind) for kind in vps.present_kinds(layout))


def needs_copies(vps: VirtualParameterSpace, layout: Layout, nodes: Sequence[str]) -> bool:
    """Return whether the death of one node may take elements away; see `outlives_a_node`."""
    return has_single_holders(vps, layout) or not outlives_a_node(layout, nodes)


def outlives_a_node(layout: Layout, nodes: Sequence[str]) -> bool:
    """Return whether, whichever node dies, all of a state that ZeRO does not cut is left. nodes: the node of each rank.

    If all ranks are on one node, each rank counts as a node of its own.
    """
    names = nodes if len(set(nodes)) > 1 else [str(rank) for rank in range(len(nodes))]
    left = [{rank for rank, name in enumerate(names) if name != lost} for lost in set(names)]
    return all(whole_replicas(layout, alive) for alive in left)


def is_copied(vps: VirtualParameterSpace, layout: Layout, kind: str, name: BufferId, everything: bool = False) -> bool:
    """Return whether a buffer of a rank belongs into its copy.

    everything: include kinds that other ranks hold, too, except weights; the living have them, but not as they were at
    that moment.
    """
    belongs = has_one_holder(vps, layout, kind) or (everything and not row_of(kind).is_cast)
    return belongs and not is_trained_weight(vps, kind, name)
