"""Joint steps of members: all make the same calls in the same order, and all learn the same outcome of each call.

The model is `_DistWrapper` of torch's distributed checkpoint (`torch/distributed/checkpoint/utils.py`).

| verb | every member | ends on all members with |
|---|---|---|
| `agree` | posts its request, or why it cannot take part | one answer, or one refusal |
| `first` | waits, while the first member computes | the value, or the first member's error |
| `all` | posts a value | the values of all members |
| `reduce` | posts a value that can be joined with others | the joined and judged value |
| `vote` | does its part, and reports | one decision: commit if no member failed, otherwise no commit on any |

Values go up a tree (see `heard_by`): a member that leads others joins their values with its own, and the first member
posts one answer for all. None of these calls is a collective, and every wait ends. A member that fails inside `vote`
writes a record against the commit; waiting members watch this record and leave with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
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
"""Associative function that combines the values of two groups of members, in the members' order."""
Refused = Callable[[str, str], DynatrainError]
"""Function that makes the error for a refusal from the reason and the advice on what to do."""
Differ = Callable[[int, int, Mapping[int, Any]], str]
"""Function that makes the message about two members with different requests, from their numbers and the requests."""

ASK_ALL = "call it on every working member, at the same step and with the same arguments"
ASK_ALIKE = "make the decision depend on engine.global_steps and on values that are equal on all ranks"
WIDTH = 64
"""Number of members from which a leader reads, itself included. This many reports take milliseconds to read."""


def heard_by(member: int, members: tuple[int, ...], width: int = WIDTH) -> list[tuple[int, ...]]:
    """Return the members whose values `member` reads in a tree reduction, one tuple for each level from the bottom up;
    empty if it reads none.

    On the lowest level the first of every `width` members leads the others. On each higher level the first of every
    `width` leaders leads the other leaders.

    members: the members in any order that is the same on all of them; the first one is the root.
    """
    index, step, levels = members.index(member), 1, list[tuple[int, ...]]()
    while step < len(members) and index % (step * width) == 0:
        levels.append(members[index + step : index + step * width : step])
        step *= width
    return levels


@dataclass(frozen=True)
class VoteResult:
    """Result of a vote, the same on all members except for `interrupt`.

    commit: whether the decision is to commit.
    reason: the reason if the decision is not to commit.
    is_damaged: whether the vote failed because a checkpoint differs from what was saved.
    said: what the first member reports about the vote, in plain JSON.
    interrupt: the exception that stopped this member if it is not an error (Ctrl-C, SystemExit). It has to be raised
        once the decision is carried out.
    """

    commit: bool
    reason: str = ""
    is_damaged: bool = False
    said: Any = None
    interrupt: BaseException | None = field(default=None, compare=False)

    @property
    def checkpoint_error(self) -> type[CheckpointError]:
        """Class of the error to raise if the vote was about a checkpoint and failed."""
        return CheckpointDamaged if self.is_damaged else CheckpointError

    def raise_interrupt(self) -> None:
        """Raise the interrupt, such as Ctrl-C, if there was one."""
        if self.interrupt is not None:
            raise self.interrupt


