"""The wrapper around each process group of a world.

`torch.distributed` calls a group's methods from Python, and torch's own code calls them through pybind11's trampolines.
A subclass thus sees every collective, whether the user, DeepSpeed or one of autograd's hooks started it.

Collectives on an accelerator do not report failure. A collective whose peer has died waits forever. An aborted
collective ends as if it had succeeded, but with arbitrary results. If a member aborts its collectives, collectives of
other members that do not yet know of the loss may end in this way. In a world that may lose members a `Gate` therefore
records collectives on an accelerator, and two rules apply:

- after a loss, the world's gate is torn first, so that later results no longer count; then all communicators of the
  world are aborted together, in a thread;
- results count only after `agree` has returned, which means that all ranks had all their results before any of them
  aborted anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as td
from deepspeed.constants import default_pg_timeout
from torch._C._distributed_c10d import Store, Work
from torch.distributed.distributed_c10d import GroupName

from ds_dynatrain.adapters.groups.communicators import Communicator, end
from ds_dynatrain.adapters.groups.device import HOST, start_thread, synchronize
from ds_dynatrain.adapters.versions.replaced import passing_on
from ds_dynatrain.adapters.versions.torch_versions import COLLECTIVES
from ds_dynatrain.errors import WorldChanged

T = TypeVar("T")
Kind = td.ProcessGroup.BackendType
LOOK = timedelta(seconds=0.25)
"""Interval at which a waiting collective checks whether its world is lost. The checks cost a live world no time."""
MESSAGES = ("send", "recv", "recv_anysource")
"""Methods that involve only two ranks."""
NO_LIMIT = timedelta(0)
"""Value that torch passes to `wait` if the caller gives no timeout."""


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error is gloo's error for a peer that did not answer.

    Such errors name one of gloo's source files; gloo's errors for wrong arguments do not.
    """
    return isinstance(error, td.DistError) or "gloo/" in str(error).lower()


ABORT_SECONDS = 60.0
"""Time limit, in seconds, for aborting communicators and waiting for the device. If it is exceeded, this process can no
longer use the device."""
TORN = "a member of this world is gone, and its communicators were aborted: their results are unknown"


