"""The secret of a job: reading it, and the keys that follow from it. It is proved, never sent (see `channel`)."""

from __future__ import annotations

import hmac
import os
import shlex
import stat
from pathlib import Path

from ds_dynatrain.errors import ConfigError

SHORTEST_TOKEN = 16
"""Characters; `openssl rand -hex 32` gives 64."""


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
