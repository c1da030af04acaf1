"""Ask a coordinator for the status of its job."""

from __future__ import annotations

from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.connection import Connection
from ds_dynatrain.elastic.messages import Query, Status
from ds_dynatrain.errors import MessageError


def ask_status(address: Address, token: str | None = None, seconds: float = 5.0) -> Status:
    """The status. OSError if nobody answers within `seconds`, PeerRefused or MessageError if the answer is another."""
    connection = Connection.open(address, token, seconds=seconds)
    try:
        connection.send(Query())
        status = connection.expect(seconds)
    finally:
        connection.close()
    if not isinstance(status, Status):
        raise MessageError(f"{address}: {status.kind} came where the status was asked for")
    return status
