"""file:FILE: a coordinator announces its address in a folder that all nodes see, and whoever looks for it reads that.

The newest coordinator wins. Readers open the file at each try, so they find one that was started anew elsewhere; a
coordinator that finds another one's announcement there ends.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ds_dynatrain.elastic.address import Address
from ds_dynatrain.errors import ConfigError, CoordinatorUnproved, ElasticError, MessageError

PREFIX = "file:"
LONGEST_ANNOUNCEMENT = 4096
"""Bytes."""
LOOK_SECONDS = 2.0
"""Between two looks of a coordinator at its own announcement."""
MODE = 0o644
"""Others may read where it is; to be let in takes the token."""

logger = logging.getLogger("ds_dynatrain.elastic")


@dataclass(frozen=True)
class Announced:
    """A coordinator whose address stands in a file."""

    file: Path

    def locate(self, is_guarded: bool) -> Address:
        """What stands there now. OSError if nothing does yet, or an address that only another machine reaches.

        is_guarded: whoever answers will have to prove the token. CoordinatorUnproved if not and it is on another
        machine; MessageError for a file that no coordinator has written.
        """
        try:
            said = Announcement.read(self.file)
        except FileNotFoundError as error:
            reason = "no coordinator has announced itself in this file yet"
            raise FileNotFoundError(errno.ENOENT, reason, str(self.file)) from error
        if is_loopback(said.address.host):
            if said.host != socket.gethostname():
                raise ConnectionError(f"{said.address} in {self.file} can be reached on {said.host} alone")
        elif not is_guarded:
            raise CoordinatorUnproved(
                f"{self.file} names {said.address}, and this process has no token that what answers there could "
                "prove; name the job's token file in DYNATRAIN_TOKEN_FILE"
            )
        return said.address

    def __str__(self) -> str:
        return f"{PREFIX}{self.file}"


Endpoint = Address | Announced
"""Where a coordinator is found."""


def read_endpoint(text: str) -> Endpoint:
    """HOST:PORT, or file:FILE; ConfigError if it is neither. A relative FILE counts from this process's folder."""
    text = text.strip()
    if not text.startswith(PREFIX):
        return Address.parse(text)
    if text == PREFIX:
        raise ConfigError(f"{text!r} names no file: expected file:FILE, for example file:/shared/run-7.coordinator")
    return Announced(Path(text.removeprefix(PREFIX)).absolute())


@dataclass(frozen=True)
class Announcement:
    """What a coordinator writes. mark: no other one has it. host: the machine that the coordinator runs on."""

    address: Address
    host: str
    job: str
    mark: str

    @classmethod
    def read(cls, file: Path) -> Announcement:
        """FileNotFoundError if there is none, MessageError if it is something else."""
        with file.open("rb") as opened:
            body = opened.read(LONGEST_ANNOUNCEMENT + 1)
        try:
            said = json.loads(body) if len(body) <= LONGEST_ANNOUNCEMENT else None
            fields = [said[name] for name in ("coordinator", "host", "job", "mark")] if isinstance(said, dict) else []
            if not fields or not all(isinstance(field, str) for field in fields):
                raise ValueError("it has no such fields")
            return cls(Address.parse(fields[0]), *fields[1:])
        except (ValueError, KeyError, RecursionError, ConfigError) as error:
            raise MessageError(f"{file} is no announcement of a coordinator: {error}") from error

    def write(self, file: Path) -> None:
        """Put it in the place of whatever is there: a reader sees the one or the other, and nothing in between."""
        said = {"coordinator": str(self.address), "host": self.host, "job": self.job, "mark": self.mark}
        new = file.with_name(f".{file.name}.{self.mark}")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE), "w", encoding="utf-8") as opened:
                opened.write(json.dumps(said) + "\n")
                opened.flush()
                os.fsync(opened.fileno())
            new.replace(file)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


@contextmanager
def announced(file: Path, address: Address, job: str, on_replaced: Callable[[], object]) -> Iterator[None]:
    """Announce an address while this lasts; OSError if the file cannot be written.

    It is taken away at the end, not after an error: whoever looks for a coordinator goes on looking there. If another
    one announces itself in the same file, `on_replaced` is called, and the end is an ElasticError.
    """
    mine = Announcement(address, socket.gethostname(), job, secrets.token_hex(8))
    mine.write(file)
    logger.info("announced in %s", file)
    watch = _Watch(file, mine, on_replaced)
    watch.start()
    try:
        yield
    finally:
        watch.stop()
    if watch.other is not None:
        raise ElasticError(
            f"{file}: a newer coordinator, at {watch.other.address}, has taken the place of this one; give each job "
            "an announcement file of its own if they are two jobs"
        )
    file.unlink(missing_ok=True)


class _Watch:
    """Looks at the file now and then, in a thread."""

    def __init__(self, file: Path, mine: Announcement, on_replaced: Callable[[], object]) -> None:
        self._file = file
        self._mine = mine
        self._on_replaced = on_replaced
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynatrain-announcement", daemon=True)
        self.other: Announcement | None = None
        """Whoever has taken this coordinator's place."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Look once more, and end."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while self.other is None:
            is_last = self._ended.wait(LOOK_SECONDS)
            try:
                self._look()
            except (OSError, MessageError) as error:  # a folder that is away for a while; the job needs it not
                logger.warning(
                    "the announcement cannot be seen (%s); the job goes on, and processes that start now do not find "
                    "it",
                    error,
                )
            if is_last:
                return

    def _look(self) -> None:
        try:
            found = Announcement.read(self._file)
        except FileNotFoundError:
            self._mine.write(self._file)
            return
        if found.mark != self._mine.mark:
            self.other = found
            self._on_replaced()


def is_loopback(host: str) -> bool:
    """Whether only the machine itself reaches this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
