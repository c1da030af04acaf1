"""Bookkeeping of collectives on an accelerator, in a world that may lose members.

Such collectives do not report failure. A collective whose peer has died waits forever. An aborted collective ends as if
it had succeeded, but with arbitrary results, and a member that aborts its collectives may in this way end those of
other members that do not yet know of the loss. Two rules therefore apply if members may leave:

- after a loss, the world's gate is torn first (no later result counts); then all communicators of the world are aborted
  together, in a thread;
- results count only after `agree` has returned, which means that all ranks had all their results before any of them
  aborted anything.
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
"""Time limit, in seconds, for aborting communicators and waiting for the device.

If a device exceeds the limit, the process can no longer use that device.
"""
TORN = "a member of this world is gone, and its communicators were aborted: what they have left is not known"


class Gate:
    """One member's record of whether results of the accelerator's collectives in one world may be trusted.

    is_torn: whether the world's communicators were aborted, or are about to be.
    is_in_doubt: whether the last optimizer step used results that no `agree` has since confirmed.
    communicators: the current communicators of the world.
    """

    def __init__(self) -> None:
        self.is_torn = self.is_in_doubt = False
        self.communicators: list[Communicator] = []
        self.agreeing = threading.Lock()
        """Lock that is held while this member waits for the other members' answers, and during which it aborts nothing.
        """
        self._has_begun = False
        self._wait: tuple[str, float] | None = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Context manager that records that the main thread waits for other ranks.

        Nested blocks record nothing more.
        """
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
        """Record that a collective begins on the device."""
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
        """Record that an optimizer step has been queued whose inputs may be in doubt."""
        self.is_in_doubt = self._has_begun

    def check(self) -> None:
        """Raise WorldChanged if the gate is torn, because results then no longer count."""
        if self.is_torn:
            raise WorldChanged(f"{TORN}; go on with the loader's next batch: the world is formed anew there")

    def tear(self) -> None:
        """Make every later `check` fail, so that device results no longer count.

        Call this, from any thread, before any communicator is aborted.
        """
        self.is_torn = True

    def take_in(self, communicator: Communicator) -> None:
        """Add a communicator of the world. Raises WorldChanged if the gate has been torn in the meantime."""
        self.communicators.append(communicator)
        self.check()


def abort(gates: Iterable[Gate], give_up: Callable[[str], object]) -> threading.Thread | None:
    """Tear the gates, and abort all their communicators together in a thread.

    Return the thread; None if there are none.

    give_up: function called with the reason if the device does not respond again.
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
