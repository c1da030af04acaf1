"""The secret of a job: reading it, and the keys that follow from it. It is proved, never sent (see `channel`)."""

from __future__ import annotations

import hmac
from pathlib import Path

from ds_dynatrain.errors import ConfigError

SHORTEST_TOKEN = 16
"""Characters; `openssl rand -hex 32` gives 64."""


def read_token(path: str | Path) -> str:
    """The token in a file, without the white space around it; ConfigError if it cannot be read or is too short."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"token file {str(path)!r} cannot be read: {error}") from error
    return checked_token(text, f"token file {str(path)!r}")


def checked_token(token: str, where: str) -> str:
    """The token; ConfigError, which does not repeat it, if it is too short to be a secret."""
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"{where}: {len(token)} characters, a token has at least {SHORTEST_TOKEN}")
    return token


def derive(token: str | None, purpose: str) -> bytes:
    """A key for one purpose alone; without a token one that everybody knows."""
    return hmac.digest((token or "").encode(), f"ds_dynatrain {purpose}".encode(), "sha256")
