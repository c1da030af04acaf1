"""Bookkeeping of collectives on an accelerator, in a world that may lose members.

Such collectives do not report failure. A collective whose peer has died waits forever. An aborted collective ends as if
it had succeeded, with arbitrary results; and a member that aborts may end a collective of other members in that way,
before they know of the loss. So two rules apply where members come and go:

- after a loss, the gate of the world is torn first (no later result counts), and then all of its communicators are
  aborted together, in a thread;
- results count only after `agree` has returned: all ranks then had all their results before any of them aborted
  anything.
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
"""Time limit for aborting communicators and waiting for the device.

If a device exceeds it, the process cannot use that device any more.
"""
TORN = "a member of this world is gone, and its communicators were aborted: what they have left is not known"


class Gate:
    """One member's record of whether results of the accelerator's collectives in one world may be trusted.

    is_torn: whether the world's communicators were aborted, or are about to be.
    is_in_doubt: whether the last optimizer step used results that no `agree` has confirmed since.
    communicators: the current communicators of the world.
    """

    def __init__(self) -> None:
        self.is_torn = self.is_in_doubt = False
        self.communicators: list[Communicator] = []
        self.agreeing = threading.Lock()
        """Lock that is held while this member waits for the others' answers; it aborts no communicator meanwhile."""
        self._has_begun = False
        self._wait: tuple[str, float] | None = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Record that the main thread waits for other ranks inside the block; a nested block makes no difference."""
        is_noted = self._wait is None and threading.current_thread() is threading.main_thread()
        if is_noted:
            self._wait = what, time.monotonic()
        try:
            yield
        finally:
            if is_noted:
                self._wait = None

    def waits(self, blocked_seconds: float) -> tuple[str, float]:
        """Return what the main thread is waiting for in this world, and for how many seconds. Any thread may call it.

        blocked_seconds: time for which the main thread has run no Python code. Once a collective has begun on the
        device, such time counts as waiting for that collective, as in `loss.item()`.
        """
        wait = self._wait
        if wait is not None:
            return wait[0], time.monotonic() - wait[1]
        return ("a collective of the device", blocked_seconds) if self._has_begun else ("", 0.0)

    def begin(self) -> None:
        """Record that a collective begins on the device."""
        self._has_begun = True

    def agree(self, meet: Callable[[int], object]) -> None:
        """Wait for the device and then for all ranks. Raise WorldChanged unless all ranks have got their results.

        meet: function that waits for all ranks, over the host, in round 0 and in round 1; it raises if a rank does not
        arrive. A rank that has passed round 1 knows that all have passed round 0, so all had their results before
        `agree` returned anywhere. No rank aborts during round 0.
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
        """Record that an optimizer step is queued, with results that may be in doubt."""
        self.is_in_doubt = self._has_begun

    def check(self) -> None:
        """Raise WorldChanged if the gate is torn, so that results no longer count."""
        if self.is_torn:
            raise WorldChanged(f"{TORN}; go on with the loader's next batch: the world is formed anew there")

    def tear(self) -> None:
        """Make every later `check` fail, so that no device result counts any more.

        Call it, from any thread, before any communicator is aborted.
        """
        self.is_torn = True

    def take_in(self, communicator: Communicator) -> None:
        """Add a communicator of the world. Raises WorldChanged if the gate was torn meanwhile."""
        self.communicators.append(communicator)
        self.check()


def abort(gates: Iterable[Gate], give_up: Callable[[str], object]) -> threading.Thread | None:
    """Tear gates and abort all their communicators together, in a thread that is returned; None without communicators.

    give_up: function that is called with the reason if the device does not respond again.
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
