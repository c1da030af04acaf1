"""What a death takes away, and what of a rank's state belongs into a copy that others keep."""

from __future__ import annotations

from collections.abc import Sequence

from ds_dynatrain.space import BufferId, Layout, VirtualParameterSpace, row_of
from ds_dynatrain.space.layout import whole_replicas
from ds_dynatrain.space.zero import group_size


def has_one_holder(vps: VirtualParameterSpace, layout: Layout, kind: str) -> bool:
    """Whether a state kind may have elements that one rank of the layout alone holds.

    What stages or tensor ranks compute each for itself counts as one rank's: copies of it may have drifted apart.
    """
    if not vps.is_held(layout, kind):
        return False
    if not vps.is_replicated(layout, kind):
        return True
    has_experts = bool(vps.line.experts.any())
    return group_size(layout) == 1 or (has_experts and group_size(layout, experts=True) == 1)


def is_trained_weight(vps: VirtualParameterSpace, kind: str, name: BufferId) -> bool:
    """Whether a buffer has trained weights, which need no copy: they are cast from their masters."""
    is_frozen = name.place == "partition" or (name.place == "tensor" and not vps.tensors[name.index].trainable)
    return row_of(kind).is_cast and not is_frozen


def has_single_holders(vps: VirtualParameterSpace, layout: Layout) -> bool:
    """Return whether the death of one rank of the layout may take elements away."""
    return any(has_one_holder(vps, layout, kind) for kind in vps.present_kinds(layout))


def needs_copies(vps: VirtualParameterSpace, layout: Layout, nodes: Sequence[str]) -> bool:
    """Return whether the death of one node may take elements away; see `outlives_a_node`."""
    return has_single_holders(vps, layout) or not outlives_a_node(layout, nodes)


def outlives_a_node(layout: Layout, nodes: Sequence[str]) -> bool:
    """Return whether all of a state that ZeRO does not cut is left, whichever node dies. nodes: the node of each rank.

    A single node counts as one for each rank.
    """
    names = nodes if len(set(nodes)) > 1 else [str(rank) for rank in range(len(nodes))]
    left = [{rank for rank, name in enumerate(names) if name != lost} for lost in set(names)]
    return all(whole_replicas(layout, alive) for alive in left)


def is_copied(vps: VirtualParameterSpace, layout: Layout, kind: str, name: BufferId, everything: bool = False) -> bool:
    """Whether a buffer of a rank belongs into its copy.

    everything: also what others hold, too, but for weights: the living have it, and not as it was at that moment.
    """
    belongs = has_one_holder(vps, layout, kind) or (everything and not row_of(kind).is_cast)
    return belongs and not is_trained_weight(vps, kind, name)
