"""The plan of a switch: which member takes which rank, sends what to whom and in which order, and what that costs.

`slots` assigns members to the ranks of the new world. `sides` compares source and target to find which elements each
member lacks and who sends them; `moves` turns this into moves. `plan` holds the moves of each member, the order of
exchanges, an estimate of memory and time, and the moves that one member carries out for an absent one. `copies` says
which state a death would lose, and which buffers need a copy. Nothing here communicates: a plan depends only on two
layouts and two lists of members.
"""

from ds_dynatrain.plan.copies import (
    has_one_holder,
    has_single_holders,
    is_copied,
    needs_copies,
    outlives_a_node,
)
from ds_dynatrain.plan.moves import Moves
from ds_dynatrain.plan.plan import (
    Cost,
    Exchange,
    MemberPlan,
    StandInPlan,
    SwitchPlan,
    estimate,
    plan_switch,
    rounds,
    standing_in,
    state_bytes,
)
from ds_dynatrain.plan.slots import assign_slots, slot_costs

__all__ = [
    "Cost",
    "Exchange",
    "MemberPlan",
    "Moves",
    "StandInPlan",
    "SwitchPlan",
    "assign_slots",
    "estimate",
    "has_one_holder",
    "has_single_holders",
    "is_copied",
    "needs_copies",
    "outlives_a_node",
    "plan_switch",
    "rounds",
    "slot_costs",
    "standing_in",
    "state_bytes",
]
