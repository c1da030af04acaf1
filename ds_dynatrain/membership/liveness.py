"""Liveness of members. A thread of each member increases a number in the key-value store; others only check that the
number changes, so clocks of different machines are never compared."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ds_dynatrain.adapters.groups.managed_process_group import is_lost_peer
from ds_dynatrain.errors import MemberMissing
from ds_dynatrain.membership.control import BEAT_SECONDS, SILENT_BEATS, Control
from ds_dynatrain.report import logger

FIRST_ERROR = "first_error"
"""Key of the first error that ended a script: [member, error text]."""
LAST_WORDS_SECONDS = 2.0
LONG_SECONDS = 10.0
"""Time after which a wait reports what it waits for."""


class Heartbeat:
    """A daemon thread that posts an increasing number once a second, from its creation until `stop`.

    It also logs the error that ends another member's script. The main thread may be in a collective, and the launcher
    kills this process as soon as that member's process has ended.
    """

    def __init__(self, control: Control) -> None:
        self._control = control.clone()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynatrain-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended. If the thread were still waiting for a slow store when Python
        shuts down, the process would abort."""
        self._stop.set()
        self._thread.join(timeout=2 * BEAT_SECONDS + self._control.timeout_seconds)

    def _run(self) -> None:
        beat, is_told = 0, False
        while not self._stop.wait(BEAT_SECONDS):
            beat += 1
            try:
                self._control.post(f"alive/{self._control.member}", beat)
                if not is_told and (found := self._control.read(FIRST_ERROR)) is not None:
                    is_told = True
                    if not self._control.read(f"{FIRST_ERROR}/{self._control.member}"):
                        _say_first_error(self._control, found)
            except RuntimeError:  # the store is gone: the job is ending
                return


@dataclass
class Watch:
    """Checks that an idle member makes on the other members.

    by_heartbeats: whether to declare members lost that send no heartbeats. If not, the coordinator handles deaths, and
        only the ends of scripts are checked.
    seen: a map from each member to its last heartbeat and the time at which that heartbeat was first read.
    checked: the time of the last check.
    """

    control: Control
    by_heartbeats: bool = True
    seen: dict[int, tuple[object, float]] = field(default_factory=dict)
    checked: float = 0.0

    def look(self, members: Iterable[int]) -> bool:
        """Return whether the scripts of all `members` have ended. Cheap to call often: a call soon after the last check
        returns False without checking.

        With `by_heartbeats`, raises MemberMissing for a member that has sent no heartbeat for longer than the timeout,
        and SystemExit(1) if a script ended with an error.
        """
        now = time.monotonic()
        if now - self.checked < BEAT_SECONDS / 4:
            return False
        self.checked, me = now, self.control.member
        ends = {member: self.control.read(f"ended/{member}") for member in members}
        if not self.by_heartbeats:
            return all(end == "done" for end in ends.values())
        failed = [member for member, end in ends.items() if end == "error"]
        if failed:
            first = self.control.read(FIRST_ERROR)
            logger.error(
                "member %d waits for work; the script of member %s ended with an error: %s",
                *(me, failed, "see there" if first is None else "member {}: {}".format(*first)),
            )
            self.control.post(f"{FIRST_ERROR}/{me}", True)
            time.sleep(BEAT_SECONDS)  # the launcher should see the failed script first
            raise SystemExit(1)
        if all(end is not None for end in ends.values()):
            return True
        silent = [member for member, end in ends.items() if end is None and self._is_silent(member, now)]
        if silent:
            raise MemberMissing("waiting for work: no heartbeat", silent, self.control.timeout_seconds)
        return False

    def _is_silent(self, member: int, now: float) -> bool:
        beat = self.control.read(f"alive/{member}")
        known, since = self.seen.get(member, (None, now))
        if member not in self.seen or beat != known:
            self.seen[member] = (beat, now)
            return False
        return now - since > max(self.control.timeout_seconds, SILENT_BEATS * BEAT_SECONDS)


def ended_in_error() -> bool:
    """Return whether this script is ending because of an uncaught exception."""
    return getattr(sys, "last_value", None) is not None


def ending_error() -> BaseException | None:
    """Return the exception that ends this script: an uncaught one, or the one that is being handled if this is called
    while an engine is closed; None if there is none."""
    handled = sys.exc_info()[1]  # `initialize` will raise it again
    return getattr(sys, "last_value", None) or (handled if isinstance(handled, Exception) else None)


def post_end(control: Control, error: BaseException | None = None) -> None:
    """Post that this member's script has ended, and whether an uncaught exception or `error` ended it."""
    control.post(f"ended/{control.member}", "error" if error is not None or ended_in_error() else "done")


def say_last_words(control: Control, error: BaseException | None) -> bool:
    """Log the error that ended the job, and the member that raised it, and return whether it is this member. Called
    before `post_end` in a script that ends in an error.

    Once one member has raised an error, the errors of the others only say that a connection was closed.
    """
    if error is None:
        return False
    if is_consequence(error):
        found = first_error(control)
    else:
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        found = control.decide(FIRST_ERROR, [control.member, said])
    if found is not None:
        _say_first_error(control, found)
    return found is not None and found[0] == control.member


def first_error(control: Control) -> tuple[int, str] | None:
    """Return the member whose error has ended the job, and the error; None if no member reports one in time."""
    try:
        (found,) = control.wait({control.member: FIRST_ERROR}, "", time.monotonic() + LAST_WORDS_SECONDS).values()
    except (MemberMissing, RuntimeError):  # also if the store has ended
        return None
    return found[0], found[1]


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only says that another member is gone."""
    return is_lost_peer(error) or isinstance(error, MemberMissing)


def _say_first_error(control: Control, found: tuple[int, str]) -> None:
    """Log the error that ended the job, and post that this member has done so."""
    logger.error("the job has ended with an error of member %d: %s", *found)
    control.post(f"{FIRST_ERROR}/{control.member}", True)


class Wait:
    """Context manager for a wait that keeps the job's status up to date: `with Wait(whom, say) as wait:`.

    whom: returns a description of the members that are waited for; called every `LONG_SECONDS`.
    say: reports this description in the job's status; called with "" once the wait is over.
    """

    def __init__(self, whom: Callable[[], str], say: Callable[[str], None]) -> None:
        self._whom = whom
        self._say = say
        self._has_told = False
        self._next = time.monotonic() + LONG_SECONDS

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()

    def look(self) -> None:
        """Report the members that are waited for if the last report is `LONG_SECONDS` old. Call it in every iteration
        of the waiting loop."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LONG_SECONDS
        whom = self._whom()
        self._say(whom)
        if not self._has_told:
            self._has_told = True
            logger.warning("waiting for %g s already, for %s; look at their logs if it goes on", LONG_SECONDS, whom)

    def rest(self) -> None:
        """End the current wait. The next call of `look` begins a new one."""
        if self._has_told:
            self._has_told = False
            self._say("")
        self._next = time.monotonic() + LONG_SECONDS
