"""How members come to one decision: to switch at all, and at which step.

Every working member posts its wish and reads all others'; all judge the same records by the same rule, and the
judgement itself is written once (`decide`), so that a member that was late reads what the others decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.session import Request, Session
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.space import Layout


@dataclass(frozen=True)
class Proposal:
    """A switch that all working members agreed to: the same record on every member.

    generation: number of the world to be; it is used up even if the switch does not come about. at: optimizer steps
    after which it takes effect, None for the first boundary at which all are prepared. forms_anew: the source's groups
    cannot be used any more.
    """

    generation: int
    source_layout: Layout
    source_members: tuple[int, ...]
    layout: Layout
    members: tuple[int, ...]
    at: int | None
    forms_anew: bool = False

    @property
    def moves_nothing(self) -> bool:
        """Whether the same members stay in the same layout: then only the members around them change."""
        return not self.forms_anew and (self.layout, self.members) == (self.source_layout, self.source_members)

    @property
    def union(self) -> tuple[int, ...]:
        """Every member with a part in it, ascending."""
        return tuple(sorted({*self.source_members, *self.members}))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        record = asdict(self)
        record["source_layout"], record["layout"] = self.source_layout.to_dict(), self.layout.to_dict()
        return record

    @staticmethod
    def from_json(record: dict[str, Any]) -> Proposal:
        """The inverse of `to_json`."""
        layouts = {name: Layout.from_dict(record[name]) for name in ("source_layout", "layout")}
        members = {name: tuple(record[name]) for name in ("source_members", "members")}
        return Proposal(**{**record, **layouts, **members})


@dataclass(frozen=True)
class Wish:
    """What one working member asks for, or why it cannot."""

    layout: dict[str, int]
    at: int | None
    step: int
    refusal: tuple[str, str] | None = None


def agree(control: Control, place: str, wish: Wish, working: tuple[int, ...], proposal: Proposal) -> Proposal:
    """`proposal` if every working member's wish is the same and none refuses; the same answer on all of them.

    place: where in the training it is asked. SwitchRefused: a member refuses, wishes differ, or a member did not
    ask within the time-out.
    """
    session = Session(control, f"wish/{place}", working, f"switch to {proposal.layout}")
    asked = {name: value for name, value in asdict(wish).items() if name != "refusal"}
    verdict = session.agree(Request(asked, wish.refusal), proposal.to_json(), SwitchRefused, _differ)
    agreed = Proposal.from_json(verdict)
    control.decide(f"proposal/{agreed.generation}", agreed.to_json())
    return agreed


def _differ(one: int, other: int, asked: Mapping[int, Any]) -> str:
    first, second = (_words(Wish(**asked[member])) for member in (one, other))
    return f"members wish for different switches: member {one} for {first}, member {other} for {second}"


def _words(wish: Wish) -> str:
    when = "" if wish.at is None else f" at step {wish.at}"
    return f"{Layout.from_dict(wish.layout)}{when} (asked at step {wish.step})"


def meeting_step(control: Control, proposal: Proposal, rank: int, step: int, ahead: int = 1) -> int | None:
    """The step at which the members meet, None while that is open.

    Rank 0 sets it to its next step once all are prepared. No member can have passed that one: every step needs rank 0's
    gradients, and each member reads the board again at every boundary. ahead: 0 where nobody makes steps.
    """
    if proposal.at is not None:
        return proposal.at
    key = f"meet/{proposal.generation}"
    if rank == 0 and control.all_posted(f"prepared/{proposal.generation}", proposal.union):
        return int(control.decide(key, step + ahead))
    decided = control.read(key)
    return None if decided is None else int(decided)


def wait_for_rank_0(control: Control, proposal: Proposal) -> bool:
    """On a member that does not work: whether rank 0 stands at the meeting (polled, no wait)."""
    return control.all_posted(f"stand/{proposal.generation}", proposal.source_members[:1])


def stand(control: Control, proposal: Proposal, step: int, place: str, stop: Callable[[], None] | None = None) -> None:
    """Be at the meeting, and see that all others are, at the same step and in the same loader.

    stop: called while waiting; it may raise. MemberMissing for those that do not come in time, SwitchRefused where they
    stand elsewhere.
    """
    key = f"stand/{proposal.generation}"
    working = control.member in proposal.source_members
    control.post(f"{key}/{control.member}", {"step": step if working else None, "place": place})
    deadline = time.monotonic() + control.timeout_seconds
    records = control.gather(key, proposal.union, f"meeting of switch {proposal.generation}", deadline, stop)
    expected = records[proposal.source_members[0]]
    for member, record in sorted(records.items()):
        if record["place"] != expected["place"]:
            raise SwitchRefused(
                f"member {member} waits in {record['place']!r} and rank 0 stands in {expected['place']!r}",
                "use one train loader at the step of a switch on all members",
            )
        if member in proposal.source_members and record["step"] != expected["step"]:
            raise SwitchRefused(f"member {member} stands at step {record['step']}, rank 0 at step {expected['step']}")
