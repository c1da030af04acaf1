"""What members do together, step by step: each makes the same calls in the same order, and each learns alike how every
step has ended. The model is `_DistWrapper` of torch's distributed checkpoint (`torch/distributed/checkpoint/utils.py`).

| verb | every member | ends on all members with |
|---|---|---|
| `agree` | says what it asks for, or why it cannot | one answer, or one refusal |
| `first` | waits; the first one computes | the value, or the first one's error |
| `all` | says something | what all have said |
| `vote` | does its part | one decision: commit if it went well on all, else nobody's |

Nothing here is a collective, and every wait has an end. Whoever fails inside `vote` writes the record, which says no;
whoever waits looks at the record meanwhile and leaves with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.liveness import BEAT_SECONDS, SILENT_BEATS
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError, DynatrainError, MemberMissing, OutcomeUnknown

T = TypeVar("T")
Refused = Callable[[str, str], DynatrainError]
"""The error of a refusal, from the reason and the way out."""

ASK_ALL = "call it on every working member, at the same step and with the same arguments"
ASK_ALIKE = "make the decision depend on engine.global_steps and on values that are equal on all ranks"
LONGEST_SECONDS = 1800.0
"""For work whose time nobody knows, on a disk: as long as DeepSpeed waits for a collective."""


@dataclass(frozen=True)
class Request:
    """What one member asks for, in plain JSON, or why it cannot: reason and way out."""

    asked: Mapping[str, Any]
    refusal: tuple[str, str] | None = None


@dataclass(frozen=True)
class Decision:
    """How a vote ended: the same on all members.

    is_damaged: what failed is a checkpoint that is not what was saved. interrupt: what has stopped this member, if it
    was no error (Ctrl-C, SystemExit): to be raised once the decision is carried out.
    """

    commit: bool
    reason: str = ""
    is_damaged: bool = False
    interrupt: BaseException | None = field(default=None, compare=False)

    @property
    def checkpoint_error(self) -> type[CheckpointError]:
        """What to raise for a checkpoint."""
        return CheckpointDamaged if self.is_damaged else CheckpointError

    def raise_interrupt(self) -> None:
        """Let Ctrl-C and the like go their way."""
        if self.interrupt is not None:
            raise self.interrupt


class Session:
    """One thing that `members` do together.

    board: the common records. key: of nothing else there. what: the call, for errors. record: the key of the decision,
    where that is not the session's own. is_patient: the work takes a time that nobody knows, so wait for members as
    long as they are alive. stop: called while waiting; it may raise.
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
    ) -> None:
        self.board, self.key, self.members, self.what = board, key, members, what
        self.record = f"{key}/record" if record is None else record
        self._is_patient, self._stop = is_patient, stop

    # ---- verbs -------------------------------------------------------------------------------------------------------

    def agree(
        self, mine: Request, answer: Any, refused: Refused, differ: Callable[[int, int, Mapping[int, Any]], str]
    ) -> Any:
        """`answer` of whoever judged first, if all ask for the same and none refuses.

        The judgement is written once, so a member that comes late reads what the others decided. differ: words for two
        members that ask for different things, from their numbers and all that was asked. Raises `refused`, on all
        members alike, if one refuses, asks for something else, or does not ask within the time-out.
        """
        board = self.board
        board.post(f"{self.key}/{board.member}", {"asked": dict(mine.asked), "refusal": mine.refusal})
        try:
            records = board.gather(self.key, self.members, f"{self.what}: every working member has to ask for it")
        except MemberMissing as missing:
            judged: Any = {"refusal": [str(missing), ASK_ALL]}
        else:
            refusal = _refusal(records, differ)
            judged = {"answer": answer} if refusal is None else {"refusal": refusal}
        verdict = board.decide(f"{self.key}/verdict", judged)
        if "refusal" in verdict:
            raise refused(*verdict["refusal"])
        return verdict["answer"]

    def first(self, step: str, compute: Callable[[], T], doing: str) -> T:
        """What the first member computes, in plain JSON; CheckpointError with its words, on all members, if it fails.

        step: of nothing else in the session. doing: what is waited for. An interrupt of the first one goes on there.
        """
        board, first = self.board, self.members[0]
        if board.member == first:
            try:
                said: dict[str, Any] = {"value": compute()}
            except Exception as error:  # the others wait for an answer, whatever it is
                said = {"failed": _words(error, first)}
            except BaseException as error:
                board.post(f"{self.key}/{step}/{first}", {"failed": _words(error, first)})
                raise
            board.post(f"{self.key}/{step}/{first}", said)
        said = self._gather(step, (first,), doing)[first]
        if "failed" in said:
            raise CheckpointError(said["failed"])
        value: T = said["value"]
        return value

    def all(self, step: str, mine: Any) -> dict[int, Any]:
        """What every member says, in plain JSON, by member."""
        self.say(step, mine)
        return self.heard(step)

    def say(self, step: str, mine: Any) -> None:
        """The first half of `all`: for those who need not hear what others say."""
        self.board.post(f"{self.key}/{step}/{self.board.member}", mine)

    def heard(self, step: str) -> dict[int, Any]:
        """The second half."""
        return self._gather(step, self.members, self.what)

    def vote(self, work: Callable[[], None]) -> Decision:
        """Do `work` and come to one decision: to commit if nobody has failed by then.

        A member that may vote for it knows that all have succeeded: the last thing in `work` is to hear of all others.
        OutcomeUnknown if the decision cannot be read: others may have committed, so this member must not train on.
        """
        mine = Decision(True)
        try:
            work()
        except BaseException as error:
            mine = self._against(error)
        try:
            return self.decide(mine)
        except (RuntimeError, OSError) as error:  # torch's DistError among them
            self.board.lost = OutcomeUnknown(self.what, self.board.timeout_seconds, f"{mine.reason} {error}".strip())
            raise self.board.lost from mine.interrupt

    def give_up(self, error: BaseException) -> Decision:
        """Decide against it, for a reason of this member's, where others are waiting for this one."""
        return self.decide(self._against(error))

    def decide(self, mine: Decision) -> Decision:
        """The decision that counts: the first one that any member has written; torch's DistError if it is not read."""
        wish = {"commit": mine.commit, "reason": mine.reason, "is_damaged": mine.is_damaged}
        found = self.board.decide(self.record, wish)
        return Decision(found["commit"], found.get("reason", ""), found.get("is_damaged", False), mine.interrupt)

    def _against(self, error: BaseException) -> Decision:
        interrupt = None if isinstance(error, Exception) else error
        return Decision(False, _words(error, self.board.member), isinstance(error, CheckpointDamaged), interrupt)

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """While waiting: leave as soon as somebody has given up."""
        if self._stop is not None:
            self._stop()
        found = self.board.read(self.record)
        if found is not None and not found["commit"]:
            raise Decision(False, is_damaged=found.get("is_damaged", False)).checkpoint_error(found["reason"])

    def _gather(self, step: str, members: tuple[int, ...], doing: str) -> dict[int, Any]:
        gather = gather_living if self._is_patient else Control.gather
        return gather(self.board, f"{self.key}/{step}", members, doing, stop=self.stop)


