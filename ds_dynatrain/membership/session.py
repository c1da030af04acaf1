"""Steps that members do together: all make the same calls in the same order, and learn alike how every step ended.

The model is `_DistWrapper` of torch's distributed checkpoint (`torch/distributed/checkpoint/utils.py`).

| verb | every member | ends on all members with |
|---|---|---|
| `agree` | says what it asks for, or why it cannot | one answer, or one refusal |
| `first` | waits; the first one computes | the value, or the first one's error |
| `all` | says something | what all have said |
| `reduce` | says something that can be joined | the joined and judged value |
| `vote` | does its part, and reports | one decision: commit if it went well on all, otherwise no commit on any |

What members say goes up a `Tree`: a member that leads others joins what they say with its own, and the first member
answers all at once. Nothing here is a collective, and every wait has an end. A member that fails inside `vote` writes
the record, which says no; a member that waits watches the record meanwhile and leaves with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeVar

from ds_dynatrain.errors import (
    CheckpointDamaged,
    CheckpointError,
    DynatrainError,
    MemberMissing,
    OutcomeUnknown,
    SwitchFailed,
)
from ds_dynatrain.membership.control import LONGEST_POLL_SECONDS, Control, pack, unpack

T = TypeVar("T")
Join = Callable[[Any, Any], Any]
"""Function that joins two parts of what members say, in their order. Associative: members are joined in groups."""
Refused = Callable[[str, str], DynatrainError]
"""Maker of the error of a refusal, from the reason and the way out."""
Differ = Callable[[int, int, Mapping[int, Any]], str]
"""Maker of a message about two members that ask for different things, from their numbers and requests."""

ASK_ALL = "call it on every working member, at the same step and with the same arguments"
ASK_ALIKE = "make the decision depend on engine.global_steps and on values that are equal on all ranks"
WIDTH = 64
"""Number of members that one leads, itself included: their reports take milliseconds to read."""


@dataclass(frozen=True)
class Tree:
    """A tree of members: the first of every `width` leads them, the first of every `width` leaders leads these, etc.

    members: in any order that is the same on all; the first one is the root.
    """

    members: tuple[int, ...]
    width: int = WIDTH

    def heard_by(self, member: int) -> list[tuple[int, ...]]:
        """Return the members that `member` hears on each level, from the leaves up; empty for one that leads nobody."""
        index, step, levels = self.members.index(member), 1, list[tuple[int, ...]]()
        while step < len(self.members) and index % (step * self.width) == 0:
            levels.append(self.members[index + step : index + step * self.width : step])
            step *= self.width
        return levels


@dataclass(frozen=True)
class MemberRequest:
    """One member's request, in plain JSON, or why it cannot take part: reason and way out."""

    asked: Mapping[str, Any]
    refusal: tuple[str, str] | None = None


@dataclass(frozen=True)
class VoteResult:
    """Result of a vote, the same on all members.

    is_damaged: whether it failed because a checkpoint is not what was saved. said: the first member's account of it, in
    plain JSON. interrupt: the cause if this member was stopped by something other than an error (Ctrl-C, SystemExit),
    to be raised once the decision is carried out.
    """

    commit: bool
    reason: str = ""
    is_damaged: bool = False
    said: Any = None
    interrupt: BaseException | None = field(default=None, compare=False)

    @property
    def checkpoint_error(self) -> type[CheckpointError]:
        """Error class to raise for a checkpoint."""
        return CheckpointDamaged if self.is_damaged else CheckpointError

    def raise_interrupt(self) -> None:
        """Raise the interrupt, such as Ctrl-C, if there was one."""
        if self.interrupt is not None:
            raise self.interrupt


