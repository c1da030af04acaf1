"""A way out of a collective that will never end: shutting down the sockets of its group makes the collective raise.

gloo cannot abort a collective. If a rank dies, only its neighbours in the ring see a connection end; the other ranks
wait for their timeout. If a rank hangs, no connection ends, and all ranks wait for their timeout. Calling shutdown(2)
on a group's established connections from another thread makes every collective that is blocked on them raise within
milliseconds, even while the group is still connecting. The listening sockets are left open, because gloo ends the
process if it loses one of them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ds_dynatrain.errors import WorldChanged

_DESCRIPTORS = "/proc/self/fd"
_SOCKET = "socket:["
_EPOLL = "anon_inode:[eventpoll]"


class WorldSockets:
    """The sockets that gloo opened while the process groups of one world were built. Linux only.

    Build the groups inside `building`. `abort` may be called at any time, from any thread. Sockets that other threads
    open during the build, in Python or in a library, are left alone.
    """

    def __init__(self) -> None:
        self._built: dict[int, int] = {}
        self._before: dict[int, int] | None = None

    @contextmanager
    def building(self, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Context manager for building process groups: every socket that gloo opens inside the block is recorded as a
        socket of this world, as soon as it is opened.

        Sockets of stores to which this thread connects inside the block are recorded as well (`count_store`).

        is_wanted: called at the start of the block, when `abort` already covers the new sockets. If it returns False,
            because the world was aborted just before, WorldChanged is raised.
        """
        self._before = before = gloo_sockets()
        outer, _here.building = getattr(_here, "building", None), self
        try:
            if not is_wanted():
                raise WorldChanged("another generation was published before this one was built")
            yield
        finally:
            self._built = {**self._built, **new_sockets(before, gloo_sockets())}
            self._before, _here.building = None, outer

    def abort(self) -> int:
        """Shut down all sockets of the world, and return how many of them were open.

        Collectives that are blocked on them raise RuntimeError, and a process group that is being built raises
        DistError.
        """
        mine = dict(self._built)
        before = self._before
        if before is not None:
            mine |= new_sockets(before, gloo_sockets())
        return sum(_shut(*each) for each in mine.items())

    def forget(self) -> None:
        """Forget all sockets. Called after the groups, and with them their sockets, have been destroyed."""
        self._built = {}


_here = threading.local()
"""Thread-local storage. Its attribute `building` is the WorldSockets whose `building` block the thread is in."""


def count_store(sockets: Mapping[int, int]) -> None:
    """Record a store's socket as a socket of the world that the calling thread is building, if it is building one.

    sockets: the socket that this thread has just opened, as a map from descriptor to inode.
    """
    world: WorldSockets | None = getattr(_here, "building", None)
    if world is not None:
        world._built = {**world._built, **sockets}


def open_sockets() -> dict[int, int]:
    """Return a map from the descriptor of each open socket of this process to its inode."""
    return _sockets({int(name): _target(name) for name in os.listdir(_DESCRIPTORS)})


def gloo_sockets() -> dict[int, int]:
    """Return a map from descriptor to inode for the sockets that gloo watches by epoll.

    An epoll descriptor belongs to gloo if it watches a listening socket and is woken by a pipe (libuv and gRPC use an
    eventfd, asyncio a socket pair). Other threads may open and close descriptors during the call; each descriptor is
    read once.
    """
    found: dict[int, int] = {}
    for name in os.listdir(_DESCRIPTORS):
        watched = _watched(name) if _target(name) == _EPOLL else {}
        sockets = _sockets(watched)
        others = [target for descriptor, target in watched.items() if target and descriptor not in sockets]
        if others and all(one.startswith("pipe:") for one in others) and any(map(_listens, sockets)):
            found |= sockets
    return found


def _watched(name: str) -> dict[int, str]:
    """Return, for each descriptor that an epoll descriptor watches, what the descriptor refers to (see `_target`); {}
    if the epoll descriptor was closed during the call.

    name: the number of the epoll descriptor.
    """
    try:
        lines = Path(f"/proc/self/fdinfo/{name}").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    watched = [line.split()[1] for line in lines if line.startswith("tfd:")]
    return {int(one): _target(one) for one in watched}


def _target(name: str) -> str:
    """Return what a descriptor refers to, in the kernel's notation; "" if the descriptor has been closed."""
    try:
        return os.readlink(f"{_DESCRIPTORS}/{name}")
    except OSError:
        return ""


def _sockets(targets: Mapping[int, str]) -> dict[int, int]:
    return {fd: int(target[len(_SOCKET) : -1]) for fd, target in targets.items() if target.startswith(_SOCKET)}


def new_sockets(before: dict[int, int], after: dict[int, int]) -> dict[int, int]:
    """Return the sockets of `after` that are not in `before`."""
    return {descriptor: inode for descriptor, inode in after.items() if before.get(descriptor) != inode}


def _listens(descriptor: int) -> bool:
    """Return whether a socket is listening; False if the socket has been closed."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _shut(descriptor: int, inode: int) -> bool:
    """Shut down a socket if it is an established TCP connection and still has the given inode; return whether this was
    done."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:  # a copy stays valid if the original is closed
            if os.fstat(copy.fileno()).st_ino != inode or copy.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if _listens(copy.fileno()):
                return False
            copy.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # closed in the meantime, or not connected
