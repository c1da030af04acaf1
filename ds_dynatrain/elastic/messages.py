"""Messages between a coordinator and its peers.

A message on the wire is four bytes of length (big-endian), that many bytes of JSON, an object whose `kind` names one of
the classes below, and its tag (see `channel`). Nothing is guessed and nothing is unpickled: an unknown kind, an unknown
field, a value of another type or a length above the limit is a `MessageError` that says which.

A connection opens with `Challenge` from the coordinator and `Hello` from the peer, answered by `Welcome` or `Refused`;
from `Hello` on all is proved. After that a worker sends one `Announce`, then `Report` whenever something changed and as
its heartbeat, `Probed` for each `Probe`, and `Bye` at its end; an agent sends one `Agent` and `Beat`; whoever only asks
sends `Query` or `Dismiss`. The coordinator sends `Changed`, `Leave`, `Probe`, `Fence`, `Finished`, `Status`,
`Dismissed` and `Refused`. Reports say all that a worker is, so a lost or a repeated one does no harm. `Switched` is for
people alone: the worker of rank 0 sends one a switch, and its last ones again to another coordinator, which knows them
by their numbers.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ds_dynatrain.elastic.world import LONGEST_NODE, MemberId, Members, NodeId, Record, Text, World
from ds_dynatrain.errors import MessageError

PROTOCOL = 7
"""Version of all this; both ends must have the same one."""
LARGEST_GREETING = 4 * 1024
"""Bytes of a message from a peer that has not proved anything yet."""
LARGEST_MESSAGE = 16 * 1024 * 1024
"""Bytes of any other message: a world of 65,536 members with ids of 128 characters stays below."""

HEADER = struct.Struct(">I")

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
PhaseName = Annotated[str, Field(pattern=r"^[a-z_ ]{1,24}$")]
MOST_PHASES = 16
"""Of a switch, with a duration each."""
LONGEST_WORDS = 160
Words = Annotated[str, Field(max_length=LONGEST_WORDS)]
"""So long that a switch fits into `LARGEST_GREETING` bytes, which is what a worker may send at once."""
HostPort = Annotated[str, Field(pattern=r"^([0-9.]{7,15}|\[[0-9a-f:.]{2,45}\]):[0-9]{1,5}$")]
"""An address without names to be looked up."""
MOST_PROBED = 48
"""Addresses in a message: its answer has to fit into `LARGEST_GREETING` bytes, too."""
MOST_PARTED = 16
"""Pairs of hosts that a status names."""
Probes = Annotated[tuple[HostPort, ...], Field(max_length=MOST_PROBED)]
Phase = Literal["warming", "waiting", "building", "working", "leaving"]


class Challenge(Record):
    """The coordinator's first words: its version, and its half of what the keys of this connection follow from."""

    kind: Literal["challenge"] = "challenge"
    version: int
    nonce: Nonce


class Hello(Record):
    """A peer's answer, with the other half. The job is empty where it only asks."""

    kind: Literal["hello"] = "hello"
    nonce: Nonce
    job: Text = ""


class Welcome(Record):
    """The peer is let in; what it has to know."""

    kind: Literal["welcome"] = "welcome"
    term: str
    store_port: Port
    """Where the store for process groups listens, on the coordinator's host."""
    beat_seconds: Seconds
    """How often the peer has to be heard of."""
    stuck_seconds: Seconds
    """After how long of standing still a worker is given up; 0: never."""
    min_nodes: Count
    max_nodes: Count


class Refused(Record):
    """The peer is not let in, or no longer; the connection ends. Before the peer's proof nothing proves this either."""

    kind: Literal["refused"] = "refused"
    reason: Text


