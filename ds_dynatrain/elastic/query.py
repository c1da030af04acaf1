"""What anybody may ask a coordinator: for the status of its job, and that a node leaves it."""

from __future__ import annotations

from typing import TypeVar

from ds_dynatrain.elastic.announcement import Endpoint
from ds_dynatrain.elastic.connection import Connection
from ds_dynatrain.elastic.messages import Dismiss, Dismissed, Message, Query, Status
from ds_dynatrain.errors import MessageError

ANSWER_SECONDS = 5.0

Answer = TypeVar("Answer", bound=Message)


def ask_status(endpoint: Endpoint, token: str | None = None, seconds: float = ANSWER_SECONDS) -> Status:
    """The status. OSError if nobody answers within `seconds`, PeerRefused or MessageError if the answer is another."""
    return _ask(endpoint, token, Query(), Status, seconds)


def ask_to_leave(
    endpoint: Endpoint, node: str, token: str | None = None, seconds: float = ANSWER_SECONDS
) -> tuple[str, ...]:
    """Let the workers of a node hand over what they hold, and go; which ones were told. They need a while for it.

    PeerRefused if the node has none. Else as `ask_status`.
    """
    return _ask(endpoint, token, Dismiss(node=node), Dismissed, seconds).members


def _ask(endpoint: Endpoint, token: str | None, question: Message, kind: type[Answer], seconds: float) -> Answer:
    connection = Connection.open(endpoint, token, seconds=seconds)
    try:
        connection.send(question)
        answer = connection.expect(seconds)
    finally:
        connection.close()
    if not isinstance(answer, kind):
        raise MessageError(f"{endpoint}: {answer.kind} came where an answer to {question.kind} was awaited")
    return answer
