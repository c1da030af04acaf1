"""To whom the monitoring port answers.

Without a token it listens on this machine alone, and answers its own user and root, as the coordinator does, and no
page of another site that a browser was led to. With one, it answers whoever says it: it travels as it is, so it is a
secret of its own, with which nobody can join the job.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.elastic.token import read_token
from ds_dynatrain.elastic.users import check_user, tells_users
from ds_dynatrain.errors import ConfigError, ElasticError, PeerRefused

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Reading:
    """Where to listen for readers, and what they have to say; None: nothing, on this machine."""

    address: Address
    token: str | None = None

    @classmethod
    def of(cls, address: str | None, token_file: str | Path | None, job_token: str | None) -> Reading | None:
        """None without an address. ConfigError for what is no address, no file of a token, or the job's own token."""
        if not address:
            if token_file is not None:
                raise ConfigError(
                    f"token file {str(token_file)!r} is for readers, which have no port; give --http HOST:PORT, or "
                    "leave the token file out"
                )
            return None
        token = None if token_file is None else read_token(token_file)
        if token is not None and token == job_token:
            raise ConfigError(
                f"token file {str(token_file)!r}: it has the job's token, with which one can join the job, and this "
                "one travels unencrypted; make another one: openssl rand -hex 32"
            )
        return cls(Address.parse(address), token)

    def listen(self) -> socket.socket:
        """ElasticError if the address is taken or another machine's, or others can reach it and there is no token."""
        try:
            listener = listen(self.address, is_guarded=True)
        except OSError as error:
            raise ElasticError(
                f"the job cannot be watched at {self.address}: {error}; give --http another port, or end the process "
                "that has this one"
            ) from error
        if self.token is None and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            listener.close()
            raise ElasticError(
                f"{self.address} can be reached from other machines: what the job does is shown there only to those "
                "who have a token for it; put one into a file and name it (--http-token-file FILE, or "
                "--rdzv-conf http_token_file=FILE), or listen at 127.0.0.1"
            )
        return listener


class Access:
    """Who may read. listener: where they come."""

    def __init__(self, token: str | None, listener: socket.socket) -> None:
        self._token = token
        self._checks_users = token is None and tells_users(listener.getsockname())

    def admits(self, there: Any, here: Any) -> bool:
        """Whether the other end of a connection may ask at all: without a token only this user and root."""
        if not self._checks_users:
            return True
        try:
            check_user(there, here)
        except (PeerRefused, OSError):
            return False
        return True

    def permits(self, authorization: str, host: str) -> bool:
        """Whether a request may be answered. authorization, host: those two headers, empty if they are not there."""
        if self._token is None:
            return not host or _name_of(host) in LOCAL_NAMES
        return hmac.compare_digest(_secret_of(authorization).encode(), self._token.encode())

    @property
    def needs_token(self) -> bool:
        """Whether a token has to be said."""
        return self._token is not None


def _secret_of(authorization: str) -> str:
    """What `Bearer SECRET` says, or `Basic` with any name: the only way in which a browser asks a person for one."""
    scheme, _, rest = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeError):
        return ""


def _name_of(host: str) -> str:
    """HOST of a header's HOST:PORT."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
