"""What proves each message of a connection: a tag that only the two ends of this one connection can make.

Both ends draw a number, and from the token, both numbers and the direction follows a key. So the first message under it
proves that its sender knows the token, and no message of another connection, of the other direction or of another place
in this one is taken. Whoever stands in the middle can read and hold up, as on any wire, but change, repeat, add and
leave out nothing. So the addresses of the two ends are not part of it: they differ behind NAT and in containers, and
would keep nobody from anything more.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Literal

from ds_dynatrain.elastic.token import derive
from ds_dynatrain.errors import MessageError

Role = Literal["coordinator", "peer"]

COUNT = struct.Struct(">Q")
TAG_BYTES = 32
"""HMAC-SHA256."""
NO_TAG = bytes(TAG_BYTES)
"""What stands behind a message of which nothing is proved yet."""


def new_nonce() -> str:
    """A number that was never drawn before."""
    return secrets.token_hex(16)


class Channel:
    """Both directions of one connection, as one end sees them. Without a token the tags are right, and prove nothing.

    nonces: the coordinator's, the peer's. here: which of the two this end is.
    """

    def __init__(self, token: str | None, nonces: tuple[str, str], here: Role) -> None:
        there: Role = "peer" if here == "coordinator" else "coordinator"
        self._sent, self._received = (_Direction(derive(token, " ".join([who, *nonces]))) for who in (here, there))

    def seal(self, wire: bytes) -> bytes:
        """An encoded message with its tag; they have to be sent in this order."""
        return wire + self._sent.next_tag(wire)

    def is_next(self, wire: bytes, tag: bytes) -> bool:
        """Whether the other end has sent just this after what was asked about before."""
        return hmac.compare_digest(self._received.next_tag(wire), tag)

    def check(self, wire: bytes, tag: bytes) -> None:
        """MessageError if the other end has not sent just this; the connection is worth nothing then."""
        if not self.is_next(wire, tag):
            raise MessageError(
                "a message was changed on its way, or is not of who has proved the token: its tag is wrong"
            )


class _Direction:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next_tag(self, wire: bytes) -> bytes:
        count, self._count = self._count, self._count + 1
        return hmac.digest(self._key, COUNT.pack(count) + wire, "sha256")
