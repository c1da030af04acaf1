"""What the membership wants done; whoever holds the connections does it."""

from __future__ import annotations

from dataclasses import dataclass

from ds_dynatrain.elastic.world import World


@dataclass(frozen=True)
class Publish:
    """Tell these members of a generation."""

    world: World
    to: tuple[str, ...]


@dataclass(frozen=True)
class GiveUp:
    """End the connection of a member, and its process if its agent can; pid is None if nobody has said it."""

    member: str
    pid: int | None
    reason: str


@dataclass(frozen=True)
class Probe:
    """Ask a member which of these addresses of others it can connect to."""

    member: str
    peers: tuple[str, ...]


@dataclass(frozen=True)
class Finish:
    """Tell these members that no work will come any more."""

    to: tuple[str, ...]


Effect = Publish | GiveUp | Probe | Finish
