"""Key-value stores for process groups: the coordinator's for worlds, an agent's for what is its node's own."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as td
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.elastic.world import World


def serve_store(host: str, listener: socket.socket | None = None) -> TCPStore:
    """A store that others can reach at `host`, where `listener` listens; by default this machine alone, at a free port.

    It ends with the returned object, and takes the listener. torch's stores know no token: one is as open as its
    address.
    """
    listener = listener or listen(Address(host, 0), is_guarded=False)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def world_store(host: str, port: int, world: World, seconds: float) -> Store:
    """The store of one generation, over a connection of its own: no key in it was ever used before.

    seconds: how long its calls wait. torch's DistError if nobody is there.
    """
    return _store(host, port, world.prefix, seconds)


def node_store(host: str, port: int, node: str, seconds: float) -> Store:
    """The store of one node's workers alone; as `world_store`, since a node's id is never used again."""
    return _store(host, port, f"node/{node}", seconds)


def _store(host: str, port: int, prefix: str, seconds: float) -> Store:
    def connect() -> Store:
        wait = timedelta(seconds=seconds)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)

    return PrefixStore(prefix, connected(connect, 2 * seconds))


def connected(connect: Callable[[], Store], seconds: float) -> Store:
    """What `connect` returns; torch's DistError after `seconds`.

    torch's own time-out ends where a connection is accepted: who accepts and never answers, as the kernel does for a
    process that hangs, holds a `TCPStore` for ever (measured on 2.13). So it is made in a thread, which is left behind.
    """
    found: queue.SimpleQueue[Store | BaseException] = queue.SimpleQueue()

    def make() -> None:
        try:
            found.put(connect())
        except BaseException as error:  # whatever it is, it is raised by who waits
            found.put(error)

    threading.Thread(target=make, name="dynatrain-connect", daemon=True).start()
    try:
        made = found.get(timeout=seconds)
    except queue.Empty:
        raise td.DistNetworkError(f"the store has not answered for {seconds:g} s") from None
    if isinstance(made, BaseException):
        raise made
    return made
