"""Agreement of members on one decision: whether to switch to another layout, and at which step.

Every working member posts its request in the key-value store. The first member compares the requests and decides for
all. A member that comes late reads the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ds_dynatrain.errors import MemberMissing, SwitchFailed, SwitchRefused
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.session import Session
from ds_dynatrain.records import to_record

MOST_PLACES = 4


def agree(
    control: Control,
    place: str,
    working: tuple[int, ...],
    proposal: Proposal,
    step: int,
    refusal: tuple[str, str] | None = None,
) -> Proposal:
    """Return `proposal` if every working member makes the same request and none refuses. All members get the same
    result.

    place: a name for the point in training, unique in the key-value store.
    step: the number of optimizer steps that this member has done.
    refusal: the reason why this member cannot take part, and the advice on what to do; None if it can.

    Raises SwitchRefused if a member refuses, if requests differ, or if a member makes no request within the timeout.
    """
    session = Session(control, f"request/{place}", working, f"switch to {proposal.layout}")
    when = "" if proposal.at is None else f" at step {proposal.at}"
    said = f"{proposal.layout}{when}{', late' if proposal.late else ''} (asked at step {step})"
    request = {"said": said, "destination": proposal.fingerprint()}
    generation = session.agree(request, SwitchRefused, _differ, refusal, proposal.generation)
    agreed = replace(proposal, generation=int(generation))
    if session.is_first:  # for idle members
        control.decide(f"proposal/{agreed.generation}", to_record(agreed))
    return agreed


def _differ(one: int, other: int, asked: Mapping[int, Any]) -> str:
    first, second = asked[one]["said"], asked[other]["said"]
    if first == second:
        return f"members {one} and {other} ask for {first}, and do not give its ranks to the same members"
    return f"members ask for different switches: member {one} for {first}, member {other} for {second}"


def say_prepared(control: Control, proposal: Proposal, error: str | None = None) -> None:
    """Post that this member is ready for the switch, or the error that prevents it from taking part. The last member to
    post also records that all members have posted."""
    key = f"prepared/{proposal.generation}"
    if error is not None:
        control.decide(f"{key}/failed", f"it could not be prepared on member {control.member}: {error}")
    control.post(f"{key}/{control.member}", True)
    if control.count(f"{key}/count") == len(proposal.union):
        control.post(f"{key}/all", control.read(f"{key}/failed") or "")


def wait_until_prepared(control: Control, proposal: Proposal, stop: Callable[[], None]) -> None:
    """Wait until all members are ready for a switch.

    stop: called while waiting; it may raise an error to end the wait.

    Raises SwitchFailed if a member reports an error, and MemberMissing if a member does not report in time.
    """
    key, what = f"prepared/{proposal.generation}", "preparing the switch"
    try:
        (failed,) = control.wait({proposal.union[0]: f"{key}/all"}, what, stop=stop).values()
    except MemberMissing as missing:
        silent = [member for member in proposal.union if not control.all_posted(key, [member])]
        raise MemberMissing(what, silent or missing.members, missing.seconds) from None
    if failed:
        raise SwitchFailed(failed)


def meet(session: Session, proposal: Proposal, step: int, place: str, carry: Any = None) -> Any:
    """Wait until all members have reached the step of the switch, check that all use the same data loader and are at
    the same step, and return a record from rank 0.

    place: the loader or call at which the script of this member is.
    carry: on rank 0, the record for all other members.

    Raises MemberMissing if members do not come in time, and SwitchRefused if a member is at another step or loader.
    """
    member, leader = session.board.member, proposal.source_members[0]
    here = [member, place, step if member in proposal.source_members else None]
    mine = {"leader": [here, carry] if member == leader else None, "elsewhere": [here]}
    said = session.reduce("meet", mine, _places, _judge_places, f"meeting of switch {proposal.generation}")
    if said["refusal"] is not None:
        raise SwitchRefused(*said["refusal"])
    return said["carry"]


def _places(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge the reports of two groups of members: rank 0's position, and for each position (loader and step) one member
    that is there. Keep at most `MOST_PLACES` positions."""
    stands = {(place, step): [member, place, step] for member, place, step in (*other["elsewhere"], *one["elsewhere"])}
    return {"leader": one["leader"] or other["leader"], "elsewhere": sorted(stands.values())[:MOST_PLACES]}


def _judge_places(found: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of rank 0 to the members that meet for a switch: rank 0's record or, if a member is at another
    loader or step than rank 0, the reason for refusing the switch and advice for the user."""
    (_, wanted, at), carry = found["leader"]
    for member, place, step in found["elsewhere"]:
        if place != wanted:
            reason = f"member {member} waits in {place!r} and rank 0 stands in {wanted!r}"
            return {"refusal": [reason, "use one train loader at the step of a switch on all members"]}
        if step is not None and step != at:
            return {"refusal": [f"member {member} stands at step {step}, rank 0 at step {at}", ""]}
    return {"refusal": None, "carry": carry}
