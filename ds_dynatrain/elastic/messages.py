"""Messages between a coordinator and its peers (workers, agents, and commands that ask a question).

A message on the wire is four bytes of length (big-endian), that many bytes of JSON (an object whose `kind` names one of
the classes below), and a tag that authenticates it (see `connection`). Nothing is guessed and nothing is unpickled: an
unknown kind, an unknown field, a value of a wrong type or a length above the limit raises a `MessageError` that names
the problem.

A connection opens with `Challenge` from the coordinator and `Hello` from the peer, answered by `Welcome` or `Refused`.
All messages from `Hello` on are authenticated. A worker continues with one `Announce`. It sends `Report` as its
heartbeat and whenever something has changed, `Probed` and `Shown` in answer to each `Probe` and `Show`, and `Bye` at
its end. An agent sends `Agent`, once and then as its heartbeat. A peer that only asks a question sends `Query` or
`Dismiss`. The coordinator sends `Changed`, `Amended`, `Leave`, `Probe`, `Show`, `Fence`, `Finished`, `Status`,
`Dismissed` and `Refused`.

On each connection the coordinator sends a worker the first generation in full, and later generations as changes. The
worker checks each result against a digest, and opens a new connection if they differ. It never acts on unchecked data.

A report has the whole state of its worker, so a lost or repeated report does no harm. `Switched` is for people only:
the worker of rank 0 sends one for each switch, and repeats the most recent ones to a new coordinator, which recognizes
them by their numbers.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ds_dynatrain.elastic.generation import (
    LONGEST_NODE,
    Amendment,
    Generation,
    MemberId,
    Members,
    NodeId,
    Text,
    WireRecord,
)
from ds_dynatrain.errors import MessageError

PROTOCOL = 10
"""Version of the protocol; both ends must have the same one."""
LARGEST_GREETING = 4 * 1024
"""The maximum size in bytes of a message from a peer that has not yet proved that it knows the token."""
LARGEST_ANSWER = 256 * 1024
"""The maximum size in bytes of a message from a worker: enough for the longest `Shown`, whatever its characters are."""
LARGEST_MESSAGE = 16 * 1024 * 1024
"""The maximum size in bytes of any other message: enough for a world of 65,536 members with ids of 128 characters."""

HEADER = struct.Struct(">I")

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
PhaseName = Annotated[str, Field(pattern=r"^[a-z_ ]{1,24}$")]
MOST_PHASES = 16
"""The maximum number of phases of a switch, each with a duration."""
LONGEST_WORDS = 160
Words = Annotated[str, Field(max_length=LONGEST_WORDS)]
"""A text short enough for a `Switched` message to fit into `LARGEST_GREETING` bytes."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
LONGEST_STACKS, MOST_LINES, LONGEST_LINE = 16_384, 40, 400
"""The maximum numbers of characters of a worker's stacks, of its last log lines, and of characters in each line."""
HostPort = Annotated[str, Field(pattern=r"^([0-9.]{7,15}|\[[0-9a-f:.]{2,45}\]):[0-9]{1,5}$")]
"""A numeric address with a port. It contains no host name, so nothing has to be looked up."""
MOST_PROBED = 48
"""The maximum number of addresses in a `Probe`."""
MOST_PARTED = 16
"""The maximum number of pairs of disconnected hosts that a status names."""
Probes = Annotated[tuple[HostPort, ...], Field(max_length=MOST_PROBED)]
Phase = Literal["warming", "waiting", "building", "working", "leaving"]


class Challenge(WireRecord):
    """First message of the coordinator on a connection: its protocol version, and its random number, from which the
    keys of the connection are derived."""

    kind: Literal["challenge"] = "challenge"
    version: int
    nonce: Nonce


class Hello(WireRecord):
    """Answer of the peer to `Challenge`, with the peer's own random number. `job` is "" for peers that only ask a
    question."""

    kind: Literal["hello"] = "hello"
    nonce: Nonce
    job: Text = ""


