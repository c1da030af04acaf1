"""The board through which members communicate: small records in the launcher's key-value store.

No operation here is a collective: a member posts, reads, or polls until others have posted, and every poll ends. Keys
are written once and never reused. Records are plain JSON with arrays of numbers appended as raw bytes. In a job with a
token each record is sealed (authenticated), because torch's store accepts records from anybody; counts and lists are
not.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as td
from torch._C._distributed_c10d import PrefixStore, Store

from ds_dynatrain.elastic.store import answered, connected
from ds_dynatrain.errors import DynatrainError, MemberMissing, OutcomeUnknown, TransferError

LONGEST_POLL_SECONDS = 0.005
POLL_RANGE = 16
"""Ratio of the longest to the shortest time between two reads of the store."""
POLLS_PER_SECOND = 30_000
"""Maximum number of reads per second by all members that wait for the same record. The store can answer about 50,000
per second."""
BACKOFF = 1 / 3
"""Time until the next read, as a fraction of the time waited so far. Polling is thus frequent during short waits, as in
a pause, and rare during long ones."""
STOP_SECONDS = 0.01
MOST_STOP_SECONDS = 0.25
"""Longest time between two checks for a reason to give up. The shortest is `STOP_SECONDS`."""
LONGEST_SECONDS = 1800.0
"""Longest wait for work of unknown duration, such as work on a disk: as long as DeepSpeed waits for a collective."""
BEAT_SECONDS = 1.0
SILENT_BEATS = 5
"""Number of missing heartbeats that are tolerated even if the timeout is shorter, because a slow store or a busy
machine may be the cause."""
AGAIN_SECONDS = 0.1
"""Time between two attempts to ask the store for a decision."""

TAG_BYTES = 32
"""Length of an HMAC-SHA256 tag."""
_ABSENT = "?"
"""Text that is never a record. Comparing a key's value with this text reads the value in one message to the store, and
does not wait."""
_WITH_ARRAYS = b"\x00"
_LENGTH = 8
_MARK = "__array__"


class Control:
    """One member's access to the board (the members' records in a key-value store). Each additional thread needs a
    `clone`."""

    def __init__(
        self,
        store: Any,
        prefix: str,
        member: int,
        timeout_seconds: float,
        watch: Callable[[], None] | None = None,
        seal: Seal | None = None,
        teardowns: Teardowns | None = None,
    ) -> None:
        self._base = store
        self._prefix = prefix
        self.store: Store = PrefixStore(prefix, store)
        """The key-value store under this board's prefix, also for building process groups."""
        self._seal = seal
        self.teardowns = Teardowns() if teardowns is None else teardowns
        """Threads of this process that destroy process groups in the background. A board shares them with its
        clones."""
        self.member = member
        self.timeout_seconds = timeout_seconds
        self.watch = watch
        """Function that raises an error once members should stop waiting on this board, such as after a death."""
        self.lost: OutcomeUnknown | None = None
        """Error to raise on this member because it could not read a decision and must not continue training; None if it
        has read all decisions."""

    def clone(self) -> Control:
        """Return another access to the same board, which has a connection of its own.

        Make one clone and keep it, instead of one for each switch: for every new connection torch asks the name server
        for the peer's name at both ends, and a name server that does not answer delays the whole store for seconds.
        """
        base = connected(self._base.clone, self._base.timeout.total_seconds())
        of_this = self.member, self.timeout_seconds, self.watch, self._seal, self.teardowns
        return Control(base, self._prefix, *of_this)

    def post(self, key: str, value: Any) -> None:
        """Write `value` (see `pack`) under `key`."""
        self.store.set(key, self._packed(key, value))  # type: ignore[arg-type]

    def read(self, key: str) -> Any | None:
        """Return the value under `key`; None if it has not been posted yet."""
        found = self._found([key])
        return None if found is None else self._unpacked(key, found[0])

    def value(self, key: str) -> Any:
        """Return the value under `key`. The value must already have been posted."""
        return self._unpacked(key, self.store.get(key))

    def decide(self, key: str, value: Any) -> Any:
        """Post `value` unless another member has already posted one, and return the value that was posted first. All
        members get the same value.

        In a launch of fixed size a broken connection is replaced, and the store is asked again until the timeout;
        asking twice is safe, because a value is written only once. In a job whose members come and go the store is not
        asked again, because it may be a new store without the earlier values. Raises torch's DistError if there is no
        answer.
        """
        data, begin = self._packed(key, value), time.monotonic()
        while True:
            try:
                found = self.store.compare_set(key, "", data)  # type: ignore[arg-type]
                return self._unpacked(key, found)
            except td.DistError:
                if self.watch is not None or time.monotonic() - begin > self.timeout_seconds:
                    raise
            time.sleep(AGAIN_SECONDS)
            with suppress(td.DistError):
                self._connect_anew()

    def raise_if_lost(self) -> None:
        """Raise OutcomeUnknown if an earlier decision could not be read by this member."""
        if self.lost is not None:
            raise self.lost

    def _connect_anew(self) -> None:
        """Replace a broken connection. Raises DistError if this fails within the timeout."""
        patience = self._base.timeout
        self._base.set_timeout(timedelta(seconds=self.timeout_seconds))
        try:
            self._base = connected(self._base.clone, self.timeout_seconds)
        finally:
            self._base.set_timeout(patience)
        self.store = PrefixStore(self._prefix, self._base)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove records that no member will read again. Does nothing if the store cannot delete."""
        with suppress(RuntimeError):
            for key in keys:
                self.store.delete_key(key)

    def count(self, key: str) -> int:
        """Increase the counter under `key` by 1 and return its new value, which is the number of calls by all members
        so far."""
        return int(self.store.add(key, 1))

    def add_to_list(self, key: str, entry: int) -> None:
        """Append a number to a list that any member may write to."""
        self.store.append(key, f"{entry},")  # type: ignore[attr-defined]  # torch leaves it out of its stubs

    def read_list(self, key: str) -> list[int]:
        """Return the numbers on a list in ascending order. Waits until the list has at least one number."""
        return sorted(map(int, self.store.get(key).decode().rstrip(",").split(",")))

    def answers(self, seconds: float) -> bool:
        """Return whether the store answers within `seconds`. If an earlier call is still unanswered, this call takes
        longer."""
        try:
            answered(lambda: self.store.check(["alive"]), seconds)
        except td.DistError:
            return False
        return True

    def all_posted(self, key: str, members: Iterable[int | str]) -> bool:
        """Return whether each of the members has posted its record `key/member`."""
        return bool(self.store.check([f"{key}/{member}" for member in members]))

    def gather(
        self,
        key: str,
        members: Iterable[int],
        what: str,
        deadline: float | None = None,
        stop: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """Wait until all members have posted their records `key/member`, and return the records, keyed by member.

        what: a description of what is awaited, for the error.
        deadline: a `time.monotonic()` value (default: the board's timeout from now).
        stop: called while polling; it may raise an error to end the wait.

        Raises MemberMissing, which names the missing members and `what`, when the deadline passes.
        """
        return self.wait({member: f"{key}/{member}" for member in members}, what, deadline, stop)

    def wait(
        self,
        keys: Mapping[int, str],
        what: str,
        deadline: float | None = None,
        stop: Callable[[], None] | None = None,
        crowd: int = 1,
        longest: float = LONGEST_POLL_SECONDS,
        is_there: bool = True,
        is_patient: bool = False,
    ) -> dict[int, Any]:
        """Wait until all members have posted their records, and return the records, keyed by member. Unlike `gather`,
        it accepts any keys.

        keys: a map from each member to the key of its record.
        what, deadline, stop: as in `gather`.
        crowd: how many members wait at the same time. The more they are, the less often each of them reads.
        longest: the maximum number of seconds between two reads, for a small crowd.
        is_there: whether the records may have been posted already, so that the first read should not be delayed.
        is_patient: whether the work takes an unknown time. If so, a member counts as missing once it has sent no
            heartbeat for longer than the timeout, or after half an hour. A board with a `watch` has no heartbeats;
            there a member counts as missing after half an hour.
        """
        begin, names, patience = time.monotonic(), list(keys.values()), self.timeout_seconds
        beats = dict[int, Any]()
        if is_patient and self.watch is not None:
            patience = LONGEST_SECONDS
        elif is_patient:
            patience = max(patience, SILENT_BEATS * BEAT_SECONDS)
            beats = {member: self.read(f"alive/{member}") for member in keys}
        end = begin + patience if deadline is None else deadline
        shortest = max(longest / POLL_RANGE, crowd / POLLS_PER_SECOND)
        look = begin + STOP_SECONDS
        if not is_there:
            time.sleep(shortest)
        while (values := self._found(names)) is None:
            now = time.monotonic()
            if now > end:
                missing = [member for member, name in keys.items() if not self.store.check([name])]
                if beats and now - begin <= LONGEST_SECONDS:
                    beating = {member: self.read(f"alive/{member}") for member in missing}
                    missing = [member for member in missing if beating[member] == beats[member]]
                    beats.update(beating)
                    end = now + patience
                if missing:
                    raise MemberMissing(what, missing, now - begin)
            if self.watch is not None:
                self.watch()
            if stop is not None and now >= look:
                stop()
                look = now + min(max(STOP_SECONDS, BACKOFF * (now - begin)), MOST_STOP_SECONDS)
            time.sleep(max(shortest, min(BACKOFF * (now - begin), longest)))
        return {member: self._unpacked(key, value) for (member, key), value in zip(keys.items(), values, strict=True)}

    def _found(self, keys: list[str]) -> Sequence[bytes] | None:
        """Return the records under these keys if all of them were posted; otherwise None."""
        if len(keys) == 1:
            found = self.store.compare_set(keys[0], _ABSENT, _ABSENT)
            return None if found == _ABSENT.encode() else [found]
        return self.store.multi_get(keys) if self.store.check(keys) else None

    def _packed(self, key: str, value: Any) -> bytes:
        data = pack(value)
        return data if self._seal is None else self._seal.put(f"{self._prefix}/{key}", data)

    def _unpacked(self, key: str, data: bytes) -> Any:
        return unpack(data if self._seal is None else self._seal.take(f"{self._prefix}/{key}", data))


class Teardowns:
    """Threads of this process that destroy process groups in the background. Any thread may add one.

    The process waits for these threads before it ends, because torch aborts a process that exits while a group is
    partly destroyed.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def add(self, thread: threading.Thread) -> None:
        """Add a thread that has been started and will end by itself."""
        with self._lock:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def finish(self, timeout_seconds: float) -> None:
        """Wait for all of these threads, for at most `timeout_seconds` each."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(timeout_seconds)


# ---- records on the board --------------------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """Convert `value` to bytes. It must be plain JSON whose leaf values may also be one-dimensional uint64 arrays."""
    parts: list[bytes] = []
    text = json.dumps(value, default=partial(_placed, parts)).encode()
    if not parts:
        return text
    return b"".join([_WITH_ARRAYS, len(text).to_bytes(_LENGTH, "little"), text, *parts])


def unpack(data: bytes) -> Any:
    """Return the value from which `pack` made these bytes. Arrays are views of `data`. Raises TransferError for bytes
    that `pack` has not made."""
    if not data.startswith(_WITH_ARRAYS):
        return json.loads(data)
    begin = len(_WITH_ARRAYS) + _LENGTH
    end = begin + int.from_bytes(data[len(_WITH_ARRAYS) : begin], "little")
    try:
        return json.loads(data[begin:end], object_hook=partial(_found, data, end))
    except ValueError as error:
        raise TransferError(f"a record of {len(data)} bytes cannot be read: {error}") from None


def _placed(parts: list[bytes], held: Any) -> dict[str, list[int]]:
    """Append an array's bytes to `parts`, and return the array's position and length as JSON. Raises TypeError for any
    other value, as `json` does."""
    if not isinstance(held, np.ndarray) or held.dtype != np.uint64 or held.ndim != 1:
        raise TypeError(f"a {type(held).__name__} is neither plain JSON nor an array of uint64")
    start = sum(map(len, parts))
    parts.append(held.tobytes())
    return {_MARK: [start, len(held)]}


def _found(data: bytes, base: int, held: dict[str, Any]) -> Any:
    if _MARK not in held:
        return held
    start, count = held[_MARK]
    return np.frombuffer(data, np.uint64, count, base + start)


class RecordForged(DynatrainError, td.DistError):  # noqa: N818
    """Error for a record on the board that was not written by a member of the job.

    It is handled like the loss of the store, because the true value under that key is unknown.
    """


class Seal:
    """Authentication of records: members of a job with a token prepend a tag to each record that they post.

    secret: a key known only to these members. It differs in each generation, so records of another generation are
        rejected.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def put(self, key: str, data: bytes) -> bytes:
        """Return a record with its authentication tag prepended."""
        return self._tag(key, data) + data

    def take(self, key: str, found: bytes) -> bytes:
        """Check a record's authentication tag, and return the record without it. Raises RecordForged if no member of
        this job has written the record under this key."""
        tag, data = found[:TAG_BYTES], found[TAG_BYTES:]
        if not hmac.compare_digest(self._tag(key, data), tag):
            raise RecordForged(
                f"the record {key!r} in the coordinator's store was not written by a member of this job: somebody else "
                "can reach that store and writes there; see docs/security.md"
            )
        return data

    def _tag(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")