class Session:
    """One thing that `members` do together.

    board: the common records. key: unique on the board. what: the call, for errors. record: the key of the decision, if
    it is not the session's own. is_patient: whether the work takes an unknown time, so that members are waited for as
    long as they are alive. stop: called while waiting; it may raise. longest: seconds between two looks at most.
    """

    def __init__(
        self,
        board: Control,
        key: str,
        members: tuple[int, ...],
        what: str,
        *,
        record: str | None = None,
        is_patient: bool = False,
        stop: Callable[[], None] | None = None,
        longest: float = LONGEST_POLL_SECONDS,
    ) -> None:
        self.board, self.key, self.members, self.what = board, key, members, what
        self.record = f"{key}/record" if record is None else record
        self._is_patient, self._stop, self._longest = is_patient, stop, longest

    @property
    def is_first(self) -> bool:
        """Whether this member is the first one, which gathers what all say and answers them."""
        return self.board.member == self.members[0]

    # ---- verbs -------------------------------------------------------------------------------------------------------

    def agree(self, mine: MemberRequest, answer: Any, refused: Refused, differ: Differ) -> Any:
        """Return `answer` of the first member, if all ask for the same and none refuses.

        Raise `refused`, on all members alike, if one refuses, asks for something else, or does not ask within the
        time-out; a member that comes late reads what all others decided.
        """
        refusal = None if mine.refusal is None else [self.board.member, *mine.refusal]
        asked = [[self.board.member, dict(mine.asked)]]

        def judge(found: Any) -> Any:
            if found["refusal"] is not None:
                member, reason, way_out = found["refusal"]
                return {"refusal": [f"member {member}: {reason}", way_out]}
            if len(found["asked"]) > 1:
                (one, first), (other, second) = found["asked"]
                return {"refusal": [differ(one, other, {one: first, other: second}), ASK_ALIKE]}
            return {"answer": answer}

        try:
            what = f"{self.what}: every working member has to ask for it"
            said = self.reduce("ask", {"refusal": refusal, "asked": asked}, joined_requests, judge, what)
        except MemberMissing as missing:
            raise refused(str(missing), ASK_ALL) from None
        if "refusal" in said:
            raise refused(*said["refusal"])
        return said["answer"]

    def first(self, step: str, compute: Callable[[], T], doing: str) -> T:
        """Return what the first member computes, in plain JSON; CheckpointError with its words, on all, if it fails.

        step: unique in the session. doing: what is waited for, for errors. An interrupt of the first member is raised
        there.
        """
        board, first = self.board, self.members[0]
        if board.member == first:
            try:
                said: dict[str, Any] = {"value": compute()}
            except Exception as error:  # the others wait for an answer, whatever it is
                said = {"failed": _words(error, first)}
            except BaseException as error:
                board.post(f"{self.key}/{step}", {"failed": _words(error, first)})
                raise
            board.post(f"{self.key}/{step}", said)
        said = self._wait({first: f"{self.key}/{step}"}, doing, self.stop)[first]
        if "failed" in said:
            raise CheckpointError(said["failed"])
        value: T = said["value"]
        return value

    def say(self, step: str, mine: Any) -> None:
        """Post something for others to read with `said_by`."""
        self.board.post(f"{self.key}/{step}/{self.board.member}", mine)

    def said_by(self, member: int, step: str, doing: str) -> Any:
        """Wait for what one member says, and return it."""
        return self._wait({member: f"{self.key}/{step}/{member}"}, doing, self.stop)[member]

    def all(self, step: str, mine: Any) -> dict[int, Any]:
        """Gather a short value of plain JSON from every member; return all of them, by member, on every member."""
        said = self.reduce(step, {str(self.board.member): mine}, _merged)
        return {int(member): each for member, each in said.items()}

    def have_come(self, step: str) -> bool:
        """Return whether all members have come to a `reduce`, also after it ended without them. Polls; never blocks."""
        return self.board.all_posted(f"{self.key}/{step}/0", self.members)

    def forget(self, step: str) -> None:
        """Remove what this member has said in a `reduce` from the board; for steps that recur.

        The answer stays, as others may not have read it yet: see `forget_answer`.
        """
        place, member = f"{self.key}/{step}", self.board.member
        levels = len(Tree(self.members).heard_by(member))
        self.board.remove(f"{place}/{level}/{member}" for level in range(levels + 1))

    def forget_answer(self, step: str) -> None:
        """Remove the answer of a `reduce`, on the first member, once all have read it.

        A member that has come to a later `reduce` has read it.
        """
        if self.is_first:
            self.board.remove([f"{self.key}/{step}/answer"])

    def gather(self, step: str, mine: Any, join: Join | None = None) -> Any:
        """Return, on the first member, what all say, joined, or by member without `join`.

        All other members get None and go on.
        """
        if join is not None:
            said = self._up(f"{self.key}/{step}", mine, join, self.what, self.stop)
            return said if self.is_first else None
        said = self.gather(step, {str(self.board.member): mine}, _merged)
        return None if said is None else {int(member): each for member, each in said.items()}

    def reduce(
        self, step: str, mine: Any, join: Join, judge: Callable[[Any], Any] | None = None, doing: str = ""
    ) -> Any:
        """Join what all members say, have the first one judge it, and return the answer, in records (see `pack`).

        judge: makes the answer from the joined value; short, as all members read it. Raise on all members alike:
        MemberMissing if one says nothing within the time-out, CheckpointError with its words if `judge` fails,
        SwitchFailed if a member's `stop` has raised that before there was an answer.
        """
        place, doing = f"{self.key}/{step}", doing or self.what
        key = f"{place}/answer"
        try:
            joined = self._up(place, mine, join, doing, lambda: self._stop_if_answered(key, doing))
            if self.is_first:
                try:
                    answer = {"said": joined if judge is None else judge(joined)}
                except Exception as error:  # the others wait for an answer, whatever it is
                    answer = {"failed": _words(error, self.board.member)}
                self.board.decide(key, answer)
            found = self._wait({self.members[0]: key}, doing, self.stop)[self.members[0]]
        except MemberMissing as missing:
            found = self.board.decide(key, self._account(place, missing))
        except SwitchFailed as given_up:  # an answer counts: members that have read it rely on this one
            found = self.board.decide(key, {"given_up": str(given_up)})
        if "given_up" in found:
            raise SwitchFailed(found["given_up"])
        if "missing" in found:
            raise MemberMissing(doing, found["missing"], found["seconds"])
        if "failed" in found:
            raise CheckpointError(found["failed"])
        return found["said"]

    def vote(
        self, work: Callable[[], Any], join: Join | None = None, judge: Callable[[Any], VoteResult] | None = None
    ) -> VoteResult:
        """Do `work` and return the decision of all, which is to commit if no member has failed.

        The first member decides once it has heard of all. work: returns what this member reports; join: as for
        `reduce`; judge: makes the decision from all reports. Raise OutcomeUnknown if the decision cannot be read:
        others may have committed, so this member must not train on.
        """
        mine, place, first = VoteResult(True), f"{self.key}/vote", self.members[0]
        try:
            report = work()
            try:
                heard = self._up(place, report, join or _nothing, self.what, self.stop)
                if not self.is_first:
                    return VoteResult(**self._wait({first: self.record}, self.what, self._stop)[first])
            except MemberMissing as missing:
                account = self._account(place, missing)
                raise MemberMissing(self.what, account["missing"], account["seconds"]) from None
            if judge is not None:
                mine = judge(heard)
        except BaseException as error:
            mine = self._against(error)
        try:
            return self.decide(mine)
        except (RuntimeError, OSError) as error:  # torch's DistError among them
            self.board.lost = OutcomeUnknown(self.what, self.board.timeout_seconds, f"{mine.reason} {error}".strip())
            raise self.board.lost from mine.interrupt

    def give_up(self, error: BaseException) -> VoteResult:
        """Decide against it, because of an error of this member, while others wait for it."""
        return self.decide(self._against(error))

    def decide(self, mine: VoteResult) -> VoteResult:
        """Write a decision unless a member has written one, and return the one that counts: the first.

        Raise torch's DistError if it cannot be read.
        """
        vote = {"commit": mine.commit, "reason": mine.reason, "is_damaged": mine.is_damaged, "said": mine.said}
        return replace(VoteResult(**self.board.decide(self.record, vote)), interrupt=mine.interrupt)

    def _against(self, error: BaseException) -> VoteResult:
        interrupt = None if isinstance(error, Exception) else error
        is_damaged = isinstance(error, CheckpointDamaged)
        return VoteResult(False, _words(error, self.board.member), is_damaged, interrupt=interrupt)

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Raise if a member has given up. Called while waiting."""
        if self._stop is not None:
            self._stop()
        found = self.board.read(self.record)
        if found is not None and not found["commit"]:
            raise VoteResult(False, is_damaged=found.get("is_damaged", False)).checkpoint_error(found["reason"])

    def _up(self, place: str, mine: Any, join: Join, doing: str, stop: Callable[[], None]) -> Any:
        """Join what this member and those that it leads say, tell it to the leader of this one, and return it.

        On the first member it is what all members say.
        """
        board, member = self.board, self.board.member
        levels = Tree(self.members).heard_by(member)
        board.post(f"{place}/0/{member}", None if levels else mine)  # a leader only reports that it has come
        mine = unpack(pack(mine)) if levels else mine  # as others would read it
        for level, others in enumerate(levels):
            heard = self._wait({other: f"{place}/{level}/{other}" for other in others}, doing, stop) if others else {}
            mine = reduce(join, [mine, *heard.values()])
        if levels and not self.is_first:
            board.post(f"{place}/{len(levels)}/{member}", mine)
        return mine

    def _wait(self, keys: Mapping[int, str], doing: str, stop: Callable[[], None] | None) -> dict[int, Any]:
        how = len(self.members), self._longest, len(keys) > 1, self._is_patient
        return self.board.wait(keys, doing, None, stop, *how)

    def _stop_if_answered(self, key: str, doing: str) -> None:
        """Stop a leader's wait once the answer is there: another member has found that some are missing."""
        self.stop()
        if self.board.read(key) is not None:
            raise MemberMissing(doing, (), 0.0)

    def _account(self, place: str, missing: MemberMissing) -> dict[str, Any]:
        """Return which members have not come to a step or, if all have, which ones were waited for."""
        absent = [one for one in self.members if not self.board.all_posted(f"{place}/0", [one])]
        return {"missing": absent or list(missing.members), "seconds": missing.seconds}


def ask_for_different_things(one: int, other: int, asked: Mapping[int, Any]) -> str:
    """Return the message of a refusal of different requests, which quotes both."""
    return f"members {one} and {other} ask for different things: {asked[one]} and {asked[other]}"


def joined_requests(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Join requests: the first refusal, and one request, or the first two that differ."""
    first = one["asked"][0]
    differing = [each for each in (*one["asked"][1:], *other["asked"]) if each[1] != first[1]]
    return {"refusal": one["refusal"] or other["refusal"], "asked": [first, *differing[:1]]}


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {**one, **other}


def _nothing(_one: Any, _other: Any) -> None:
    """Join the reports of members that only say that they are done."""


def _words(error: BaseException, member: int) -> str:
    """Return an error's words for all members; unless it speaks for itself, they name its member and type."""
    if isinstance(error, CheckpointError | MemberMissing):
        return str(error)
    return (
        f"member {member}: {error}"
        if isinstance(error, OSError)
        else f"member {member}: {type(error).__name__}: {error}"
    )