class Welcome(WireRecord):
    """Message that admits a peer, with the settings that the peer needs."""

    kind: Literal["welcome"] = "welcome"
    term: str
    store_port: Port
    """Port of the store for process groups, on the coordinator's host."""
    beat_seconds: Seconds
    """Interval between the peer's heartbeats, in seconds."""
    stuck_seconds: Seconds
    """How many seconds a worker may be stuck before it is declared lost; 0 for no limit."""
    min_nodes: Count
    max_nodes: Count


class Refused(WireRecord):
    """Message that refuses a peer, at the start or later. The connection ends after this message.

    Before the peer has proved that it knows the token, the refusal itself is not authenticated.
    """

    kind: Literal["refused"] = "refused"
    reason: Text


class Announce(WireRecord):
    """Message with which a worker introduces itself.

    nonce: a random id that each process chooses once; "" for a peer that never reconnects. An announcement with the
        same pid and nonce replaces the process's earlier connection.
    restarts: how often the worker's agent has restarted its workers.
    world: the newest generation that the worker has received; None on its first connection.
    reach: an address, on the host of the worker's process groups, to which others can try to connect; "" if unknown.
    """

    kind: Literal["announce"] = "announce"
    node: NodeId
    local_rank: Annotated[int, Field(ge=0, lt=1 << 16)]
    local_size: Annotated[int, Field(ge=1, le=1 << 16)]
    pid: Annotated[int, Field(ge=1)]
    nonce: Text = ""
    restarts: Count = 0
    world: Generation | None = None
    reach: HostPort | Literal[""] = ""


Engines = Literal["none", "building", "built"]
"""Stages of building engines, in this order; a worker never goes back to an earlier one."""
Protected = Literal["", "no", "yes"]
"""Whether other members keep copies of the state that only one member holds; "" if members keep no copies."""


class Tally(WireRecord):
    """How a worker has spent its time since its script first reached a boundary (a point between two optimizer steps).
    For people only. No value ever decreases, except `samples`.

    Durations are measured by the worker's own clock. Together they add up to the time until the last boundary.
    """

    steps: Count = 0
    """Number of optimizer steps in which the worker has taken part, including those repeated after a death."""
    samples: Count = 0
    """Number of samples before the current step, over all ranks, since the start of the job."""
    stepping_seconds: Seconds = 0.0
    """Seconds spent in optimizer steps. Each interval between two boundaries counts if a step was taken in it."""
    held_seconds: Seconds = 0.0
    """Seconds spent between steps, and in global batches that were discarded."""
    saving_seconds: Seconds = 0.0
    """The part of `held_seconds` that was spent on saving checkpoints."""
    saved_member_seconds: Seconds = 0.0
    """Seconds for which the balancer has kept members idle because fewer members were sufficient, summed over these
    members."""
    generation: Count = 0
    """The generation in which the worker last continued after a boundary."""


class Figures(WireRecord):
    """Figures of a worker's training, for people only. A figure is None if the job does not report it."""

    loss: Finite | Literal["not finite"] | None = None
    """Loss of the worker's last micro-batch."""
    learning_rate: Finite | None = None
    memory_bytes: Count | None = None
    """Memory in use on the worker's accelerator, in bytes; if it trains on a CPU, the memory of the process."""
    memory_limit: Count | None = None
    gpu_percent: Annotated[float, Field(ge=0, le=100)] | None = None
    """Percentage of recent time in which the worker's GPU was busy."""


