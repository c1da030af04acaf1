"""Process groups that say WorldChanged where gloo says RuntimeError: a peer is gone, and the world is formed anew.

`torch.distributed` calls the methods of a group from Python, and torch's own code calls them through pybind11's
trampolines; so a subclass sees every collective of the user's, of DeepSpeed's, and inside of autograd's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as td
from torch._C._distributed_c10d import Work

from ds_dynatrain.adapters.device import HOST
from ds_dynatrain.adapters.forwarded import WAITS, ForwardedWork
from ds_dynatrain.adapters.gate import TORN, Gate
from ds_dynatrain.adapters.pair import Pair
from ds_dynatrain.adapters.process_groups import Made
from ds_dynatrain.adapters.torch_versions import COLLECTIVES
from ds_dynatrain.adapters.traffic import MESSAGES, Traffic
from ds_dynatrain.errors import WorldChanged

T = TypeVar("T")
LOOK = timedelta(seconds=0.25)
"""So long a collective of a lost world is waited for; one that goes on is not held up."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether gloo says that a peer did not answer; what it says of wrong arguments names no file of its own."""
    return isinstance(error, td.DistError) or "gloo/" in str(error).lower()


class GroupStatus:
    """What has become of the groups of one world. gate: what is known of those of its collectives on an accelerator.

    failure: how a collective of it has failed, without the frames, which hold groups. is_closed: whether it takes no
    collective at present: the world was formed anew in the middle of a global batch, and not all of its members are in
    the same line of the script. is_lost: a member of it is gone, or a collective has failed somewhere; another world
    follows, and none of its collectives is begun any more.
    """

    def __init__(self) -> None:
        self.failure: RuntimeError | None = None
        self.is_closed = self.is_lost = False
        self.gate = Gate()

    @property
    def is_broken(self) -> bool:
        """Whether communicators of the world can only be aborted: not all its members would end them together."""
        return self.failure is not None or self.is_lost or self.gate.is_torn

    def call(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Return what `call` returns; raise WorldChanged if a peer is gone or the world is closed."""
        if self.is_closed:
            raise WorldChanged(
                "the world was formed anew: this global batch is discarded; go on with the loader's next one"
            )
        try:
            return call(*arguments, **named)
        except RuntimeError as error:
            if isinstance(error, WorldChanged) or not is_lost_peer(error):
                raise
            self.failure = type(error)(*error.args)
            what = str(error).partition("\n")[0]
            raise WorldChanged(
                f"a member of this world is gone, or a collective of it has failed ({what}); go on with the loader's "
                "next batch: the world is formed anew there"
            ) from error


class WatchedWork(ForwardedWork):
    """A collective that was begun. name: of the group's method. on_device: whether an accelerator does it: a stream
    waits then, and not the host. A message is waited for in one piece: its connection ends with a wait that is given
    up."""

    def __init__(self, work: Work, status: GroupStatus, traffic: Traffic, name: str, on_device: bool = False) -> None:
        super().__init__(work)
        self._status, self._traffic, self._name = status, traffic, name
        self._looks, self._on_device = name not in MESSAGES and not on_device, on_device
        self._has_ended = False

    def _until_lost(self) -> bool:
        """Wait, also where gloo does not hear that its sockets were shut down, as it may not in the instant in which a
        collective begins (measured: some of ten in a loop of small ones): its thread then waits for its time-out."""
        while True:
            is_lost = self._traffic.is_closed
            try:
                return self._work.wait(LOOK)
            except RuntimeError:
                if self._work.is_completed():  # it has failed, or has ended since that look was over
                    return self._work.wait(LOOK)
                if is_lost:
                    raise td.DistError("a member of the world is gone, and gloo has not heard of it") from None

    def _waited(self, name: str, *arguments: Any, **named: Any) -> Any:
        try:
            is_open = name == "wait" and self._looks and not arguments and not named
            with self._status.gate.waiting(self._name):
                found = self._until_lost() if is_open else getattr(self._work, name)(*arguments, **named)
            if self._on_device and self._status.gate.is_torn:
                raise td.DistError(TORN)
        except BaseException:
            self._traffic.fail()
            raise
        if name == "wait" and not self._has_ended:
            self._has_ended = True
            self._traffic.end()
        return found


class WatchedGroup(Pair):
    """A group over the same connections as another one, which it keeps.

    Its failures are told to the status of the world that it serves. traffic: what was begun and ended in it.
    """

    def __init__(self, group: td.ProcessGroup, status: GroupStatus) -> None:
        super().__init__(group)
        self._status, self.traffic = status, Traffic(group.rank())

    def serve(self, status: GroupStatus) -> None:
        """It is a group of the world with this status from here on: the next one, or again the one before."""
        self._status, self.traffic.is_closed = status, status.is_lost

    def _begun(self, name: str, *arguments: Any, **named: Any) -> Any:
        """What the group returns; a lost peer's error where nothing is begun any more."""
        if not self.traffic.begin(name, arguments):
            raise td.DistError("a member of the world is gone, or a collective of it has failed")
        on_device = is_on_device((*arguments, *named.values()))
        if on_device:
            self._status.gate.begin()
        try:
            with self._status.gate.waiting(name):
                work = getattr(self._group, name)(*arguments, **named)
        except BaseException:
            self.traffic.fail()
            raise
        if isinstance(work, Work):
            return WatchedWork(work, self._status, self.traffic, name, on_device)
        self.traffic.end()
        return work

    def _end_coalescing(self, device: torch.device) -> Any:
        """torch's; what several messages on an accelerator are waited for with."""
        return self._status.call(self._begun, "_end_coalescing", device)


def is_on_device(arguments: Sequence[Any]) -> bool:
    """Whether an accelerator does a collective with these arguments: the first tensor, or device, says so."""
    for each in arguments:
        if isinstance(each, list | tuple):
            if each:
                return is_on_device(each)
            continue
        device = each if isinstance(each, torch.device) else getattr(each, "device", None)
        if isinstance(device, torch.device):
            return device.type != HOST.type
    return False


def watched(made: Made, status: GroupStatus) -> Made:
    """A gloo group, so that its failures are said in words of membership."""
    return WatchedGroup(made[0], status), made[1]


def _collective(name: str) -> Callable[..., Any]:
    def call(self: WatchedGroup, *arguments: Any, **named: Any) -> Any:
        return self._status.call(self._begun, name, *arguments, **named)

    call.__name__ = name
    return call


def _wait(name: str) -> Callable[..., Any]:
    def wait(self: WatchedWork, *arguments: Any, **named: Any) -> Any:
        return self._status.call(self._waited, name, *arguments, **named)

    return wait


for _name in COLLECTIVES:
    setattr(WatchedGroup, _name, _collective(_name))
for _name in WAITS:
    setattr(WatchedWork, _name, _wait(_name))
