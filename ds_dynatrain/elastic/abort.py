"""A way out of a collective that will never end: the sockets of its group are shut down, and it raises.

gloo cannot abort. Ranks beside a dead one in the ring see its connection end; all others wait for their time-out, and
so does everybody if a rank hangs. shutdown(2) on the established connections of a group, from another thread, makes
every collective that is blocked on them raise within milliseconds, and one that is still connecting too. The listening
sockets stay: gloo ends the process if it loses one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from ds_dynatrain.errors import WorldChanged

_SOCKET = "socket:["


class WorldSockets:
    """The sockets of one world's groups, known by what was opened while they were built. Linux only.

    Build the groups inside of `building`; `abort` may be called at any time, from any thread. What other threads open
    meanwhile counts as the world's: keep downloads and loggers out of that block, or name their sockets in `spare`.
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
        """Sockets that are opened inside of the block belong to the world, also while it is not through yet.

        Gives what is to be called with a group's name once that is built: then sockets that are new are this group's.
        is_wanted: asked once an `abort` would be felt; if the world is not wanted any more, WorldChanged is raised, so
        that an abort which came a moment too early is not lost.
        """
        self._before = before = seen = open_sockets()

        def note(name: str) -> None:
            nonlocal seen
            known, seen = seen, open_sockets()
            self._groups = {**self._groups, name: new_sockets(known, seen)}

        try:
            if not is_wanted():
                raise WorldChanged("another generation was published before this one was built")
            yield note
        finally:
            self._built |= new_sockets(before, open_sockets())
            self._before = None

    def abort(self, spare: frozenset[int] = frozenset(), resting: Collection[str] = ()) -> int:
        """Shut all of them down; how many there were. Blocked collectives raise RuntimeError, a build DistError.

        spare: descriptors that are left alone. resting: names of groups that are.
        """
        mine = dict(self._built)
        before = self._before
        if before is not None:
            mine |= new_sockets(before, open_sockets())
        groups = self._groups
        rest = {each for name in resting if name in groups for each in groups[name].items()}
        return sum(_shut(*each) for each in mine.items() if each[0] not in spare and each not in rest)

    def take_over(self, previous: WorldSockets) -> None:
        """The next world has some of the groups of another one, whose sockets are this one's too, if they are open."""
        there = open_sockets().items()
        self._built = {fd: inode for fd, inode in previous._built.items() if (fd, inode) in there} | self._built
        still = {name: sockets for name, sockets in previous._groups.items() if sockets.items() & there}
        self._groups = {**still, **self._groups}

    def forget(self) -> None:
        """The groups were destroyed; their sockets are closed."""
        self._built, self._groups = {}, {}


def open_sockets() -> dict[int, int]:
    """Inode of each socket that this process has open, by its descriptor."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed since
        if target.startswith(_SOCKET):
            found[int(name)] = int(target[len(_SOCKET) : -1])
    return found


def new_sockets(before: dict[int, int], after: dict[int, int]) -> dict[int, int]:
    """Those of `after` that were not there before."""
    return {descriptor: inode for descriptor, inode in after.items() if before.get(descriptor) != inode}


def _shut(descriptor: int, inode: int) -> bool:
    """Shut a socket down if it is still the one with this inode, and an established TCP connection."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:  # a copy stays the same one, whoever closes the original
            if os.fstat(copy.fileno()).st_ino != inode or copy.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            copy.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # closed since, or not connected
