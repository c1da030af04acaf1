"""What a member has around it in the present generation: who could work, the board, the group it idles in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_dynatrain.adapters.launch_world import LaunchWorld
from ds_dynatrain.engine.control import Control

Boards = tuple[Control, Control]
"""The board of a generation, and the same over another connection."""


@dataclass(frozen=True)
class Candidates:
    """Who could work: the numbers of all members of the job at present, idle ones too, and the node of each.

    mine: this member's number. A number never changes and never belongs to two members.
    """

    mine: int
    nodes: Mapping[int, str]

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers, ascending."""
        return tuple(sorted(self.nodes))

    def __len__(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True)
class Context:
    """Replaced as a whole when members come and go; in a job of fixed size it is that of the launch to the end.

    launch: the group that this process stands in while it is idle. control: the board; background: the same over
    a connection of its own, for what is made ready beside training.
    """

    launch: LaunchWorld
    candidates: Candidates
    control: Control
    background: Control
