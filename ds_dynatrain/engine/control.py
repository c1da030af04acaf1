"""The members' common notice board: small JSON records in the launcher's key-value store.

Nothing here is a collective: a member posts, reads, or polls until others have posted, and every poll has an end. Keys
are written once and never used again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as td
from torch._C._distributed_c10d import PrefixStore, Store

from ds_dynatrain.errors import MemberMissing, OutcomeUnknown

SHORTEST_POLL_SECONDS = 0.0003
POLL_SECONDS = 0.0015
LONGEST_POLL_SECONDS = 0.005
GROWTH = 1.25
PATIENT_AFTER_SECONDS = 0.1
"""A pause is short: poll fast at first. Soon spare the store, and the cores that those who are waited for work on."""
STOP_SECONDS = 0.005
"""Between two looks for a reason to give up."""
AGAIN_SECONDS = 0.1
"""Between two attempts to reach the store for a decision."""


class Control:
    """One member's access to the notice board; a thread of its own needs a `clone`."""

    def __init__(
        self,
        store: Any,
        prefix: str,
        member: int,
        timeout_seconds: float,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self._base = store
        self._prefix = prefix
        self._store = PrefixStore(prefix, store)
        self._burials: list[threading.Thread] = []
        self.member = member
        self.timeout_seconds = timeout_seconds
        self.watch = watch
        """Raises once nobody should wait on this board any longer: membership knows who is dead."""
        self.lost: OutcomeUnknown | None = None
        """Why this member does not know what was decided; it must not train on."""

    @property
    def store(self) -> Store:
        """The store under this board's prefix, for building process groups."""
        return self._store

    def clone(self) -> Control:
        """The same board over a connection of its own.

        Do this once, not per switch: torch asks the name server for the peer's name at both ends of every new
        connection, and a name server that does not answer holds up the whole store for seconds.
        """
        return Control(self._base.clone(), self._prefix, self.member, self.timeout_seconds, self.watch)

    def post(self, key: str, value: Any) -> None:
        """Write `value` (plain JSON) under `key`."""
        self._store.set(key, json.dumps(value))

    def read(self, key: str) -> Any | None:
        """The value under `key`, or None if nobody has posted it yet."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def decide(self, key: str, value: Any) -> Any:
        """Post `value` unless somebody was first; the value that counts, the same for all.

        One cut connection is not the end of the store: it is asked again, over new ones, for the time-out (what is
        written once can be asked for twice). Only a fixed launch's store can be: that of a job whose members come and
        go may be another one by then, in which nothing was written yet. torch's DistError if there is no answer.
        """
        text, begin = json.dumps(value), time.monotonic()
        while True:
            try:
                return json.loads(self._store.compare_set(key, "", text))
            except td.DistError:
                if self.watch is not None or time.monotonic() - begin > self.timeout_seconds:
                    raise
            time.sleep(AGAIN_SECONDS)
            with suppress(td.DistError):
                self._connect_anew()

    def raise_if_lost(self) -> None:
        """OutcomeUnknown where what was decided is not known here."""
        if self.lost is not None:
            raise self.lost

    def _connect_anew(self) -> None:
        """Another connection in place of one that is cut; DistError if there is none within the time-out."""
        patience = self._base.timeout
        self._base.set_timeout(timedelta(seconds=self.timeout_seconds))
        try:
            self._base = self._base.clone()
        finally:
            self._base.set_timeout(patience)
        self._store = PrefixStore(self._prefix, self._base)

    def count(self, key: str) -> int:
        """Number of this call among all members' calls for `key`, from 1."""
        return int(self._store.add(key, 1))

    def all_posted(self, key: str, members: Iterable[int | str]) -> bool:
        """Whether `key/member` is there for every member."""
        return bool(self._store.check([f"{key}/{member}" for member in members]))

    def gather(
        self,
        key: str,
        members: Iterable[int],
        what: str,
        deadline: float | None = None,
        stop: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """The records `key/member` of all members, as soon as all are there.

        deadline: a `time.monotonic()` value (default: the board's time-out from now). stop: called while polling; it
        may raise. MemberMissing, naming the members and `what` was awaited, when the deadline passes.
        """
        names = {member: f"{key}/{member}" for member in members}
        begin = time.monotonic()
        end = begin + self.timeout_seconds if deadline is None else deadline
        pause, look = SHORTEST_POLL_SECONDS, begin
        while not self._store.check(list(names.values())):
            if time.monotonic() > end:
                missing = [member for member, name in names.items() if not self._store.check([name])]
                if missing:
                    raise MemberMissing(what, missing, time.monotonic() - begin)
            now = time.monotonic()
            if now >= look:
                for reason in (self.watch, stop):
                    if reason is not None:
                        reason()
                look = now + STOP_SECONDS
            time.sleep(pause)
            is_long = now - begin > PATIENT_AFTER_SECONDS
            pause = min(pause * GROWTH, LONGEST_POLL_SECONDS if is_long else POLL_SECONDS)
        values = self._store.multi_get(list(names.values()))
        return {member: json.loads(value) for member, value in zip(names, values, strict=True)}

    def bury(self, thread: threading.Thread) -> None:
        """Remember a thread that takes process groups down."""
        self._burials = [each for each in self._burials if each.is_alive()]
        self._burials.append(thread)

    def succeed(self, former: Control) -> None:
        """Take over what another board's threads are still taking down."""
        self._burials += former._burials

    def see_buried(self) -> None:
        """Wait until no group is left half alive, at most the time-out each."""
        while self._burials:
            self._burials.pop().join(self.timeout_seconds)