class Announce(Record):
    """A worker introduces itself. On a further connection it also says what it knows: the newest world that it was told
    of.

    nonce: drawn once by each process. With the same pid and nonce an announcement replaces the process's connection of
    before; empty on a peer that never comes back. restarts: how often its agent has started workers before. reach: an
    address to which others can try to connect, on the host of its process groups; empty where that is not known.
    """

    kind: Literal["announce"] = "announce"
    node: NodeId
    local_rank: Annotated[int, Field(ge=0, lt=1 << 16)]
    local_size: Annotated[int, Field(ge=1, le=1 << 16)]
    pid: Annotated[int, Field(ge=1)]
    nonce: Text = ""
    restarts: Count = 0
    world: World | None = None
    reach: HostPort | Literal[""] = ""


Engines = Literal["none", "building", "built"]
"""In this order, and never back."""
Protected = Literal["", "no", "yes"]
"""Whether others keep what a member holds alone; nothing where they are not asked to."""


class Tally(Record):
    """Work of a worker since its script first came to a boundary, for people; of it only `samples` goes back.

    Durations by its own clock; together they are the time up to its last boundary.
    """

    steps: Count = 0
    """Optimizer steps that it has taken part in, those included that were made again after a death."""
    samples: Count = 0
    """Samples before the present step, over all ranks, counted from the start of the job."""
    stepping_seconds: Seconds = 0.0
    """From boundary to boundary, where a step was made."""
    held_seconds: Seconds = 0.0
    """At boundaries, and in global batches that were discarded."""
    saving_seconds: Seconds = 0.0
    """What of that was for checkpoints."""
    generation: Count = 0
    """That it was in when it left that boundary."""


class Report(Record):
    """State of a worker now; also its heartbeat."""

    kind: Literal["report"] = "report"
    ready: bool = False
    """It has imported and built everything and can join at once."""
    leaving: bool = False
    """It has been told to go."""
    entered: Count = 0
    """The last generation that it trains in; 0 before the first."""
    broken: Count = 0
    """The newest generation that was known here when a collective failed; if it is the present one, everybody forms a
    new one. Where a later one was published first, the worker says it again of that one."""
    hung: Words = ""
    """The collective that did not end, where that is what is broken, and for how long it was waited for."""
    step: Count = 0
    layout: Text = ""
    pause_ms: Seconds = 0.0
    """How long its last change of world held up training."""
    protected: Protected = ""
    """For people: whether its death would cost no more than a step or two."""
    blocked_seconds: Seconds = 0.0
    """For how long its main thread has run no Python code, and waited for nobody."""
    engines: Engines = "none"
    """Whether it makes its engines for a job that runs, and whether its script has come to its loop with them."""
    lacking: Count = 0
    """The last generation in which it found no layout for so few members: with others there may be one."""
    waits_for: Text = ""
    """Whom its main thread has been waiting for, for a while already; for people."""
    tally: Tally = Tally()


class Switched(Record):
    """How a switch of an engine went, as the worker of rank 0 has reported it."""

    kind: Literal["switched"] = "switched"
    engine: Count = 1
    number: Count
    """Of the switch: no two of an engine have the same."""
    committed: bool
    step: Count
    source: Words
    target: Words
    """The layouts, in words."""
    members: Count
    """That train in the target."""
    pause_ms: Seconds
    certificate_ms: Seconds = 0.0
    phases_ms: Annotated[dict[PhaseName, Seconds], Field(max_length=MOST_PHASES, default_factory=dict)]
    bytes_sent: Count = 0
    bytes_minimum: Count = 0
    cause: Words = ""
    reason: Words = ""
    """Why it was rolled back."""


class Probed(Record):
    """Addresses of a `Probe` that a worker could connect to, and those that it could not."""

    kind: Literal["probed"] = "probed"
    reached: Probes = ()
    unreached: Probes = ()


class Bye(Record):
    """A worker's script has ended, or an agent's workers have: the end of this connection is no loss."""

    kind: Literal["bye"] = "bye"
    newest: Count = 0
    """The last generation that the worker was told of."""
    has_left: bool = False
    """It was told to go, and nobody needs anything of it any more: what it held is with others, or saved."""
    failed: bool = False
    """One of the agent's workers ended with an error, or with an exit code other than 0."""


class Agent(Record):
    """A node's agent, which can end a worker that hangs."""

    kind: Literal["agent"] = "agent"
    node: NodeId