class Session:
    """One joint task of `members`, such as a switch or a save.

    board: the key-value store through which the members communicate.
    key: the session's key prefix, unique on the board.
    what: the name of the task, for error messages.
    record: the key of the decision; by default one below `key`.
    is_patient: whether the work takes an unknown time, so that members are waited for as long as they are alive.
    stop: called while waiting; it may raise an error to end the wait.
    longest: the maximum number of seconds between two reads of the board.
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
        """Whether this member is the first one, which gathers all values and posts the answers."""
        return self.board.member == self.members[0]

    # ---- verbs -------------------------------------------------------------------------------------------------------

    def agree(
        self,
        request: Mapping[str, Any],
        refused: Refused,
        differ: Differ,
        refusal: tuple[str, str] | None = None,
        answer: Any = None,
    ) -> Any:
        """Return `answer`, as given by the first member, if all members make the same request and none refuses.

        request: what this member asks for, in plain JSON.
        refused: makes the error to raise, from a reason and advice for the user.
        differ: makes the reason if two members made different requests.
        refusal: the reason why this member cannot take part, and the advice on what to do; None if it can.

        If a member refuses, makes a different request, or makes none within the timeout, all members raise the error
        that `refused` makes. A member that comes late reads what the others have decided.
        """
        me = self.board.member
        mine = {"refusal": refusal and [me, *refusal], "asked": [[me, dict(request)]]}

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
            said = self.reduce("ask", mine, joined_requests, judge, what)
        except MemberMissing as missing:
            raise refused(str(missing), ASK_ALL) from None
        if "refusal" in said:
            raise refused(*said["refusal"])
        return said["answer"]

    def first(self, step: str, compute: Callable[[], T], doing: str) -> T:
        """Compute a value on the first member, and return it on all members. The value is plain JSON.

        step: a name that is unique in the session.
        compute: called on the first member only.
        doing: what the members wait for, for error messages.

        Raises CheckpointError with the first member's error text on all members if `compute` fails. An interrupt such
        as Ctrl-C is raised unchanged on the first member.
        """
        board, first = self.board, self.members[0]
        if board.member == first:
            try:
                said: dict[str, Any] = {"value": compute()}
            except Exception as error:  # the others wait for an answer, whatever the error is
                said = {"failed": _error_text(error, first)}
            except BaseException as error:
                board.post(f"{self.key}/{step}", {"failed": _error_text(error, first)})
                raise
            board.post(f"{self.key}/{step}", said)
        said = self._wait({first: f"{self.key}/{step}"}, doing, self.stop)[first]
        if "failed" in said:
            raise CheckpointError(said["failed"])
        value: T = said["value"]
        return value

    def say(self, step: str, mine: Any) -> None:
        """Post a value of this member, which others can read with `said_by`.

        step: a name for the value, unique in the session.
        """
        self.board.post(f"{self.key}/{step}/{self.board.member}", mine)

    def said_by(self, member: int, step: str, doing: str) -> Any:
        """Wait until a member posts a value with `say`, and return the value.

        doing: what is waited for, for error messages.
        """
        return self._wait({member: f"{self.key}/{step}/{member}"}, doing, self.stop)[member]

    def all(self, step: str, mine: Any) -> dict[int, Any]:
        """Gather a short value of plain JSON from every member; return, on every member, a map from member to value.

        step: a name that is unique in the session.
        """
        said = self.reduce(step, {str(self.board.member): mine}, or_)
        return {int(member): each for member, each in said.items()}

    def have_come(self, step: str) -> bool:
        """Return whether all members have called `reduce` for a step; this member need not have called it yet. Polls;
        never blocks."""
        return self.board.all_posted(f"{self.key}/{step}/0", self.members)

    def forget(self, step: str) -> None:
        """Remove the values that this member has posted in a `reduce`, so that the same step name can be used again.

        The answer stays, because other members may not have read it yet; see `forget_answer`.
        """
        place, member = f"{self.key}/{step}", self.board.member
        levels = len(heard_by(member, self.members))
        self.board.remove(f"{place}/{level}/{member}" for level in range(levels + 1))

    def forget_answer(self, step: str) -> None:
        """Remove the answer of a `reduce`. Does nothing except on the first member, which calls it once all members
        have read the answer.

        A member that has called a later `reduce` has read the answer.
        """
        if self.is_first:
            self.board.remove([f"{self.key}/{step}/answer"])

    def gather(self, step: str, mine: Any, join: Join) -> Any:
        """Combine the values of all members with `join`, and return the result on the first member.

        All other members get None and do not wait for the first one.
        """
        said = self._reduce_to_leader(f"{self.key}/{step}", mine, join, self.what, self.stop)
        return said if self.is_first else None

    def reduce(
        self, step: str, mine: Any, join: Join, judge: Callable[[Any], Any] | None = None, doing: str = ""
    ) -> Any:
        """Combine the values of all members, let the first member compute an answer from the result, and return the
        answer on all members.

        step: a name that is unique in the session.
        mine: this member's value; values and the answer are records (see `pack`).
        join: combines two values.
        judge: makes the answer from the combined value. The answer should be short, because all members read it.
        doing: what the members wait for, for error messages.

        Raises the same error on all members: MemberMissing if a member posts nothing within the timeout,
        CheckpointError with the error text if `judge` fails, SwitchFailed if a member's `stop` raised it before there
        was an answer.
        """
        place, doing = f"{self.key}/{step}", doing or self.what
        key = f"{place}/answer"
        try:
            joined = self._reduce_to_leader(place, mine, join, doing, lambda: self._stop_if_answered(key, doing))
            if self.is_first:
                try:
                    answer = {"said": joined if judge is None else judge(joined)}
                except Exception as error:  # the others wait for an answer, whatever the error is
                    answer = {"failed": _error_text(error, self.board.member)}
                found = self.board.decide(key, answer)
            else:
                found = self._wait({self.members[0]: key}, doing, self.stop)[self.members[0]]
        except MemberMissing as missing:
            found = self.board.decide(key, self._missing_record(place, missing))
        except SwitchFailed as given_up:  # if there is an answer, it counts: other members have read it
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
        """Do `work`, vote on its result, and return the common decision: to commit if no member has failed.

        work: does this member's part, and returns its report.
        join: combines two reports, as in `reduce`.
        judge: called on the first member; makes the decision from the combined reports.

        Raises OutcomeUnknown if the decision cannot be read. Others may have committed, so this member must not
        continue training.
        """
        mine, place, first = VoteResult(True), f"{self.key}/vote", self.members[0]
        try:
            report = work()
            try:
                heard = self._reduce_to_leader(place, report, join or _nothing, self.what, self.stop)
                if not self.is_first:
                    return VoteResult(**self._wait({first: self.record}, self.what, self._stop)[first])
            except MemberMissing as missing:
                account = self._missing_record(place, missing)
                raise MemberMissing(self.what, account["missing"], account["seconds"]) from None
            if judge is not None:
                mine = judge(heard)
        except BaseException as error:
            mine = self._failed_vote(error)
        try:
            return self.decide(mine)
        except (RuntimeError, OSError) as error:  # torch's DistError among them
            self.board.lost = OutcomeUnknown(self.what, self.board.timeout_seconds, f"{mine.reason} {error}".strip())
            raise self.board.lost from mine.interrupt

    def give_up(self, error: BaseException) -> VoteResult:
        """Vote against committing because of an error of this member, while the others wait for its report. Returns the
        decision."""
        return self.decide(self._failed_vote(error))

    def decide(self, mine: VoteResult) -> VoteResult:
        """Write a decision unless another member has already written one. Return the decision that was written first,
        which counts.

        Raises torch's DistError if the decision cannot be read.
        """
        vote = {"commit": mine.commit, "reason": mine.reason, "is_damaged": mine.is_damaged, "said": mine.said}
        return replace(VoteResult(**self.board.decide(self.record, vote)), interrupt=mine.interrupt)

    def _failed_vote(self, error: BaseException) -> VoteResult:
        interrupt = None if isinstance(error, Exception) else error
        is_damaged = isinstance(error, CheckpointDamaged)
        return VoteResult(False, _error_text(error, self.board.member), is_damaged, interrupt=interrupt)

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Raise CheckpointError if a member has given up. Called while waiting; also calls the caller's own `stop`,
        which may raise."""
        if self._stop is not None:
            self._stop()
        found = self.board.read(self.record)
        if found is not None and not found["commit"]:
            raise VoteResult(False, is_damaged=found.get("is_damaged", False)).checkpoint_error(found["reason"])

    def _reduce_to_leader(self, place: str, mine: Any, join: Join, doing: str, stop: Callable[[], None]) -> Any:
        """Combine this member's value with those of the members that it leads in the tree, post the result for its own
        leader, and return the result.

        On the first member the result is the combined value of all members.
        """
        board, member = self.board, self.board.member
        levels = heard_by(member, self.members)
        board.post(f"{place}/0/{member}", None if levels else mine)  # a leader posts its value later, joined
        mine = unpack(pack(mine)) if levels else mine  # the form in which others would read it
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
        """Raise MemberMissing if an answer was already posted: this means that another leader has found some members
        missing.

        Called while a leader waits. Also raises the errors of `stop`.
        """
        self.stop()
        if self.board.read(key) is not None:
            raise MemberMissing(doing, (), 0.0)

    def _missing_record(self, place: str, missing: MemberMissing) -> dict[str, Any]:
        """Return a record, to be read by all members, of the members that have not reached a step. If all have reached
        it, the record lists those named by `missing`."""
        absent = [one for one in self.members if not self.board.all_posted(f"{place}/0", [one])]
        return {"missing": absent or list(missing.members), "seconds": missing.seconds}


def ask_for_different_things(one: int, other: int, asked: Mapping[int, Any]) -> str:
    """Return an error message about two members that have made different requests. It quotes both requests."""
    return f"members {one} and {other} ask for different things: {asked[one]} and {asked[other]}"


def joined_requests(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Combine two groups of requests: keep the first refusal, and either one request or, if requests differ, two that
    do."""
    return {"refusal": one["refusal"] or other["refusal"], "asked": first_and_other(one["asked"], other["asked"])}


def first_and_other(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """Combine two lists of (member, value): keep the first entry, and the first entry with a different value if there
    is one."""
    first, *rest = (*one, *other)
    return [first, *[each for each in rest if each[1] != first[1]][:1]]


def _nothing(_one: Any, _other: Any) -> None:
    """Combine two members' reports that carry no value: return None."""


def _error_text(error: BaseException, member: int) -> str:
    """Return the text of an error, to be raised on all members. It begins with the member and the error's type, except
    for errors whose text already names the member or needs no type."""
    if isinstance(error, CheckpointError | MemberMissing):
        return str(error)
    return (
        f"member {member}: {error}"
        if isinstance(error, OSError)
        else f"member {member}: {type(error).__name__}: {error}"
    )
