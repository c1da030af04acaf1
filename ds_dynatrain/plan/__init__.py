"""The plan of a switch: who takes which slot, who sends what to whom, in which order, and what it costs.

`slots` assigns members to the ranks of the new world. `sides` puts source and target beside each other and finds what
each member lacks, `senders` finds who sends it, from either end by the same arithmetic. `need` turns that into `Moves`,
`rounds` orders the meetings, and `plan` is the whole as one member sees it; by `stand_in` a member carries out the
parts of absent ones, too. `cost` estimates memory and time. `copies` says what a death takes away, and what a copy has
of a rank's state. Nothing here talks to anyone: two layouts and two lists of members are all it knows.
"""

from ds_dynatrain.plan.copies import (
    has_one_holder,
    has_single_holders,
    is_copied,
    needs_copies,
    outlives_a_node,
)
from ds_dynatrain.plan.cost import Cost, estimate, state_bytes
from ds_dynatrain.plan.moves import Moves
from ds_dynatrain.plan.plan import Exchange, MemberPlan, SwitchPlan, plan_switch
from ds_dynatrain.plan.rounds import rounds
from ds_dynatrain.plan.slots import assign_slots, slot_costs
from ds_dynatrain.plan.stand_in import StandInPlan, standing_in

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
