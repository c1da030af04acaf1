"""Changes of a member's layout, members, rank and generation, as they are reported to the script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds_dynatrain.space import Layout


@dataclass(frozen=True)
class Place:
    """A member's position in the job.

    layout: the layout of the current world, also on an idle member.
    members: the member at each rank of the current world, also on an idle member.
    rank: this member's rank; -1 on an idle member.
    generation: the number of this member's world; 0 on an idle member.
    """

    layout: Layout
    members: tuple[int, ...]
    rank: int
    generation: int

    @property
    def idle(self) -> bool:
        """Whether this member waits for work."""
        return self.rank < 0


@dataclass(frozen=True)
class Change:
    """A change of a member's position in the job, since the last change that was reported to the script on that member.

    before: the position that was last reported.

    after: the current position.

    step: the number of optimizer steps done.

    reason: "switch", or the name of the extension that requested the switch; "rolled back: ..." if a late switch was
        undone; the coordinator's reason if members have come or gone.
    """

    before: Place
    after: Place
    step: int
    reason: str


OnChange = Callable[[Change], object]
