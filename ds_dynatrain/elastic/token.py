"""The secret of a job: reading it, and the keys that follow from it. It is proved, never sent (see `channel`)."""

from __future__ import annotations

import hmac
import os
import secrets
import shlex
import stat
from pathlib import Path

from ds_dynatrain.errors import ConfigError

SHORTEST_TOKEN = 16
"""Characters; `openssl rand -hex 32` gives 64."""

NAME_ONE = "make one (openssl rand -hex 32), and name its file in DYNATRAIN_TOKEN_FILE"


def read_token(path: str | Path) -> str:
    """The token in a file, without the white space around it; ConfigError if it cannot be read, is too short, or can be
    read by others."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            others = _others_who_read(os.fstat(file.fileno()))
            text = file.read().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"token file {str(path)!r} cannot be read: {error}; name a file that this user can read"
        ) from error
    if others:
        raise ConfigError(
            f"token file {str(path)!r}: {others} can read or change it; chmod 600 {shlex.quote(str(path))}"
        )
    return checked_token(text, f"token file {str(path)!r}")


def made_token(path: Path) -> str:
    """The token in a file of this user's, which is made with a new one if it is not there. All who ask for it at once
    get the same.

    ConfigError as of `read_token`, if the file cannot be made, and if it is another user's.
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
    """Put a new token there, whole, unless somebody else is first."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()


def _others_who_read(file: os.stat_result) -> str:
    """Who else has rights to a file; empty if nobody has. The group may have some to another user's file: it is how
    this one reads it, as in a Kubernetes pod."""
    if file.st_mode & stat.S_IRWXO:
        return "every user of this machine"
    return "its group" if file.st_mode & stat.S_IRWXG and file.st_uid == os.geteuid() else ""


def checked_token(token: str, where: str) -> str:
    """The token; ConfigError, which does not repeat it, if it is too short to be a secret."""
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(
            f"{where}: {len(token)} characters, a token has at least {SHORTEST_TOKEN}; make one with: openssl rand "
            "-hex 32"
        )
    return token


def derive(token: str | None, purpose: str) -> bytes:
    """A key for one purpose alone; without a token one that everybody knows."""
    return hmac.digest((token or "").encode(), f"ds_dynatrain {purpose}".encode(), "sha256")
