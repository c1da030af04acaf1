"""The plan of a switch: which member gets which rank, who sends what to whom and in which order, and what it costs.

`slots` assigns members to slots, the ranks of the new layout. It uses `kept_bytes`, which counts what each member would
keep in each slot, `placement`, which chooses the node of each slot, and `matching`, which finds the assignment that
keeps the most bytes and proves that none keeps more. `owners` chooses the order of tensors in flat buffers. `sides`
compares source and target: it finds what each member lacks and which member sends it. `moves` describes this as blocks
to copy. `plan` is the whole plan as one member sees it, in the order of its exchanges, including the parts of absent
members that another member carries out. `picture` counts the bytes of all members at once and estimates memory and
time. `topology` describes nodes and the speed of the links between members. `copies` determines which state is lost
when a member dies, and which buffers of a rank must be copied.

Nothing here communicates: a plan follows from two layouts and two lists of members alone.

This package may import only `space`. Begin reading at `plan`.
"""

from ds_dynatrain.plan.copies import (
    has_one_holder,
    has_single_holders,
    is_copied,
    needs_copies,
    outlives_a_node,
)
from ds_dynatrain.plan.moves import Moves
from ds_dynatrain.plan.owners import nearest
from ds_dynatrain.plan.picture import Cost, Picture, estimate, held_bytes, memory_of, peak_bytes, picture_of
from ds_dynatrain.plan.plan import (
    Exchange,
    MemberPlan,
    StandInPlan,
    SwitchPlan,
    plan_switch,
    rounds,
    split,
    standing_in,
)
from ds_dynatrain.plan.slots import Assignment, assign_slots
from ds_dynatrain.plan.topology import LinkClass, Topology

__all__ = [
    "Assignment",
    "Cost",
    "Exchange",
    "LinkClass",
    "MemberPlan",
    "Moves",
    "Picture",
    "StandInPlan",
    "SwitchPlan",
    "Topology",
    "assign_slots",
    "estimate",
    "has_one_holder",
    "has_single_holders",
    "held_bytes",
    "is_copied",
    "memory_of",
    "nearest",
    "needs_copies",
    "outlives_a_node",
    "peak_bytes",
    "picture_of",
    "plan_switch",
    "rounds",
    "split",
    "standing_in",
]
