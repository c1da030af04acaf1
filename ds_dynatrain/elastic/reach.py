"""Reachability of hosts: each member's listening socket, and its attempts to connect to other members.

gloo connects hosts to each other directly, while the coordinator sees only its own connections. During a standstill the
coordinator asks the members which of the others they can reach (`links`). Each member listens at an address at which no
data is exchanged: an accepted connection is sufficient proof, and is closed at once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as td
from torch._C._distributed_c10d import HashStore

from ds_dynatrain.elastic.abort import new_sockets, open_sockets
from ds_dynatrain.elastic.address import BACKLOG, Address
from ds_dynatrain.elastic.messages import Probed

REACH_SECONDS = 2.0
"""How long an attempt to connect may take. TCP sends a lost packet again after one second."""
UNREACHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
ANSWERED = (0, errno.ECONNREFUSED)


class Reach:
    """A member's listening socket, and its attempts to connect to other members.

    tell: called on another thread with the results of these attempts.
    """

    def __init__(self, tell: Callable[[Probed], None]) -> None:
        self._tell = tell
        self._listener: socket.socket | None = None

    def listen(self) -> str:
        """Listen on the network interface that the process groups use, and return the address; "" if the interface is
        unknown."""
        host = group_host()
        with suppress(OSError):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG) if host else None
        if self._listener is None:
            return ""
        self._listener.setblocking(False)
        return str(Address(host, self._listener.getsockname()[1]))

    def filenos(self) -> list[int]:
        """Return the descriptors to poll before `answer` is called: that of the listening socket, or none if this
        member does not listen."""
        return [] if self._listener is None else [self._listener.fileno()]

    def answer(self) -> None:
        """Accept and close the connections of other members."""
        with suppress(OSError):
            while self._listener is not None:
                self._listener.accept()[0].close()

    def ask(self, addresses: Sequence[str]) -> None:
        """Try, in a thread, to connect to these addresses. The thread calls `tell` with the results."""
        threading.Thread(target=self._try, args=(addresses,), name="dynatrain-reach", daemon=True).start()

    def close(self) -> None:
        """Close the listening socket, if there is one."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _try(self, addresses: Sequence[str]) -> None:
        with suppress(OSError):  # the connection to the coordinator is closed
            self._tell(reached_of(addresses))


def reached_of(addresses: Sequence[str], seconds: float = REACH_SECONDS) -> Probed:
    """Try to connect to addresses. Return those to which a connection was made within `seconds`, and those to which
    none was.

    A host that refuses a connection counts as reached. An address that fails for a local reason is in neither list.
    """

    async def tried() -> list[int | None]:
        return await asyncio.gather(*(_connect(Address.parse(each), seconds) for each in addresses))

    results = list(zip(addresses, asyncio.run(tried()), strict=True))
    reached, unreached = (
        tuple(address for address, result in results if result in some) for some in (ANSWERED, UNREACHED)
    )
    return Probed(reached=reached, unreached=unreached)


async def _connect(address: Address, seconds: float) -> int | None:
    """Return 0 if a connection can be made, otherwise the error number (None if the error has none)."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), seconds)
    except asyncio.TimeoutError:
        return errno.ETIMEDOUT
    except OSError as error:
        return error.errno
    writer.transport.abort()
    return 0


def group_host() -> str:
    """Return the address at which gloo listens in this process; "" if it cannot be determined."""
    before = open_sockets()
    with suppress(RuntimeError):
        group = td.ProcessGroupGloo(HashStore(), 0, 1, timeout=timedelta(seconds=REACH_SECONDS))
        hosts = [_listens_at(descriptor) for descriptor in new_sockets(before, open_sockets())]
        del group
        return next(filter(None, hosts), "")
    return ""


def _listens_at(descriptor: int) -> str:
    """Return the address of a listening socket; "" for any other socket, and for a link-local address."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        is_listening = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        )
        host = str(copy.getsockname()[0]) if is_listening else ""
        return "" if "%" in host else host
    return ""
