"""Communicators of an accelerator for the next world, which all its members make at one boundary.

That is the boundary of the switch, within the pause, or an earlier one where the switch was asked for ahead (`at=`) and
all were prepared in time: `agreement.connecting_step`.
"""

from __future__ import annotations

from dataclasses import replace

from ds_dynatrain.adapters.device import is_accelerated, synchronize
from ds_dynatrain.adapters.world import World
from ds_dynatrain.engine import agreement
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.transaction.session import Decision, Session


def connect(preparation: Preparation, old_world: World | None, session: Session) -> None:
    """The next world's groups serve the accelerator, too; in between all members stand, and nothing is under way.

    Where there is an accelerator, and it was not done before; all members of either world call it. MemberMissing for
    one that does not come, RuntimeError where they cannot be connected within the time-out; what was made by then is
    ended with the preparation.
    """
    world = preparation.world
    if not is_accelerated() or world is None or preparation.connections is not None:
        return
    synchronize()
    session.reduce(agreement.CONNECTING, None, _nothing, doing="connecting the next world's members")
    preparation.connections = world.connect(preparation.board.timeout_seconds, old_world, session.stop)


def connect_ahead(preparation: Preparation, old_world: World | None) -> Decision:
    """At a boundary before that of the switch: the same decision on all members, whether they have all come through.

    If not, the switch cannot come about, and nothing else has changed. OutcomeUnknown if the board is gone.
    """
    board, proposal = preparation.board, preparation.proposal
    what = f"connecting for the switch to {proposal.layout}"
    session = Session(board, agreement.ahead_key(proposal), proposal.union, what, stop=preparation.stop)

    def work() -> None:
        preparation.join()
        connect(preparation, old_world, session)

    decision = session.vote(work)
    if decision.commit and preparation.connections is not None:
        preparation.connections = replace(preparation.connections, is_ahead=True)
    elif session.is_first and not decision.commit:  # for members that have no part in it
        board.decide(f"record/{proposal.generation}", {"commit": False, "reason": decision.reason})
    return decision


def _nothing(one: None, other: None) -> None:
    """All that is to be known is that they have come."""
