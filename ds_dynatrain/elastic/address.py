"""Addresses of coordinators: HOST:PORT, or file:FILE for a file in a folder that all nodes see.

A coordinator announces its address in such a file, and the newest coordinator wins. Readers open the file at each
attempt, so they find a coordinator that was restarted on another host. A coordinator ends when it finds that another
one has replaced its announcement.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict

from ds_dynatrain.elastic.generation import WireRecord
from ds_dynatrain.errors import ConfigError, CoordinatorUnproved, ElasticError, MessageError

DEFAULT_PORT = 29400
BACKLOG = 4096
USER_TIMEOUT_MS = 20_000
"""How long sent bytes may stay unacknowledged by the other host before the connection counts as broken."""
PREFIX = "file:"
LONGEST_ANNOUNCEMENT = 4096
"""The maximum size of an announcement, in bytes."""
LOOK_SECONDS = 2.0
"""How often a coordinator checks its own announcement."""
MODE = 0o644
"""Permissions of the announcement. Everybody may read the address, because joining requires the token."""

logger = logging.getLogger("ds_dynatrain.elastic")


@dataclass(frozen=True)
class Address:
    """Host and port at which a coordinator listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse HOST, HOST:PORT or [IPv6]:PORT. Raises ConfigError if the text has none of these forms."""
        rest = text.strip()
        if rest.startswith("["):
            host, found, rest = rest[1:].partition("]")
            rest = rest.removeprefix(":") if found else "?"
        else:
            host, _, rest = rest.partition(":")
        port = int(rest) if rest.isascii() and rest.isdigit() else DEFAULT_PORT if not rest else -1
        if not host or not 0 <= port <= 65535:
            raise ConfigError(f"{text!r} is no address: expected HOST:PORT, for example 10.0.0.1:{DEFAULT_PORT}")
        return cls(host, port)

    def locate(self, is_guarded: bool) -> Address:
        """Return this address. Called in the same way as `Announced.locate`, which reads the address from a file."""
        return self

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Announced:
    """Endpoint of a coordinator that announces its address in a file."""

    file: Path

    def locate(self, is_guarded: bool) -> Address:
        """Return the address that the file currently names.

        is_guarded: whether the coordinator will have to prove that it knows the token.

        Raises OSError if the file is missing, or if its address works only on another machine. Raises
        CoordinatorUnproved if the address belongs to another machine and `is_guarded` is False. Raises MessageError if
        the file was not written by a coordinator.
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
                f"{self.file} names {said.address}, which has to prove that it knows the job's token, and this "
                "process has no token; name the job's token file in DYNATRAIN_TOKEN_FILE"
            )
        return said.address

    def __str__(self) -> str:
        return f"{PREFIX}{self.file}"


Endpoint = Address | Announced
"""Where to look for a coordinator: an address, or a file that names one."""


def read_endpoint(text: str) -> Endpoint:
    """Parse HOST:PORT or file:FILE. Raises ConfigError if the text has neither form.

    A relative FILE is resolved against this process's working directory.
    """
    text = text.strip()
    if not text.startswith(PREFIX):
        return Address.parse(text)
    if text == PREFIX:
        raise ConfigError(f"{text!r} names no file: expected file:FILE, for example file:/shared/run-7.coordinator")
    return Announced(Path(text.removeprefix(PREFIX)).absolute())


class Announcement(WireRecord):
    """Contents of an announcement file.

    coordinator: the address at which the coordinator listens.
    host: the machine on which the coordinator runs.
    job: the name of the coordinator's job.
    mark: a random id that distinguishes this coordinator's announcement from those of other coordinators.
    """

    model_config = ConfigDict(extra="ignore")

    coordinator: str
    host: str
    job: str
    mark: str

    @property
    def address(self) -> Address:
        """Address at which the coordinator listens."""
        return Address.parse(self.coordinator)

    @classmethod
    def read(cls, file: Path) -> Announcement:
        """Read an announcement from a file. Raises FileNotFoundError if there is no file, MessageError if the file
        contains no announcement."""
        with file.open("rb") as opened:
            body = opened.read(LONGEST_ANNOUNCEMENT + 1)
        try:
            if len(body) > LONGEST_ANNOUNCEMENT:
                raise ValueError(f"it has more than {LONGEST_ANNOUNCEMENT} bytes")
            said = cls.model_validate_json(body)
            Address.parse(said.coordinator)
            return said
        except (ValueError, ConfigError) as error:
            raise MessageError(f"{file} is no announcement of a coordinator: {error}") from error

    def write(self, file: Path) -> None:
        """Write this announcement to a file atomically: a reader sees either the previous announcement or this one."""
        new = file.with_name(f".{file.name}.{self.mark}")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE), "w", encoding="utf-8") as opened:
                opened.write(self.model_dump_json() + "\n")
                opened.flush()
                os.fsync(opened.fileno())
            new.replace(file)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


@contextmanager
def announced(file: Path, address: Address, job: str, on_replaced: Callable[[], object]) -> Iterator[None]:
    """Context manager that announces an address in a file for the duration of its block.

    The file is deleted at the end of the block. It is kept after an error, because processes that look for a
    coordinator keep reading it. If another coordinator replaces the announcement, `on_replaced` is called, and leaving
    the block raises ElasticError. Raises OSError if the file cannot be written.
    """
    host, mark, ended = socket.gethostname(), secrets.token_hex(8), threading.Event()
    mine, others = Announcement(coordinator=str(address), host=host, job=job, mark=mark), list[Announcement]()
    mine.write(file)
    logger.info("announced in %s", file)

    def watch() -> None:
        is_last = False
        while not is_last and not others:
            is_last = ended.wait(LOOK_SECONDS)
            try:
                if not file.exists():
                    mine.write(file)
                found = Announcement.read(file)
                if found.mark != mark:
                    others.append(found)
                    on_replaced()
            except (OSError, MessageError) as error:  # the folder may be unavailable for a while
                logger.warning(
                    "the announcement cannot be seen (%s); the job goes on, and processes that start now do not find "
                    "it",
                    error,
                )

    watcher = threading.Thread(target=watch, name="dynatrain-announcement", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    if others:
        raise ElasticError(
            f"{file}: a newer coordinator, at {others[0].address}, has taken the place of this one; give each job "
            "an announcement file of its own if they are two jobs"
        )
    file.unlink(missing_ok=True)


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from its own machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(address: Address, *, is_guarded: bool) -> socket.socket:
    """Return a socket that listens at an address.

    is_guarded: whether peers have to prove that they know the token.

    Raises OSError if the address is in use or belongs to another machine.
    Raises ElasticError if peers need no token and other machines could connect.
    """
    family, _, _, _, place = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        if not is_guarded and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            raise ElasticError(
                f"{address} can be reached from other machines: a coordinator listens there only with a token; put one "
                "into a file on every node and name it in DYNATRAIN_TOKEN_FILE"
            )
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def set_tcp_options(connection: socket.socket) -> None:
    """Set TCP options: send without delay, and detect a host that disappears without closing the connection."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
