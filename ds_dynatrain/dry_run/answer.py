"""Result of a dry run as plain data. docs/reference has its JSON schema."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MovedBytes(_Part):
    """The bytes of a change, over all members.

    kept: bytes that a member already holds, and copies or leaves in place.
    cast: bytes of weights that a member casts from its new masters.
    in_node, between_nodes: bytes sent to another member.
    sent: the sum of `in_node` and `between_nodes`.
    minimum: a proven lower bound on `sent` for all assignments of members to ranks that keep the member at rank 0 and
        the node of each rank.
    excess: the bytes sent beyond what the sizes of both layouts require, keyed by cause.
    """

    kept: int
    cast: int
    in_node: int
    between_nodes: int
    sent: int
    minimum: int
    excess: dict[str, int]


class BusiestMember(_Part):
    """The member that sends or receives the most."""

    member: int
    node: str
    sent: int
    received: int
    sent_between_nodes: int
    received_between_nodes: int


class PeakMemory(_Part):
    """The memory of the member that needs the most: the state in both layouts, and bytes in flight.

    device: the memory of a device; None if unknown.
    lean: the peak memory of a lean switch.
    """

    member: int
    before: int
    after: int
    peak: int
    lean: int
    device: int | None


class ChangeSeconds(_Part):
    """The time of a change.

    memory, node, network: the minimum time for each class of links: inside a member, inside a node, between nodes.
    floor: a lower bound on the transfer time: the largest of the three, because classes of links work in parallel.
    phases: the expected time of each phase, from measured coefficients.
    expected: the sum of the phases.
    """

    memory: float
    node: float
    network: float
    floor: float
    phases: dict[str, float]
    expected: float


class NodeBytes(_Part):
    """One node: its number of members before and after the change, and the bytes that it exchanges with other nodes."""

    name: str
    before: int
    after: int
    sent: int
    received: int


class ExchangeRound(_Part):
    """Exchanges between members that take place at the same time.

    between_nodes: whether the exchanges are between nodes rather than inside them.
    seconds: the duration of the longest exchange.
    """

    between_nodes: bool
    seconds: float


class ChangeFigures(_Part):
    """The costs of a change.

    members: the member at each rank of the target.
    pairs: (sending node, receiving node, bytes) of the pairs that exchange the most, as indices into `nodes`.
    rounds: the rounds of exchanges, in order; empty if there are many members.
    """

    members: list[int]
    bytes: MovedBytes
    busiest: BusiestMember
    memory: PeakMemory
    seconds: ChangeSeconds
    nodes: list[NodeBytes]
    freed: list[str]
    pairs: list[tuple[int, int, int]]
    rounds: list[ExchangeRound]


class DryRunAnswer(_Part):
    """The result of a dry run: whether a change fits, its costs, and the assumptions behind them.

    refusal: why the change is refused; "" if it fits.
    ways_out: what would work instead.
    figures: the costs, even if the change is refused; None if the model cannot have one of the layouts.
    """

    model: str
    parameters: int
    source: dict[str, int | list[int]]
    target: dict[str, int | list[int]]
    fits: bool
    refusal: str
    ways_out: list[str]
    figures: ChangeFigures | None
    assumptions: list[str]