class Gate:
    """One member's record of whether results of collectives on the accelerator, in one world, may be trusted.

    is_torn: whether the world's communicators were aborted, or are about to be. Results no longer count.
    is_in_doubt: whether the last optimizer step used results that `agree` has not confirmed since.
    communicators: the current communicators of the world.
    """

    def __init__(self) -> None:
        self.is_torn = self.is_in_doubt = False
        self.communicators: list[Communicator] = []
        self.agreeing = threading.Lock()
        """Lock that this member holds while it waits for the other members' answers. It aborts nothing during that
        time."""
        self._has_begun = False
        self._wait: tuple[str, float] | None = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Context manager that records that the main thread waits for other ranks. Nested blocks have no effect."""
        is_noted = self._wait is None and threading.current_thread() is threading.main_thread()
        if is_noted:
            self._wait = what, time.monotonic()
        try:
            yield
        finally:
            if is_noted:
                self._wait = None

    def waits(self, blocked_seconds: float) -> tuple[str, float]:
        """Return what the main thread is waiting for in this world, and for how many seconds. Any thread may call this.

        blocked_seconds: how long the main thread has run no Python code. Once a collective has begun on the device,
            this time counts as waiting for the collective, as in `loss.item()`.
        """
        wait = self._wait
        if wait is not None:
            return wait[0], time.monotonic() - wait[1]
        return ("a collective of the device", blocked_seconds) if self._has_begun else ("", 0.0)

    def begin(self) -> None:
        """Record that a collective has been started on the device."""
        self._has_begun = True

    def agree(self, meet: Callable[[int], object]) -> None:
        """Wait for the device and then for all ranks. Raises WorldChanged unless all ranks have their results.

        meet: function that waits for all ranks, over the host, in round 0 and again in round 1; it raises if a rank
            does not arrive.

        A rank that has passed round 1 knows that all ranks have passed round 0. So all ranks had their results before
        `agree` returned on any of them. No rank aborts during round 0.
        """
        with self.waiting("collectives of the device, at the gate"):
            synchronize()
        with self.agreeing:
            self.check()
            for number in range(2):
                with self.waiting(f"round {number} of the gate"):
                    meet(number)
        self._has_begun = self.is_in_doubt = False

    def end_step(self) -> None:
        """Record that an optimizer step was queued. If results are not confirmed yet, the step is in doubt."""
        self.is_in_doubt = self._has_begun

    def check(self) -> None:
        """Raise WorldChanged if the gate is torn, that is, if results on the device no longer count."""
        if self.is_torn:
            raise WorldChanged(f"{TORN}; go on with the loader's next batch: the world is formed anew there")

    def tear(self) -> None:
        """Make every later `check` fail, so that device results no longer count.

        Call this, from any thread, before any communicator is aborted.
        """
        self.is_torn = True

    def take_in(self, communicator: Communicator) -> None:
        """Add a communicator of the world. Raises WorldChanged if results in this world no longer count."""
        self.communicators.append(communicator)
        self.check()


def abort(gates: Iterable[Gate], give_up: Callable[[str], object]) -> threading.Thread | None:
    """Declare results in the gates' worlds invalid, and abort all their communicators together in a thread.

    Returns the thread; None if there are no communicators.

    give_up: called with the reason if the device stops responding.
    """
    found = list(gates)
    for gate in found:
        gate.tear()
    devices = [each.device for gate in found for each in gate.communicators]
    return start_thread(partial(_abort, found, give_up), "dynatrain-abort", devices[0]) if devices else None


def _abort(gates: list[Gate], give_up: Callable[[str], object]) -> None:
    late = f"it does not come back within {ABORT_SECONDS:g} s of a death"
    timer = threading.Timer(ABORT_SECONDS, give_up, [late])
    timer.daemon = True
    timer.start()
    try:
        with ExitStack() as held:
            for gate in gates:
                held.enter_context(gate.agreeing)
            end([each for gate in gates for each in gate.communicators], is_broken=True)
        synchronize()
    except RuntimeError as error:
        give_up(str(error).partition("\n")[0])
    finally:
        timer.cancel()


class GroupStatus:
    """State that all groups of one world share.

    is_fixed: whether the set of members never changes. torch's errors are then passed on unchanged.
    gate: the record of collectives on an accelerator.
    failure: the error of a failed collective, without its stack frames, which would keep groups alive.
    is_closed: whether the world currently accepts no collective. A world formed anew in the middle of a global batch is
        closed, because its members may have reached different statements of the script.
    is_lost: whether a member is gone, or a collective has failed on any member. No collective of a lost world may
        begin; another world follows.
    """

    def __init__(self, is_fixed: bool = False) -> None:
        self.is_fixed = is_fixed
        self.failure: RuntimeError | None = None
        self.is_closed = self.is_lost = False
        self.gate = Gate()

    @property
    def is_broken(self) -> bool:
        """Whether the world's communicators must be aborted, because some members would not help to end them."""
        return self.failure is not None or self.is_lost or self.gate.is_torn

    def call(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `call`, which runs a collective.

        Raises WorldChanged if a peer is gone, or if the world currently accepts no collective.
        """
        if self.is_closed:
            raise WorldChanged(
                "the world was formed anew: this global batch is discarded; go on with the loader's next one"
            )
        try:
            return call(*arguments)
        except RuntimeError as error:
            if self.is_fixed or isinstance(error, WorldChanged) or not is_lost_peer(error):
                raise
            self.failure = type(error)(*error.args)
            what = str(error).partition("\n")[0]
            raise WorldChanged(
                f"a member of this world is gone, or a collective of it has failed ({what}); go on with the loader's "
                "next batch: the world is formed anew there"
            ) from error


class PythonGroup(td.ProcessGroup):
    """A group that passes every collective to `collective`, whatever name torch has for it.

    All methods are overridden, because those of torch's base class hold Python's lock while a collective starts.
    """

    def __init__(self, rank: int, size: int, kind: Kind) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's constructor for Python subclasses
        self._set_default_backend(kind)

    def collective(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Run a collective: a method, with the given name, of torch's groups."""
        raise NotImplementedError


def _by_name(name: str) -> Callable[..., Any]:
    def call(self: PythonGroup, *arguments: Any, **named: Any) -> Any:
        return self.collective(name, *arguments, **named)

    call.__name__ = name
    return call


for _name in (*COLLECTIVES, "_start_coalescing", "_end_coalescing"):
    setattr(PythonGroup, _name, _by_name(_name))


class ManagedProcessGroup(PythonGroup):
    """A group of a world that wraps torch's `group`.

    It serves the CPU through gloo. Once connected, it serves an accelerator through a communicator that other groups
    may share. torch's own group takes its name from one of its back-ends, so if two groups shared a back-end, the first
    group would get the name of the second; this class keeps its own name. Messages have the same timeout as
    collectives: with gloo's default, a receiver would give up after the time allowed for connecting, but a pipeline
    stage may compute for longer.

    status: status of the world that the group serves, if members may join and leave. Failures are recorded in the
        status and raise WorldChanged.
    """

    def __init__(self, group: td.ProcessGroup, status: GroupStatus | None = None) -> None:
        super().__init__(group.rank(), group.size(), Kind.GLOO)
        self._group, self._name = group, group.group_name
        self._status = status or GroupStatus(is_fixed=True)
        for device in group._device_types:
            super()._register_backend(device, Kind.GLOO, group._get_backend(device))
        self._set_group_name(GroupName(self._name))

    @property
    def group_name(self) -> GroupName:
        """The group's own name, which does not depend on the names of its back-ends."""
        return GroupName(self._name)

    def renew(self, store: Store, device: torch.device, kind: Kind, backend: Any) -> None:
        """Replace the back-end that serves a device.

        The wrapped group is replaced as well, because torch's groups keep the first back-end of a kind.

        store: a store with a prefix that was never used before.
        """
        behind = td.ProcessGroup(store, self.rank(), self.size())
        behind._set_default_backend(Kind.GLOO)
        behind._register_backend(HOST, Kind.GLOO, self._get_backend(HOST))
        behind.bound_device_id = self.bound_device_id
        behind._register_backend(device, kind, backend)
        behind._set_group_name(GroupName(self._name))
        self._group = behind

    def collective(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Run a collective in torch's group. If the world may lose members, also watch the collective."""
        if self._status.is_fixed and name not in MESSAGES:
            return getattr(self._group, name)(*arguments, **named)
        return self._status.call(self._begin, name, arguments, named)

    def _begin(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._status.is_lost:
            raise td.DistError("a member of the world is gone, or a collective of it has failed")
        on_device = is_on_device((*arguments, *named.values()))
        if on_device:
            self._status.gate.begin()
        with self._status.gate.waiting(name):
            work = getattr(self._group, name)(*arguments, **named)
        return ManagedWork(work, self._status, name, on_device) if isinstance(work, Work) else work

    def _get_backend(self, device: torch.device) -> Any:
        return self._group._get_backend(device)

    def _register_backend(self, device: torch.device, kind: Kind, backend: Any) -> None:
        """Register a back-end for another device, both with this group and with the wrapped group."""
        self._group.bound_device_id = self.bound_device_id
        self._group._register_backend(device, kind, backend)
        super()._register_backend(device, kind, backend)


class ManagedWork(Work):
    """The work handle of a running collective, which wraps torch's own handle.

    name: name of the group's method.
    on_device: whether an accelerator runs the collective, so that a stream waits for it rather than the host.
    """

    def __init__(self, work: Work, status: GroupStatus, name: str, on_device: bool = False) -> None:
        super().__init__()
        self._work, self._status, self._name, self._on_device = work, status, name, on_device

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the collective is done.

        Raises WorldChanged if a peer is gone, and RuntimeError after the timeout.
        """
        return self._watched(self._wait, timeout)

    def synchronize(self) -> None:
        """Make the device's current stream wait for the collective."""
        self._watched(self._work.synchronize)

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._watched(self._work.result)

    def _watched(self, call: Callable[..., T], *arguments: Any) -> T:
        found: T = self._status.call(self._noted, call, *arguments)
        return found

    def _noted(self, call: Callable[..., T], *arguments: Any) -> T:
        with self._status.gate.waiting(self._name):
            found = call(*arguments)
        if self._on_device and self._status.gate.is_torn:
            raise td.DistError(TORN)
        return found

    def _wait(self, timeout: timedelta) -> bool:
        if timeout != NO_LIMIT:
            return self._work.wait(timeout)
        if self._on_device:
            return self._work.wait()
        if self._name in MESSAGES:  # wait once: a timed-out wait ends the connection
            return self._work.wait(default_pg_timeout)
        # Gloo may miss the shutdown of its sockets if it happens just as a collective begins (measured: in some of ten
        # runs of a loop of small collectives). Gloo's thread then waits until its timeout.
        while True:
            is_lost = self._status.is_lost
            try:
                return self._work.wait(LOOK)
            except RuntimeError:
                if self._work.is_completed():  # it has failed or just ended
                    return self._work.wait(LOOK)
                if is_lost:
                    raise td.DistError("a member of the world is gone, and gloo has not heard of it") from None


for _name in ("get_future", "exception", "is_completed", "is_success", "source_rank"):
    setattr(ManagedWork, _name, passing_on(_name, attrgetter("_work")))


def is_on_device(arguments: Sequence[Any]) -> bool:
    """Return whether an accelerator runs a collective, judging by the first tensor or device among its arguments."""
    for each in arguments:
        if isinstance(each, list | tuple):
            if each:
                return is_on_device(each)
            continue
        device = each if isinstance(each, torch.device) else getattr(each, "device", None)
        if isinstance(device, torch.device):
            return device.type != HOST.type
    return False
