"""Result of a dry run as plain data. docs/reference has its JSON schema."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MovedBytes(_Part):
    """Bytes of a change, over all members.

    kept: held by the member already, which copies them or leaves them in place.
    cast: weights that a member casts from its new masters.
    in_node, between_nodes: sent to another member.
    sent: the sum of these two.
    minimum: what any assignment of members to ranks has to send, if rank 0 and the nodes of ranks stay; proved.
    excess: what is sent beyond the least that the sizes of both sides allow, by cause.
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
    """Memory of the member that needs the most: state of both layouts, and bytes in flight.

    device: what a device has; None if it is not known.
    lean: the peak of a lean switch.
    """

    member: int
    before: int
    after: int
    peak: int
    lean: int
    device: int | None


class ChangeSeconds(_Part):
    """Time of a change.

    memory, node, network: the least time of each class of links.
    floor: the largest of these, as all work side by side.
    phases: what is expected of each phase, by coefficients that were measured.
    expected: the sum of the phases.
    """

    memory: float
    node: float
    network: float
    floor: float
    phases: dict[str, float]
    expected: float


class NodeBytes(_Part):
    """A node: its members before and after, and the bytes that it exchanges with other nodes."""

    name: str
    before: int
    after: int
    sent: int
    received: int


class ExchangeRound(_Part):
    """Exchanges that take place at the same time: whether they are between nodes, and the seconds of the longest."""

    between_nodes: bool
    seconds: float


class ChangeFigures(_Part):
    """Costs of a change.

    members: the member at each rank of the target.
    pairs: bytes from node to node, by index into `nodes`, for the pairs that exchange the most.
    rounds: the rounds of exchanges, in order; empty for many members.
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
    """The answer: whether a change fits, what it costs, and on which assumptions.

    refusal: why it is refused; "" if it fits.
    ways_out: what would work instead.
    figures: what it costs, even if it is refused; None if the model cannot have one of the layouts.
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