def gather_living(
    control: Control, key: str, members: Iterable[int], what: str, stop: Callable[[], None] | None = None
) -> dict[int, Any]:
    """`Control.gather` for work whose time nobody knows: it waits as long as the missing members' hearts beat.

    MemberMissing for one whose heartbeat stood still for the time-out, or who beats and does not answer for half an
    hour.
    """
    wanted, begin = tuple(members), time.monotonic()
    if control.watch is not None:  # there are no heartbeats: the board itself knows
        return control.gather(key, wanted, what, begin + LONGEST_SECONDS, stop)
    patience = max(control.timeout_seconds, SILENT_BEATS * BEAT_SECONDS)
    while True:
        beats = {member: control.read(f"alive/{member}") for member in wanted}
        try:
            return control.gather(key, wanted, what, time.monotonic() + patience, stop)
        except MemberMissing as missing:
            now = time.monotonic() - begin
            silent = [member for member in missing.members if control.read(f"alive/{member}") == beats[member]]
            if silent or now > LONGEST_SECONDS:
                raise MemberMissing(what, silent or missing.members, now) from None


def ask_for_different_things(one: int, other: int, asked: Mapping[int, Any]) -> str:
    """Words for a refusal of requests that speak for themselves."""
    return f"members {one} and {other} ask for different things: {asked[one]} and {asked[other]}"


def _refusal(
    records: Mapping[int, Mapping[str, Any]], differ: Callable[[int, int, Mapping[int, Any]], str]
) -> list[str] | None:
    """Reason and way out, if one refuses or they ask for different things."""
    for member, record in sorted(records.items()):
        if record["refusal"] is not None:
            return [f"member {member}: {record['refusal'][0]}", record["refusal"][1]]
    first, *others = sorted(records)
    asked = {member: record["asked"] for member, record in records.items()}
    for member in others:
        if asked[member] != asked[first]:
            return [differ(first, member, asked), ASK_ALIKE]
    return None


def _words(error: BaseException, member: int) -> str:
    """An error for all members: one of a checkpoint speaks for itself, of others it says whose and what they are."""
    if isinstance(error, CheckpointError):
        return str(error)
    return (
        f"member {member}: {error}"
        if isinstance(error, OSError)
        else f"member {member}: {type(error).__name__}: {error}"
    )
