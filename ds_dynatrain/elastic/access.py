"""Where a job can be watched over HTTP, and the token that a reader has to send.

The token travels unencrypted, so it is a secret of its own, with which nobody can join the job. A job that was given no
token for its readers uses one that is kept in a file of its user.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import socket
from dataclasses import dataclass
from pathlib import Path

from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.elastic.environment import users_file
from ds_dynatrain.elastic.token import made_token, read_token
from ds_dynatrain.errors import ConfigError, ElasticError

READERS = "readers"
"""The file of a user's own token for readers."""


@dataclass(frozen=True)
class Reading:
    """Where to listen for readers, the token that they have to say, and the file that it is in."""

    address: Address
    token: str
    token_file: str = ""

    @classmethod
    def of(cls, address: str | None, token_file: str | Path | None, job_token: str) -> Reading | None:
        """None without an address. ConfigError for what is no address, no file of a token, or the job's own token."""
        if not address:
            if token_file is not None:
                raise ConfigError(
                    f"token file {str(token_file)!r} is for readers, which have no port; give --http HOST:PORT, or "
                    "leave the token file out"
                )
            return None
        where = Address.parse(address)
        file = Path(token_file) if token_file is not None else users_file(READERS)
        token = made_token(file) if token_file is None else read_token(file)
        if token == job_token:
            raise ConfigError(
                f"token file {str(file)!r}: it has the job's token, with which one can join the job, and this one "
                "travels unencrypted; make another one: openssl rand -hex 32"
            )
        return cls(where, token, str(file))

    def listen(self) -> socket.socket:
        """Return a listening socket. ElasticError if the address is taken or another machine's."""
        try:
            return listen(self.address, is_guarded=True)
        except OSError as error:
            raise ElasticError(
                f"the job cannot be watched at {self.address}: {error}; give --http another port, or end the process "
                "that has this one"
            ) from error

    def permits(self, authorization: str) -> bool:
        """Whether a request with this header (empty if there is none) may be answered."""
        return hmac.compare_digest(_secret_of(authorization).encode(), self.token.encode())


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
