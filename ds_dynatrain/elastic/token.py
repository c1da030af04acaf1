"""Secrets: a job's token, which is never sent (only proofs of it are), and the token of readers who watch the job over
HTTP.

The readers' token is sent unencrypted, so it is a separate secret that does not let anybody join the job. A job without
a given readers' token uses the one in a file that belongs to its user.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import os
import secrets
import shlex
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.errors import ConfigError, ElasticError

STATE = "XDG_STATE_HOME"
"""Environment variable that names the user's folder for program state; the default folder is `~/.local/state`."""
SHORTEST_TOKEN = 16
"""The minimum number of characters of a token; `openssl rand -hex 32` gives 64."""

NAME_ONE = "make one (openssl rand -hex 32), and name its file in DYNATRAIN_TOKEN_FILE"
READERS = "readers"
"""Name of the file with a user's own token for readers."""
DEFAULT_ADDRESS, OFF = "127.0.0.1:0", "off"
"""The address at which people can watch a job if none is given, and the word that disables this."""

logger = logging.getLogger("ds_dynatrain.elastic")


def read_token(path: str | Path) -> str:
    """Return the token in a file, stripped of whitespace.

    If the file belongs to this user, no other user may have any rights to it. If it belongs to another user, its group
    may read it, because this user may be in the group, as in a Kubernetes pod. Raises ConfigError if the file cannot be
    read, if others can read it, or if the token is too short.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            held, text = os.fstat(file.fileno()), file.read().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"token file {str(path)!r} cannot be read: {error}; name a file that this user can read"
        ) from error
    others = "every user of this machine" if held.st_mode & stat.S_IRWXO else ""
    if held.st_mode & stat.S_IRWXG and held.st_uid == os.geteuid():
        others = others or "its group"
    if others:
        raise ConfigError(
            f"token file {str(path)!r}: {others} can read or change it; chmod 600 {shlex.quote(str(path))}"
        )
    return checked_token(text, f"token file {str(path)!r}")


def made_token(path: Path) -> str:
    """Return the token in a file of this user. If the file is missing, create it with a new token.

    Concurrent callers get the same token. Raises ConfigError if the file cannot be created, belongs to another user, or
    is refused by `read_token`.
    """
    try:
        if not path.exists():
            _make(path)
        owner = path.stat().st_uid
    except OSError as error:
        raise ConfigError(
            f"this job was given no token, and none can be made in {str(path)!r}: {error}; {NAME_ONE}"
        ) from error
    if owner != os.geteuid():
        raise ConfigError(f"token file {str(path)!r} is of user {owner}, who knows what is in it; {NAME_ONE}")
    return read_token(path)


def _make(path: Path) -> None:
    """Create a file with a new token atomically, unless another process has created the file first."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()


def checked_token(token: str, where: str) -> str:
    """Return the token unchanged. Raises ConfigError, without quoting the token, if it is too short to be a secret.

    where: a description of where the token was found, for the error.
    """
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(
            f"{where}: {len(token)} characters, a token has at least {SHORTEST_TOKEN}; make one with: openssl rand "
            "-hex 32"
        )
    return token


def derive(token: str | None, purpose: str) -> bytes:
    """Return a key that is derived from a token for one purpose only. Without a token, everybody can compute the
    key."""
    return hmac.digest((token or "").encode(), f"ds_dynatrain {purpose}".encode(), "sha256")


def users_file(name: str, variables: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a file for a secret that all jobs of this user share. Creates the file's folder."""
    folder = Path(variables.get(STATE) or os.path.expanduser("~/.local/state")) / "dynatrain"
    with suppress(OSError):  # `made_token` reports that the file cannot be made
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / name


@dataclass(frozen=True)
class Reading:
    """The HTTP port at which people and tools can watch a job.

    address: the address at which to listen.
    token: the token that readers have to send.
    token_file: the file with that token.
    """

    address: Address
    token: str
    token_file: str = ""

    @classmethod
    def of(cls, address: str | None, token_file: str | Path | None, job_token: str) -> Reading | None:
        """Return the port at which the job can be watched; None if the job has none.

        address: HOST:PORT, or "off"; by default a free port that only this machine can reach, if prometheus_client is
            installed.

        Raises ConfigError if a given address or token file is invalid, or if the readers' token equals the job's own.
        """
        is_default = not address and token_file is None
        if address == OFF or (is_default and find_spec("prometheus_client") is None):
            return None
        try:
            return cls._at(address or DEFAULT_ADDRESS, token_file, job_token)
        except ConfigError as error:
            if not is_default:
                raise
            logger.warning("the job cannot be watched: %s", error)
            return None

    @classmethod
    def _at(cls, address: str, token_file: str | Path | None, job_token: str) -> Reading:
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
        """Return a socket that listens at this address. Raises ElasticError if the address is in use or belongs to
        another machine."""
        try:
            return listen(self.address, is_guarded=True)
        except OSError as error:
            raise ElasticError(
                f"the job cannot be watched at {self.address}: {error}; give --http another port, or end the process "
                "that has this one"
            ) from error

    def permits(self, authorization: str) -> bool:
        """Return whether an HTTP request has the right token.

        authorization: the request's Authorization header; "" if it has none.
        """
        return hmac.compare_digest(_secret_of(authorization).encode(), self.token.encode())


def _secret_of(authorization: str) -> str:
    """Return the secret in an Authorization header (`Bearer SECRET`, or `Basic` with any user name); "" for any other
    header.

    `Basic` is accepted because it is the only scheme for which browsers ask people for a secret.
    """
    scheme, _, rest = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeError):
        return ""
