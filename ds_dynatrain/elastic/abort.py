"""A way out of a collective that will never end: the sockets of its group are shut down, and the collective raises.

gloo cannot abort. Ranks next to a dead one in the ring see its connection end; all others wait for their time-out, and
so do all ranks if one hangs. shutdown(2) on the established connections of a group, called from another thread, makes
every collective that is blocked on them raise within milliseconds, even one that is still connecting. The listening
sockets are left open, because gloo ends the process if it loses one.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ds_dynatrain.errors import WorldChanged

_DESCRIPTORS = "/proc/self/fd"
_SOCKET = "socket:["
_EPOLL = "anon_inode:[eventpoll]"


class WorldSockets:
    """The sockets of one world's groups, identified by what gloo opened while the groups were built. Linux only.

    Build the groups inside `building`; `abort` may be called at any time, from any thread. Sockets that other threads
    open meanwhile, in Python or in a library, are left alone.
    """

    def __init__(self) -> None:
        self._built: dict[int, int] = {}
        self._before: dict[int, int] | None = None
        self._groups: dict[str, dict[int, int]] = {}

    @property
    def groups(self) -> frozenset[str]:
        """The names of the groups whose own sockets are known."""
        return frozenset(self._groups)

    @contextmanager
    def building(self, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[Callable[[str], None]]:
        """Count sockets that gloo opens inside the block as the world's, from the moment they are opened.

        Sockets of stores to which this thread connects meanwhile count, too (`count_store`). Yields a function to call
        with a group's name once the group is built: sockets that are new by then belong to that group.

        is_wanted: called once an `abort` would take effect. If it returns false, WorldChanged is raised, so that an
        abort that came a moment too early is not lost.
        """
        self._before = before = seen = gloo_sockets()
        outer, _here.building = getattr(_here, "building", None), self

        def note(name: str) -> None:
            nonlocal seen
            known, seen = seen, gloo_sockets()
            self._groups = {**self._groups, name: new_sockets(known, seen)}

        try:
            if not is_wanted():
                raise WorldChanged("another generation was published before this one was built")
            yield note
        finally:
            self._built = {**self._built, **new_sockets(before, gloo_sockets())}
            self._before, _here.building = None, outer

    def abort(self, resting: Collection[str] = ()) -> int:
        """Shut down all sockets of the world, and return how many were open.

        Blocked collectives raise RuntimeError, a group under construction raises DistError.

        resting: names of groups whose sockets are left alone.
        """
        mine = dict(self._built)
        before = self._before
        if before is not None:
            mine |= new_sockets(before, gloo_sockets())
        groups = self._groups
        rest = {each for name in resting if name in groups for each in groups[name].items()}
        return sum(_shut(*each) for each in mine.items() if each not in rest)

    def take_over(self, previous: WorldSockets) -> None:
        """Count the previous world's sockets that are still open as this world's, too, because it keeps some of the
        groups."""
        there = open_sockets().items()
        self._built = {fd: inode for fd, inode in previous._built.items() if (fd, inode) in there} | self._built
        still = {name: sockets for name, sockets in previous._groups.items() if sockets.items() & there}
        self._groups = {**still, **self._groups}

    def forget(self) -> None:
        """Forget all sockets; called when the groups were destroyed, which closes the sockets."""
        self._built, self._groups = {}, {}


_here = threading.local()
"""Thread-local storage. Attribute `building`: the WorldSockets whose `building` block the thread is in."""


def count_store(sockets: Mapping[int, int]) -> None:
    """Add a store's socket to the world that the calling thread is building, if there is one.

    sockets: the socket, which this thread opened just now.
    """
    world: WorldSockets | None = getattr(_here, "building", None)
    if world is not None:
        world._built = {**world._built, **sockets}


def open_sockets() -> dict[int, int]:
    """Return the inode of each open socket of this process, by descriptor."""
    return _sockets({int(name): _target(name) for name in os.listdir(_DESCRIPTORS)})


def gloo_sockets() -> dict[int, int]:
    """Return the inodes of gloo's sockets alone, by descriptor. gloo's event loops watch them by epoll.

    An event loop is recognized as gloo's by the pipe that wakes it (libuv and gRPC use an eventfd, asyncio a socket
    pair) and by a listening socket. Descriptors may come and go during the call; each is read once.
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
    """Return the descriptors that an epoll descriptor watches, and what each refers to; empty if it was closed
    meanwhile."""
    try:
        lines = Path(f"/proc/self/fdinfo/{name}").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    watched = [line.split()[1] for line in lines if line.startswith("tfd:")]
    return {int(one): _target(one) for one in watched}


def _target(name: str) -> str:
    """Return what a descriptor refers to, in the kernel's words; empty if it was closed meanwhile."""
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
    """Return whether a socket is listening; False if it was closed meanwhile."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _shut(descriptor: int, inode: int) -> bool:
    """Shut a socket down if it still has this inode and is an established TCP connection; return whether it was shut
    down."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:  # a copy stays valid if the original is closed
            if os.fstat(copy.fileno()).st_ino != inode or copy.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if _listens(copy.fileno()):
                return False
            copy.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # closed meanwhile, or not connected
