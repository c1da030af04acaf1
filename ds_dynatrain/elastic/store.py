"""Key-value stores for process groups: the coordinator's store, which all members use, and an agent's store for its own
node."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as td
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ds_dynatrain.elastic.abort import count_store, new_sockets, open_sockets
from ds_dynatrain.elastic.address import Address, listen

ANSWER_SECONDS = 10.0
"""How long a store may take to answer. Even a busy store needs only milliseconds."""
Answer = TypeVar("Answer")
StoreT = TypeVar("StoreT", bound=Store)


def serve_store(host: str, listener: socket.socket | None = None) -> TCPStore:
    """Return a store that others can reach at `host` through `listener`.

    Without a listener the store listens at a free port of `host` that only this machine can reach. The store takes
    ownership of the listener, and stops serving when the returned object is deleted. torch's stores do not check the
    token: anybody who can reach the address can use them.
    """
    listener = listener or listen(Address(host, 0), is_guarded=False)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def open_store(host: str, port: int, prefix: str, seconds: float) -> Store:
    """Return a client of the store at an address, over a new connection. All its keys get a prefix.

    seconds: the longest time that a call on the store waits.

    Raises torch's DistError if nothing answers.
    """

    def connect() -> Store:
        wait = timedelta(seconds=seconds)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)

    return PrefixStore(prefix, connected(connect, 2 * seconds))


def connected(connect: Callable[[], StoreT], seconds: float) -> StoreT:
    """Return the store that `connect` opens. Raises torch's DistError if there is no connection after `seconds`.

    Later calls on the store also raise DistError if the store does not answer within `ANSWER_SECONDS`. torch's own
    timeout covers only missing keys, and a hanging server blocks its callers forever (measured on 2.13). The limit
    works on Linux only; on other systems calls may wait forever.
    """
    with suppress(OSError):
        before = open_sockets()
    made = answered(connect, seconds)
    with suppress(OSError):
        _limit(made, new_sockets(before, open_sockets()))
    return made


def answered(ask: Callable[[], Answer], seconds: float) -> Answer:
    """Return the result of `ask`, which is called in a thread. Raises torch's DistError after `seconds`, and abandons
    the thread.

    Used for calls without a usable timeout: torch's timeout covers only the time until a connection is accepted, and
    the kernel accepts a connection even for a process that hangs.
    """
    found = futures.Future[Answer]()

    def run() -> None:
        try:
            found.set_result(ask())
        except BaseException as error:  # raised again in the thread that waits
            found.set_exception(error)

    threading.Thread(target=run, name="dynatrain-ask", daemon=True).start()
    if not futures.wait([found], seconds).done:
        raise td.DistNetworkError(f"the store has not answered for {seconds:g} s")
    return found.result()


def _limit(store: Any, sockets: Mapping[int, int]) -> None:
    """Limit how long calls on a store wait for an answer. If the store is opened while a world is built, also make
    these calls end when that world is aborted.

    sockets: new sockets, including the store's.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return
    limit = struct.pack("ll", int(ANSWER_SECONDS), 0)
    for descriptor, inode in sockets.items():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getpeername()[1] == store.port:
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                count_store({descriptor: inode})
