"""Proposal that members agree to: one record of which member takes which rank, and its progress as seen on a board."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ds_dynatrain.records import to_record
from ds_dynatrain.space.layout import Layout

CONNECTING = "connecting"


class Board(Protocol):
    """Board on which members read what others have said: `engine.control.Control`, or a dictionary in simulations."""

    def read(self, key: str) -> Any | None: ...
    def all_posted(self, key: str, members: Iterable[int | str]) -> bool: ...


@dataclass(frozen=True)
class Proposal:
    """A switch that all working members agreed to: the same record on every member.

    generation: the number of the next world, which is used up even if the switch does not take place.
    source_layout, source_members: the layout and members to switch from.
    layout, members: the layout and members to switch to.
    at: the number of optimizer steps after which it takes effect; None for the first boundary at which all are
        prepared.
    forms_anew: whether the process groups of the source cannot be used any more.
    late: whether state that no forward pass reads moves during the next global batch.
    cause: the extension that asked for it, "" for the script; an extension's switch gives way to the script's.
    predicted_gain: the fraction of a step's time that it is expected to save, if that is why it is made.
    """

    generation: int
    source_layout: Layout
    source_members: tuple[int, ...]
    layout: Layout
    members: tuple[int, ...]
    at: int | None
    forms_anew: bool = False
    late: bool = False
    cause: str = ""
    predicted_gain: float | None = None

    @property
    def key(self) -> str:
        """Prefix of the keys under which the members of both worlds carry out the switch on the board."""
        return f"switch/{self.generation}"

    @property
    def record_key(self) -> str:
        """Key of the record that says whether the switch was committed."""
        return f"record/{self.generation}"

    @property
    def meeting_key(self) -> str:
        """Key of the step, named by rank 0, at which the members meet for the switch."""
        return f"meet/{self.generation}"

    @property
    def ahead_key(self) -> str:
        """Prefix of the keys under which the members connect at a boundary before that of the switch."""
        return f"ahead/{self.generation}"

    @property
    def moves_nothing(self) -> bool:
        """Whether the working members and their layout stay the same, so that no state moves."""
        return not self.forms_anew and (self.layout, self.members) == (self.source_layout, self.source_members)

    @property
    def union(self) -> tuple[int, ...]:
        """Members that take part in the switch, in either world, ascending."""
        return tuple(sorted({*self.source_members, *self.members}))

    def fingerprint(self) -> str:
        """Return a short hash of the proposal without its number, for members to compare."""
        text = json.dumps(to_record(replace(self, generation=0)), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def is_prepared(self, board: Board) -> bool:
        """Return whether all members have reported that they are ready, or why not. Polls; never blocks."""
        return board.read(f"prepared/{self.generation}/all") is not None

    def has_begun(self, board: Board) -> bool:
        """Return whether rank 0 has reached the boundary of the switch. Called on idle members; polls and never
        blocks.
        """
        return board.all_posted(f"{self.key}/meet/0", self.source_members[:1])

    def is_connecting(self, board: Board) -> bool:
        """Return whether rank 0 has begun to make communicators. Called on idle members; polls and never blocks."""
        return board.all_posted(f"{self.ahead_key}/{CONNECTING}/0", self.source_members[:1])
