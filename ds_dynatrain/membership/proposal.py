"""Proposals of switches: one record of which member takes which rank, and the keys under which members report
progress."""

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
    """Key-value store in which members read each other's records: a `Control`, or a dictionary in simulations."""

    def read(self, key: str) -> Any | None: ...
    def all_posted(self, key: str, members: Iterable[int | str]) -> bool: ...


@dataclass(frozen=True)
class Proposal:
    """A switch that all working members have agreed to. The record is the same on every member.

    generation: the number of the next world, which is not used again even if the switch does not take place.
    source_layout: the layout before the switch.
    source_members: the member at each rank before the switch.
    layout: the layout after the switch.
    members: the member at each rank after the switch.
    at: the number of optimizer steps after which the switch takes effect; None for the first boundary at which all are
        prepared.
    forms_anew: whether the process groups of the source can no longer be used.
    late: whether optimizer state moves during the next global batch, instead of before it.
    cause: the extension that requested the switch, or "" for the script; an extension's switch gives way to the
        script's.
    predicted_gain: the fraction by which the step time is expected to fall, if this is the reason for the switch.
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
        """Prefix of the keys that the members of both worlds use during the switch."""
        return f"switch/{self.generation}"

    @property
    def record_key(self) -> str:
        """Key of the record that says whether the switch was committed."""
        return f"record/{self.generation}"

    @property
    def meeting_key(self) -> str:
        """Key under which rank 0 posts the step at which the switch begins."""
        return f"meet/{self.generation}"

    @property
    def ahead_key(self) -> str:
        """Prefix of the keys that the members use if they connect some steps before the switch."""
        return f"ahead/{self.generation}"

    @property
    def moves_nothing(self) -> bool:
        """Whether the working members and their layout stay the same, so that no state moves."""
        return not self.forms_anew and (self.layout, self.members) == (self.source_layout, self.source_members)

    @property
    def union(self) -> tuple[int, ...]:
        """Members that take part in the switch, before or after it, in ascending order."""
        return tuple(sorted({*self.source_members, *self.members}))

    def fingerprint(self) -> str:
        """Return a short hash of the proposal without its generation number. Members compare these hashes."""
        text = json.dumps(to_record(replace(self, generation=0)), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def is_prepared(self, board: Board) -> bool:
        """Return whether every member has reported that it is ready, or why it is not. Polls; never blocks."""
        return board.read(f"prepared/{self.generation}/all") is not None

    def has_begun(self, board: Board) -> bool:
        """Return whether rank 0 has begun the switch. Called on idle members. Polls; never blocks."""
        return board.all_posted(f"{self.key}/meet/0", self.source_members[:1])
