"""How members come to one decision: to switch at all, and at which step.

Every working member says what it asks for; the first one judges that once for all, and a member that was late reads
what was decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.proposal import Board, Proposal
from ds_dynatrain.engine.transaction.session import Request, Session
from ds_dynatrain.errors import MemberMissing, SwitchFailed, SwitchRefused
from ds_dynatrain.records import to_record
from ds_dynatrain.space import Layout

MOST_PLACES = 4
CONNECTING = "connecting"
IN_THE_PAUSE = -1
"""For a step: communicators are made when the switch takes place."""


@dataclass(frozen=True)
class SwitchRequest:
    """What one working member asks for, or why it cannot."""

    layout: dict[str, int]
    at: int | None
    step: int
    refusal: tuple[str, str] | None = None
    late: bool = False


def agree(control: Control, place: str, mine: SwitchRequest, working: tuple[int, ...], proposal: Proposal) -> Proposal:
    """`proposal` if every working member asks for the same and none refuses; the same answer on all of them.

    place: where in the training it is asked. SwitchRefused: a member refuses, requests differ, or a member did not
    ask within the time-out.
    """
    session = Session(control, f"request/{place}", working, f"switch to {proposal.layout}")
    asked = {name: value for name, value in asdict(mine).items() if name != "refusal"}
    request = Request({**asked, "destination": proposal.fingerprint()}, mine.refusal)
    generation = session.agree(request, proposal.generation, SwitchRefused, _differ)
    agreed = replace(proposal, generation=int(generation))
    if session.is_first:  # for idle members
        control.decide(f"proposal/{agreed.generation}", to_record(agreed))
    return agreed


def _differ(one: int, other: int, asked: Mapping[int, Any]) -> str:
    both = [{name: value for name, value in asked[each].items() if name != "destination"} for each in (one, other)]
    first, second = (_words(SwitchRequest(**each)) for each in both)
    if first == second:
        return f"members {one} and {other} ask for {first}, and do not give its ranks to the same members"
    return f"members ask for different switches: member {one} for {first}, member {other} for {second}"


def _words(request: SwitchRequest) -> str:
    when = "" if request.at is None else f" at step {request.at}"
    late = ", late" if request.late else ""
    return f"{Layout.from_dict(request.layout)}{when}{late} (asked at step {request.step})"


def say_prepared(control: Control, proposal: Proposal, error: str | None = None) -> None:
    """This member is ready for the switch, or it cannot be; the last one says that all have said so."""
    key = f"prepared/{proposal.generation}"
    if error is not None:
        control.decide(f"{key}/failed", f"it could not be prepared on member {control.member}: {error}")
    control.post(f"{key}/{control.member}", True)
    if control.count(f"{key}/count") == len(proposal.union):
        control.post(f"{key}/all", control.read(f"{key}/failed") or "")


def wait_until_prepared(control: Control, proposal: Proposal, stop: Callable[[], None]) -> None:
    """SwitchFailed if somebody cannot be, MemberMissing for who says nothing."""
    key, what = f"prepared/{proposal.generation}", "preparing the switch"
    try:
        (failed,) = control.wait({proposal.union[0]: f"{key}/all"}, what, stop=stop).values()
    except MemberMissing as missing:
        silent = [member for member in proposal.union if not control.all_posted(key, [member])]
        raise MemberMissing(what, silent or missing.members, missing.seconds) from None
    if failed:
        raise SwitchFailed(failed)


def meeting_step(control: Control, proposal: Proposal, rank: int, step: int, ahead: int = 1) -> int | None:
    """The step at which the members meet, None while that is open.

    Rank 0 sets it to its next step once all are prepared. No member can have passed that one: every step needs rank 0's
    gradients, and each member reads the board again at every boundary. ahead: 0 where nobody makes steps.
    """
    if proposal.at is not None:
        return proposal.at
    key = f"meet/{proposal.generation}"
    if rank == 0 and proposal.is_prepared(control):
        return int(control.decide(key, step + ahead))
    decided = control.read(key)
    return None if decided is None else int(decided)


def connecting_step(
    control: Control, proposal: Proposal, rank: int, step: int, is_needed: Callable[[], bool]
) -> int | None:
    """The step before that of a switch at which its communicators are made; `IN_THE_PAUSE` if there is none, None while
    that is open.

    Rank 0 sets it to its next step once all are prepared, as in `meeting_step`. is_needed: whether it lacks one.
    """
    if proposal.at is None:
        return IN_THE_PAUSE
    key, is_late = f"{ahead_key(proposal)}/step", step + 1 >= proposal.at
    if rank == 0 and (is_late or proposal.is_prepared(control)):
        return int(control.decide(key, IN_THE_PAUSE if is_late or not is_needed() else step + 1))
    decided = control.read(key)
    return None if decided is None else int(decided)


def ahead_key(proposal: Proposal) -> str:
    """Of what they do together at a boundary before it."""
    return f"ahead/{proposal.generation}"


def is_connecting_ahead(board: Board, proposal: Proposal) -> bool:
    """On a member that does not work: whether rank 0 stands where that is done (polled, no wait)."""
    return board.all_posted(f"{ahead_key(proposal)}/{CONNECTING}/0", proposal.source_members[:1])


def meet(session: Session, proposal: Proposal, step: int, place: str) -> None:
    """Be at the meeting, and see that all others are, at the same step and in the same loader.

    MemberMissing for those that do not come in time, SwitchRefused where they stand elsewhere.
    """
    member, leader = session.board.member, proposal.source_members[0]
    here = [member, place, step if member in proposal.source_members else None]
    mine = {"leader": here if member == leader else None, "elsewhere": [here]}
    said = session.reduce("meet", mine, _places, _judge_places, f"meeting of switch {proposal.generation}")
    if said is not None:
        raise SwitchRefused(*said)


def _places(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Where rank 0 stands, and of each place and step one member that stands there; a few are enough to find a wrong
    one.
    """
    stands = {(place, step): [member, place, step] for member, place, step in (*other["elsewhere"], *one["elsewhere"])}
    return {"leader": one["leader"] or other["leader"], "elsewhere": sorted(stands.values())[:MOST_PLACES]}


def _judge_places(found: dict[str, Any]) -> list[str] | None:
    """Reason and way out, where one stands elsewhere than rank 0."""
    _, wanted, at = found["leader"]
    for member, place, step in found["elsewhere"]:
        if place != wanted:
            reason = f"member {member} waits in {place!r} and rank 0 stands in {wanted!r}"
            return [reason, "use one train loader at the step of a switch on all members"]
        if step is not None and step != at:
            return [f"member {member} stands at step {step}, rank 0 at step {at}", ""]
    return None
