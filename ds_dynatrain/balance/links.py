"""What messages between members take: bandwidth and latency, within a node and between nodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ds_dynatrain.errors import LayoutError


@dataclass(frozen=True)
class Link:
    """bytes_per_second: of one member, each way. latency_seconds: of one message. LayoutError for what cannot be."""

    bytes_per_second: float = math.inf
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Check both numbers."""
        if not self.bytes_per_second > 0:
            raise LayoutError(f"a link of {self.bytes_per_second} bytes per second: give more than 0")
        if not 0 <= self.latency_seconds < math.inf:
            raise LayoutError(f"a link with a latency of {self.latency_seconds} seconds: give 0 or more")

    def send(self, nbytes: float) -> float:
        """Seconds of one message."""
        return self.latency_seconds + nbytes / self.bytes_per_second

    def gather(self, nbytes: float, ranks: int) -> float:
        """Seconds of a ring's all-gather, or of its reduce-scatter: ranks - 1 messages of a part each.

        nbytes: of all parts together.
        """
        return (ranks - 1) * self.send(nbytes / ranks) if ranks > 1 else 0.0

    def reduce(self, nbytes: float, ranks: int) -> float:
        """Seconds of a ring's all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather(nbytes, ranks)


@dataclass(frozen=True)
class Links:
    """The default costs nothing. per_node: members of a node, in the order of their numbers; None: all are on one.

    members: by rank; empty if each rank is the member of its number.
    """

    inside: Link = field(default_factory=Link)
    between: Link = field(default_factory=Link)
    per_node: int | None = None
    members: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """LayoutError for a node without members."""
        if self.per_node is not None and self.per_node < 1:
            raise LayoutError(f"{self.per_node} members on a node: give 1 or more")

    def of(self, ranks: Sequence[int]) -> Link:
        """The slowest link among these ranks: that between nodes if they are on several."""
        if self.per_node is None:
            return self.inside
        nodes = {(self.members[rank] if self.members else rank) // self.per_node for rank in ranks}
        return self.inside if len(nodes) == 1 else self.between

    @property
    def fastest(self) -> Link:
        """A link that is as good as each of them."""
        used = (self.inside,) if self.per_node is None else (self.inside, self.between)
        return Link(max(each.bytes_per_second for each in used), min(each.latency_seconds for each in used))

    def between_members(self, members: tuple[int, ...]) -> Links:
        """The same with these members at the ranks."""
        return dataclasses.replace(self, members=members)