class Report(WireRecord):
    """Current state of a worker. It is also the worker's heartbeat."""

    kind: Literal["report"] = "report"
    ready: bool = False
    """Whether the worker has imported and built everything, so that it can join at once."""
    leaving: bool = False
    """Whether the worker was asked to leave the job."""
    entered: Count = 0
    """The last generation that the worker has entered; 0 before the first one."""
    broken: Count = 0
    """The newest generation that the worker knew of when a collective failed; 0 if none has failed.

    If this is the current generation, all members form a new one. If a later generation was published first, the worker
    also reports that generation as broken.
    """
    hung: Words = ""
    """A description of the collective that hung, and of how long the worker waited for it; "" if none hung."""
    step: Count = 0
    layout: Text = ""
    pause_ms: Seconds = 0.0
    """How long training was paused by the worker's last change of world, in milliseconds."""
    protected: Protected = ""
    """Whether the death of this worker would cost the job no more than a step or two. For people only."""
    blocked_seconds: Seconds = 0.0
    """Seconds for which the worker's main thread has run no Python code; 0 while it waits for another process."""
    engines: Engines = "none"
    """How far the worker has got in building its engines for a running job; "built" once its script is in its training
    loop."""
    lacking: Count = 0
    """The last generation that had too few members for any layout; 0 if there was none."""
    waits_for: Text = ""
    """A description of the members for which the worker's main thread has been waiting for a while. For people only."""
    tally: Tally = Tally()
    figures: Figures = Figures()


class SwitchOutcome(WireRecord):
    """Outcome of one engine's switch to another layout."""

    engine: Count = 1
    committed: bool
    step: Count
    source: Words
    target: Words
    """Description of the layout after the switch; `source` describes the layout before the switch."""
    members: Count
    """Number of members that have a rank after the switch."""
    pause_ms: Seconds
    certificate_ms: Seconds = 0.0
    phases_ms: Annotated[dict[PhaseName, Seconds], Field(max_length=MOST_PHASES, default_factory=dict)]
    bytes_sent: Count = 0
    bytes_minimum: Count = 0
    cause: Words = ""
    reason: Words = ""
    """Reason why the switch was rolled back; "" if it was committed."""


class Switched(SwitchOutcome):
    """Message that reports the outcome of a switch; sent by the worker of rank 0."""

    kind: Literal["switched"] = "switched"
    number: Count
    """Number of the switch, unique within its engine."""


class Probed(WireRecord):
    """Answer of a worker to `Probe`: the addresses to which it could connect, and those to which it could not."""

    kind: Literal["probed"] = "probed"
    reached: Probes = ()
    unreached: Probes = ()


class Shown(WireRecord):
    """Answer of a worker to `Show`: its last log lines, and the stacks of its threads, the main thread first."""

    kind: Literal["shown"] = "shown"
    lines: Annotated[
        tuple[Annotated[str, Field(max_length=LONGEST_LINE)], ...], Field(max_length=MOST_LINES, default=())
    ]
    stacks: Annotated[str, Field(max_length=LONGEST_STACKS)]


class Bye(WireRecord):
    """Goodbye message of a worker whose script has ended, or of an agent whose workers have ended.

    If the connection ends after this message, that is not counted as a failure.
    """

    kind: Literal["bye"] = "bye"
    newest: Count = 0
    """The last generation that the worker has received."""
    has_left: bool = False
    """Whether the worker was asked to leave and has finished: its state was handed over, or saved."""
    failed: bool = False
    """Whether one of the agent's workers ended with an error or with a nonzero exit code."""


class Agent(WireRecord):
    """Message with which a node's agent introduces itself; also its heartbeat. The agent can end workers that hang."""

    kind: Literal["agent"] = "agent"
    node: NodeId


class Query(WireRecord):
    """Request for the job's `Status`."""

    kind: Literal["query"] = "query"


class Dismiss(WireRecord):
    """Request to make all workers of a node leave, as SIGTERM would."""

    kind: Literal["dismiss"] = "dismiss"
    node: NodeId
    is_spare: bool = False
    """Whether the job itself makes the request, because it has no work for the node. Such a request is refused if the
    node hosts the coordinator, or if fewer nodes than the job's minimum would remain."""


class Dismissed(WireRecord):
    """Answer to `Dismiss`, with the workers that were asked to leave."""

    kind: Literal["dismissed"] = "dismissed"
    members: Members


