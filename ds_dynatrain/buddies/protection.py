"""How far a training is protected against the death of a member, for people and for scripts that watch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Protection:
    """How far an engine's state is protected, as this member sees it.

    buddies: member -> the members that keep its copies. step: the newest of which all copies are known to be with all
    who keep them; None if there is none. is_protected: whether the death of one member costs the steps after that one
    alone. why: if not, or if there is nothing to copy. memory_bytes: of host memory, for copies. sent_bytes, take_ms,
    ship_ms: of the last round: what was sent, how long the step waited for the copy, and how long it travelled. taken,
    skipped: how many rounds there were, and how many were left out because the one before had not ended.
    """

    buddies: dict[int, tuple[int, ...]]
    step: int | None
    is_protected: bool
    why: str
    memory_bytes: int
    sent_bytes: int
    take_ms: float
    ship_ms: float
    taken: int
    skipped: int
