"""Bookkeeping of collectives on an accelerator, in a world that may lose members.

Such collectives do not report failure. One whose peer has died waits for ever. One that was aborted ends as if all were
well, with arbitrary results; and a member that aborts may end a collective of others in that way, before they have
heard of a loss. So two rules hold where members come and go:

- a loss tears the gate of the world first, and then all of its communicators are aborted together, in a thread;
- results count once `agree` has returned: all ranks then had all their results before any of them aborted anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from ds_dynatrain.adapters.groups.communicators import Communicator, end
from ds_dynatrain.adapters.groups.device import start_thread, synchronize
from ds_dynatrain.errors import WorldChanged

ABORT_SECONDS = 60.0
"""Time limit for aborting communicators and waiting for the device, which is of no use to the process after that."""
TORN = "a member of this world is gone, and its communicators were aborted: what they have left is not known"


class Gate:
    """Gate of one world on one member: it tells whether results of the accelerator's collectives may be trusted.

    is_torn: whether its communicators are aborted, or are about to be. is_in_doubt: whether the last optimizer step has
    used results that no `agree` has followed. communicators: the world's present ones.
    """

    def __init__(self) -> None:
        self.is_torn = self.is_in_doubt = False
        self.communicators: list[Communicator] = []
        self.agreeing = threading.Lock()
        """Held while this member waits for the others' answers: until it has them, it aborts no communicator."""
        self._has_begun = False
        self._wait: tuple[str, float] | None = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Note that the main thread waits for other ranks inside the block; an inner block counts to the outer one."""
        is_noted = self._wait is None and threading.current_thread() is threading.main_thread()
        if is_noted:
            self._wait = what, time.monotonic()
        try:
            yield
        finally:
            if is_noted:
                self._wait = None

    def waits(self, blocked_seconds: float) -> tuple[str, float]:
        """Return what the main thread waits for in this world, and for how long. Call it from any thread.

        blocked_seconds: time for which the main thread has run no Python code. After a collective has begun on the
        device, such time is a wait for it, as in `loss.item()`.
        """
        wait = self._wait
        if wait is not None:
            return wait[0], time.monotonic() - wait[1]
        return ("a collective of the device", blocked_seconds) if self._has_begun else ("", 0.0)

    def begin(self) -> None:
        """Note that a collective begins on the device."""
        self._has_begun = True

    def agree(self, meet: Callable[[int], object]) -> None:
        """Wait for the device, and then for all ranks. Raises WorldChanged unless all report that they have their
        results.

        meet: waits for all ranks, over the host, in round 0 and in round 1; it raises if one does not come. A rank that
        is through round 1 knows that all are through round 0, so that all had their results before `agree` returned
        anywhere; during round 0 no rank aborts.
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
        """Note that an optimizer step is queued."""
        self.is_in_doubt = self._has_begun

    def check(self) -> None:
        """Raise WorldChanged if the gate is torn."""
        if self.is_torn:
            raise WorldChanged(f"{TORN}; go on with the loader's next batch: the world is formed anew there")

    def tear(self) -> None:
        """Let no result of the device count any more. Call it, from any thread, before any communicator is aborted."""
        self.is_torn = True

    def take_in(self, communicator: Communicator) -> None:
        """Add a communicator. Raises WorldChanged, and leaves it to the caller, if the gate was torn meanwhile."""
        self.communicators.append(communicator)
        self.check()


def abort(gates: Iterable[Gate], give_up: Callable[[str], object]) -> threading.Thread | None:
    """Tear gates and abort all their communicators together; return the thread that does so, or None if there are none.

    give_up: called with the reason if the device does not come back.
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
