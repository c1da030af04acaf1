"""HOST:PORT: reading it, listening on it, and whether only this machine can reach it."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from ds_dynatrain.errors import ConfigError, ElasticError

DEFAULT_PORT = 29400
BACKLOG = 4096
USER_TIMEOUT_MS = 20_000
"""How long sent bytes may stay without an answer from the other host before its connection counts as broken."""


@dataclass(frozen=True)
class Address:
    """Where a coordinator listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read HOST, HOST:PORT or [IPv6]:PORT; ConfigError if it is none of them."""
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
        """Itself: see `announcement`, whose addresses have to be looked up."""
        return self

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen(address: Address, *, is_guarded: bool) -> socket.socket:
    """A listening socket. OSError if the address is taken or another machine's.

    is_guarded: whoever connects has to prove a token. ElasticError if nobody has to and another machine could connect.
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


def tune(connection: socket.socket) -> None:
    """Send at once, and notice a host that is gone though nobody said so."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