class Beat(Record):
    """An agent's heartbeat."""

    kind: Literal["beat"] = "beat"


class Query(Record):
    """Ask for the `Status`."""

    kind: Literal["query"] = "query"


class Dismiss(Record):
    """Ask that all workers of a node go, as SIGTERM would tell them."""

    kind: Literal["dismiss"] = "dismiss"
    node: NodeId


class Dismissed(Record):
    """Answer to `Dismiss`: the workers that were told."""

    kind: Literal["dismissed"] = "dismissed"
    members: Members


class Changed(Record):
    """A new generation."""

    kind: Literal["changed"] = "changed"
    world: World


class Leave(Record):
    """Tell a worker that somebody wants its node: hand over, and go."""

    kind: Literal["leave"] = "leave"


class Probe(Record):
    """Ask a worker which of these other workers' addresses it can connect to."""

    kind: Literal["probe"] = "probe"
    peers: Probes


class Fence(Record):
    """Tell an agent to end a worker of its own that is silent and that the others go on without.

    pid: None if the coordinator never heard it: it hung while that one was started anew.
    """

    kind: Literal["fence"] = "fence"
    member: MemberId
    pid: Annotated[int, Field(ge=1)] | None


class Finished(Record):
    """Tell members that wait that the scripts of those that worked have ended: nothing will come."""

    kind: Literal["finished"] = "finished"


class MemberStatus(Record):
    """One line of the status."""

    member: MemberId
    phase: Phase
    rank: int | None
    pid: int
    entered: Count
    step: Count
    layout: Text
    pause_ms: Seconds
    protected: Protected
    heard_seconds: Seconds
    """How long ago something came from it."""
    waits_for: Text


class ChangeStatus(Record):
    """One of the last changes."""

    generation: Count
    change: Text
    size: Count
    seconds_ago: Seconds
    reason: Text


class StartingNode(Record):
    """A node whose agent is connected and whose workers are not: they import, or build their model."""

    node: NodeId
    seconds: Seconds
    """Since the agent connected."""


class Status(Record):
    """Knowledge of the coordinator, to be shown to a person."""

    kind: Literal["status"] = "status"
    job: Text
    term: str
    min_nodes: Count
    max_nodes: Count
    generation: Count
    paused: bool
    finished: bool
    ranks: Members
    members: tuple[MemberStatus, ...]
    starting: tuple[StartingNode, ...] = ()
    changes: tuple[ChangeStatus, ...]
    parted: Annotated[tuple[Text, ...], Field(max_length=MOST_PARTED)] = ()
    """Pairs of hosts that do not reach each other, in words."""


FromPeer = Hello | Announce | Report | Switched | Probed | Bye | Agent | Beat | Query | Dismiss
FromCoordinator = Challenge | Welcome | Refused | Changed | Leave | Probe | Fence | Finished | Status | Dismissed
Message = FromPeer | FromCoordinator

_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """A message as it goes over the wire; MessageError if it is longer than any peer would take."""
    body = message.model_dump_json().encode()
    if len(body) > LARGEST_MESSAGE:
        raise MessageError(f"{message.kind}: {len(body)} bytes, at most {LARGEST_MESSAGE} are allowed")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes, limit: int) -> int:
    """The length that a header announces; MessageError above `limit`."""
    length: int = HEADER.unpack(header)[0]
    if length > limit:
        raise MessageError(f"a message of {length} bytes is announced, at most {limit} are taken here")
    return length


def decode(body: bytes) -> Message:
    """The message of a body; MessageError that says what is wrong with it."""
    try:
        return _MESSAGES.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise MessageError(f"{where}: {first['msg']}, got {_short(first['input'])}") from None


def clipped(text: str, limit: int) -> str:
    """A text that fits into `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _short(value: Any) -> str:
    """A value as a hostile peer may have sent it, for the log: printable and short."""
    return clipped(repr(value[:200] if isinstance(value, str | bytes) else type(value).__name__), LONGEST_NODE)
