"""The secret of a job. It is proved, never sent: the peer signs a number that the coordinator has just drawn."""

from __future__ import annotations

import hashlib
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


def prove(token: str | None, nonce: str) -> str:
    """What shows that one knows the token; empty without one."""
    return "" if token is None else hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def is_proved(token: str | None, nonce: str, proof: str) -> bool:
    """Whether a proof is right, in a time that does not depend on where it is wrong. Without a token all are."""
    return token is None or hmac.compare_digest(prove(token, nonce).encode(), proof.encode())
