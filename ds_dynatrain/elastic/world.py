"""The record of one generation: the members that train together, in the order of their ranks, and why.

A member's id is `NODE/LOCAL_RANK`; a node's id is new whenever its agent starts its workers, so no id is used twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LONGEST_NODE = 128
LONGEST_TEXT = 512
MOST_MEMBERS = 1 << 16

NodeId = Annotated[str, Field(pattern=rf"^[A-Za-z0-9._:@-]{{1,{LONGEST_NODE}}}$")]
MemberId = Annotated[str, Field(pattern=rf"^[A-Za-z0-9._:@-]{{1,{LONGEST_NODE}}}/[0-9]{{1,5}}$")]
Members = Annotated[tuple[MemberId, ...], Field(max_length=MOST_MEMBERS)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
# (pydantic's `$` is the very end of the text, also where a line break comes last.)
Change = Literal["planned", "failure"]


class Record(BaseModel):
    """Base of what travels: frozen, strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class World(Record):
    """One generation, as the coordinator publishes it."""

    term: Annotated[str, Field(pattern=r"^[0-9a-f]{1,32}$")]
    """The run of the coordinator that made it: with the generation it names keys that nobody ever used."""
    generation: Annotated[int, Field(ge=1, lt=1 << 53)]
    change: Change
    """"planned": all can finish first what they do; "failure": someone in the world before is dead, or too late to be
    waited for, so abort what is being formed."""
    members: Members
    """In the order of their ranks: survivors in their old order, then newcomers."""
    survivors: Annotated[int, Field(ge=0)] = 0
    """So many of them, the first ones, were in the last world that anybody entered: they hold its state."""
    leaving: Members = ()
    """Living members outside of it that may still hold state: they hand it over, then go."""
    lost: Members = ()
    """Members of the world before that are dead."""
    broken: Annotated[int, Field(ge=0)] = 0
    """The newest generation that was known when a collective failed, or a hand-over broke off; 0: none ever did.
    Whatever else this record says: nobody trains on in that generation, or in an earlier one."""
    hangs: Annotated[int, Field(ge=0)] = 0
    """How often a collective has not ended, each time within a few steps of the time before; 0: that is not why this
    generation came. With the second one the job ends."""
    begun: bool = False
    """Steps were made before: where nobody holds the state any more, it comes from a checkpoint if there is one."""
    paused: bool = False
    """Fewer nodes than the job's minimum: keep the state, do not train."""
    reason: Text = ""

    @model_validator(mode="after")
    def _consistent(self) -> World:
        everyone = [*self.members, *self.leaving, *self.lost]
        if len(set(everyone)) < len(everyone):
            raise ValueError("a member stands twice in a world")
        if self.survivors > len(self.members):
            raise ValueError(f"{self.survivors} survivors among {len(self.members)} members")
        if self.broken >= self.generation:
            raise ValueError(f"generation {self.broken} is broken in the record of generation {self.generation}")
        return self

    @property
    def everyone(self) -> tuple[str, ...]:
        """Members and those that leave: whom others may wait for."""
        return (*self.members, *self.leaving)

    @property
    def prefix(self) -> str:
        """Return where the keys of this generation's groups lie in the store."""
        return f"world/{self.term}/{self.generation}"

    def rank(self, member: str) -> int | None:
        """The place of a member, or None if it is not in this world."""
        return self.members.index(member) if member in self.members else None


NO_WORLD = World.model_construct(term="", generation=0, change="planned", members=())
"""Before the first generation: nobody is in it."""


def member_id(node: str, local_rank: int) -> str:
    """The id of a node's worker."""
    return f"{node}/{local_rank}"


def node_of(member: str) -> str:
    """The node of a member."""
    return member.rpartition("/")[0]


def nodes_of(members: Iterable[str]) -> set[str]:
    """The nodes of several members."""
    return {node_of(member) for member in members}