class Changed(WireRecord):
    """Message that gives the members of a new generation the whole record of it."""

    kind: Literal["changed"] = "changed"
    world: Generation


class Amended(WireRecord):
    """Message that announces a new generation by its difference from the previous one sent over this connection."""

    kind: Literal["amended"] = "amended"
    change: Amendment


class Leave(WireRecord):
    """Request to a worker to hand over its state and leave, because its node is needed elsewhere."""

    kind: Literal["leave"] = "leave"


class Probe(WireRecord):
    """Question to a worker: to which of the given addresses of other workers can it connect?"""

    kind: Literal["probe"] = "probe"
    peers: Probes


class Show(WireRecord):
    """Question to a worker: what is it doing?"""

    kind: Literal["show"] = "show"


class Fence(WireRecord):
    """Order to an agent to kill one of its workers, which has stopped responding and which the other members no longer
    need.

    pid: the process to end; None if the coordinator never learned it, because the worker hung while the coordinator was
        restarted.
    """

    kind: Literal["fence"] = "fence"
    member: MemberId
    pid: Annotated[int, Field(ge=1)] | None


class Finished(WireRecord):
    """Notice to idle members that the scripts of the working members have ended, so that no work will come for them."""

    kind: Literal["finished"] = "finished"


class MemberStatus(WireRecord):
    """Status of one member, as shown to people."""

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
    """Seconds since the coordinator last received a message from the member."""
    waits_for: Text
    figures: Figures = Figures()


class ChangeStatus(WireRecord):
    """Status of one recent change of the job's members."""

    generation: Count
    change: Text
    size: Count
    seconds_ago: Seconds
    reason: Text


class StartingNode(WireRecord):
    """A node whose agent is connected but whose workers are not yet, because they are still importing or building their
    model."""

    node: NodeId
    seconds: Seconds
    """Seconds since the agent connected."""


class Status(WireRecord):
    """Status of the job as known to the coordinator, for people."""

    kind: Literal["status"] = "status"
    job: Text
    term: str
    min_nodes: Count
    max_nodes: Count
    beat_seconds: Seconds = 0.0
    generation: Count
    paused: bool
    finished: bool
    ranks: Members
    members: tuple[MemberStatus, ...]
    starting: tuple[StartingNode, ...] = ()
    changes: tuple[ChangeStatus, ...]
    parted: Annotated[tuple[Text, ...], Field(max_length=MOST_PARTED)] = ()
    """Descriptions of the pairs of hosts that cannot reach each other."""


FromPeer = Hello | Announce | Report | Switched | Probed | Shown | Bye | Agent | Query | Dismiss
ToWorker = Changed | Amended | Leave | Probe | Show | Finished
FromCoordinator = Challenge | Welcome | Refused | ToWorker | Fence | Status | Dismissed
Message = FromPeer | FromCoordinator

_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """Return a message in the wire format. Raises MessageError if it is longer than any peer accepts."""
    body = message.model_dump_json().encode()
    if len(body) > LARGEST_MESSAGE:
        raise MessageError(f"{message.kind}: {len(body)} bytes, at most {LARGEST_MESSAGE} are allowed")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes, limit: int) -> int:
    """Return the body length that a message's header states. Raises MessageError if it is above `limit`."""
    length: int = HEADER.unpack(header)[0]
    if length > limit:
        raise MessageError(f"a message of {length} bytes is announced, at most {limit} are taken here")
    return length


def decode(body: bytes) -> Message:
    """Parse the body of a message. Raises MessageError for a malformed body; the error names the invalid field."""
    try:
        return _MESSAGES.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        value = first["input"]  # it may come from a hostile peer
        said = repr(value[:200] if isinstance(value, str | bytes) else type(value).__name__)
        raise MessageError(f"{where}: {first['msg']}, got {clipped(said, LONGEST_NODE)}") from None


def clipped(text: str, limit: int) -> str:
    """Return a text, truncated to `limit` characters if it is longer."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
