"""Record of one generation (the members that train together for a while), and of the change from one generation to the
next.

The record lists the members in the order of their ranks, and says why the generation was formed. A member's id is
`NODE/LOCAL_RANK`. A node gets a new id whenever its agent starts its workers, so no id is used twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_dynatrain.errors import MessageError

LONGEST_NODE = 128
LONGEST_TEXT = 512
MOST_MEMBERS = 1 << 16

NodeId = Annotated[str, Field(pattern=rf"^[A-Za-z0-9._:@-]{{1,{LONGEST_NODE}}}$")]
MemberId = Annotated[str, Field(pattern=rf"^[A-Za-z0-9._:@-]{{1,{LONGEST_NODE}}}/[0-9]{{1,5}}$")]
Members = Annotated[tuple[MemberId, ...], Field(max_length=MOST_MEMBERS)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
# pydantic's `$` matches only at the very end of the text, not before a final line break.
Change = Literal["planned", "failure"]


class WireRecord(BaseModel):
    """Base class of everything that is sent between processes: immutable, with strict types and no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class GenerationHead(WireRecord):
    """Record of a generation, without the list of its members."""

    term: Annotated[str, Field(pattern=r"^[0-9a-f]{1,32}$")]
    """Id of the run of the coordinator that made the generation. Together with the generation's number it forms a key
    prefix that was never used before."""
    generation: Annotated[int, Field(ge=1, lt=1 << 53)]
    change: Change
    """Kind of the change that led to this generation.

    "planned": all members can finish their step first.
    "failure": a member of the previous world is dead, or nobody waits for it any longer; process groups under
    construction are aborted.
    """
    survivors: Annotated[int, Field(ge=0)] = 0
    """Number of members that hold the state: those that were in the last entered world. They have the lowest ranks."""
    leaving: Members = ()
    """Members outside this world that are alive and may still hold state. They hand their state over, and then
    leave."""
    lost: Members = ()
    """Members of the previous world that are dead."""
    broken: Annotated[int, Field(ge=0)] = 0
    """The newest generation that was known when a collective failed or the handing over of state was interrupted; 0 if
    neither ever happened.

    No member continues to train in that generation or an earlier one, whatever else this record says.
    """
    hangs: Annotated[int, Field(ge=0)] = 0
    """Number of collectives that have hung in a row, each within a few steps of the previous one.

    0 if this generation was formed for another reason. The second such collective ends the job.
    """
    begun: bool = False
    """Whether steps were taken before this generation.

    If so, and if no member holds the state any longer, the state is loaded from a checkpoint if there is one.
    """
    paused: bool = False
    """Whether the job has fewer nodes than its minimum. If so, members keep their state and do not train."""
    reason: Text = ""


class Generation(GenerationHead):
    """Record of one generation, as the coordinator publishes it."""

    members: Members
    """The members in the order of their ranks: survivors in their old order, followed by newcomers."""

    @model_validator(mode="after")
    def _consistent(self) -> Generation:
        everyone = [*self.members, *self.leaving, *self.lost]
        if len(set(everyone)) < len(everyone):
            raise ValueError("a member is listed twice in a world")
        if self.survivors > len(self.members):
            raise ValueError(f"{self.survivors} survivors among {len(self.members)} members")
        if self.broken >= self.generation:
            raise ValueError(f"generation {self.broken} is broken in the record of generation {self.generation}")
        return self

    @property
    def everyone(self) -> tuple[str, ...]:
        """Members and leaving members, which are all members for which others may wait."""
        return (*self.members, *self.leaving)

    @property
    def prefix(self) -> str:
        """Prefix of this generation's keys in the key-value store."""
        return f"world/{self.term}/{self.generation}"

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Map from each member to its rank."""
        return {member: rank for rank, member in enumerate(self.members)}

    def rank(self, member: str) -> int | None:
        """Return the rank of a member; None if the member is not in this world."""
        return self.ranks.get(member)

    @cached_property
    def leavers(self) -> frozenset[str]:
        """The leaving members as a set."""
        return frozenset(self.leaving)

    @cached_property
    def digest(self) -> str:
        """Hash of the whole record."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class Amendment(WireRecord):
    """A generation, given as its difference from an earlier one that the receiver has. It takes a few hundred bytes
    instead of the list of all members."""

    head: GenerationHead
    base: Digest
    """Digest of the earlier generation."""
    dropped: Members
    added: Members
    digest: Digest
    """Digest of the later generation."""

    @classmethod
    def between(cls, base: Generation, world: Generation) -> Amendment | None:
        """Return the difference between two generations; None if members that stay have changed their order."""
        kept = tuple(member for member in base.members if member in world.ranks)
        if world.members[: len(kept)] != kept:
            return None
        return cls(
            head=GenerationHead(**world.model_dump(exclude={"members"})),
            base=base.digest,
            dropped=tuple(member for member in base.members if member not in world.ranks),
            added=world.members[len(kept) :],
            digest=world.digest,
        )

    def apply(self, base: Generation | None) -> Generation:
        """Return the later generation, computed from the earlier one.

        base: the generation that the receiver has; None if it has none.

        Raises MessageError if `base` is not the earlier generation, or if the result does not match the digest of the
        later one.
        """
        if base is None or base.digest != self.base:
            known = "none" if base is None else f"generation {base.generation}"
            raise MessageError(
                f"generation {self.head.generation} is a change of a generation that this process does not have; "
                f"it has {known}"
            )
        dropped = frozenset(self.dropped)
        members = (*(member for member in base.members if member not in dropped), *self.added)
        try:
            world = Generation(**dict(self.head), members=members)
        except ValidationError as error:
            raise MessageError(f"generation {self.head.generation}: {error.errors()[0]['msg']}") from None
        if world.digest != self.digest:
            raise MessageError(f"generation {self.head.generation}: the list of members has another digest")
        return world


NO_WORLD = Generation.model_construct(term="", generation=0, change="planned", members=())
"""Sentinel for the time before the first generation: a generation without members."""


def member_id(node: str, local_rank: int) -> str:
    """Return the member id of a node's worker."""
    return f"{node}/{local_rank}"


def node_of(member: str) -> str:
    """Return the id of the node on which a member runs."""
    return member.rpartition("/")[0]


def nodes_of(members: Iterable[str]) -> set[str]:
    """Return the ids of the nodes on which members run."""
    return {node_of(member) for member in members}
