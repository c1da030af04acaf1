"""State from before a committed switch, held until no member can need it any longer."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as td

from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import drop
from ds_dynatrain.adapters.zero.state import Buffers, release
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.session import Session
from ds_dynatrain.reshard.ways import Ways

ACKNOWLEDGED = "acknowledged"
"""Step of a switch's session in which members report that they have read the commit."""


@dataclass(frozen=True)
class OldState:
    """Buffers, process groups and transports from before a committed switch.

    A member that has not acknowledged the commit may still be in the switch. This object is therefore released only
    once all members have acknowledged it, or a later generation is entered, whose members have all left the switch.
    """

    session: Session
    buffers: Buffers
    world: World | None
    ways: Ways

    def is_needed(self, board: Control) -> bool:
        """Return whether a member may still be in the switch. Polls and never blocks.

        board: the board of the current generation.
        """
        try:
            return board is self.session.board and not self.session.have_come(ACKNOWLEDGED)
        except td.DistError:  # the board is gone: the job ends, or another generation follows
            return True

    def release(self) -> None:
        """Free the buffers and destroy the groups, in background threads."""
        self.ways.end()
        track = self.session.board.track_teardown
        track(release(self.buffers))
        if self.world is not None:
            track(drop(self.world))
