"""Knowledge that a world which may lose members has of its collectives on an accelerator.

They do not say what has become of them. One whose peer has died waits for ever; one that was aborted ends as if nothing
had happened, with anything in its results; and who aborts may let a collective of others end so, too, before they have
heard of anything. So two rules hold where members come and go:

- a loss tears the gate of the world first, and then all of its communicators are aborted together, in a thread;
- results count once `agree` has returned: then all ranks had all of theirs before any of them aborted anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from ds_dynatrain.adapters.communicators import Communicator, end
from ds_dynatrain.adapters.device import start_thread, synchronize
from ds_dynatrain.errors import WorldChanged

ABORT_SECONDS = 60.0
"""So long communicators are aborted, and the device waited for; the process has no use of it after that."""
TORN = "a member of this world is gone, and its communicators were aborted: what they have left is not known"


class Gate:
    """Gate of one world on one member.

    is_torn: its communicators are aborted, or are about to be. is_in_doubt: the last optimizer step has used results
    that no `agree` has followed. communicators: that it has at present.
    """

    def __init__(self) -> None:
        self.is_torn = self.is_in_doubt = False
        self.communicators: list[Communicator] = []
        self.agreeing = threading.Lock()
        """Held by who waits for the others: until it has their answers nothing is aborted here."""
        self._has_begun = False
        self._wait: tuple[str, float] | None = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Note that the main thread waits for other ranks in the block; an inner block counts to the outer one."""
        is_noted = self._wait is None and threading.current_thread() is threading.main_thread()
        if is_noted:
            self._wait = what, time.monotonic()
        try:
            yield
        finally:
            if is_noted:
                self._wait = None

    def waits(self, blocked_seconds: float) -> tuple[str, float]:
        """Return what the main thread waits for in this world, and for how long; in any thread.

        blocked_seconds: for how long it has run no Python code. After a collective has begun on the device that is a
        wait for it, as in `loss.item()`.
        """
        wait = self._wait
        if wait is not None:
            return wait[0], time.monotonic() - wait[1]
        return ("a collective of the device", blocked_seconds) if self._has_begun else ("", 0.0)

    def begin(self) -> None:
        """A collective begins on the device."""
        self._has_begun = True

    def agree(self, meet: Callable[[int], object]) -> None:
        """Wait for the device, and then for all ranks; WorldChanged where not all can say that they have.

        meet: waits for all ranks, over the host, in round 0 and in round 1; it raises where one does not come. Who is
        through the second round knows that all are through the first, and so that all had their results before it ended
        anywhere; and in the first one nobody aborts.
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
        """An optimizer step is queued."""
        self.is_in_doubt = self._has_begun

    def check(self) -> None:
        """WorldChanged if it is torn."""
        if self.is_torn:
            raise WorldChanged(f"{TORN}; go on with the loader's next batch: the world is formed anew there")

    def tear(self) -> None:
        """Let nothing count any more that comes from the device; in any thread, before anything is aborted."""
        self.is_torn = True

    def take_in(self, communicator: Communicator) -> None:
        """One more; WorldChanged, and it is left to the caller, if the gate was torn meanwhile."""
        self.communicators.append(communicator)
        self.check()


def abort(gates: Iterable[Gate], give_up: Callable[[str], object]) -> threading.Thread | None:
    """Tear these gates, and abort all their communicators together, in the thread that is returned; None if there are
    none.

    give_up: called with the reason where the device does not come back.
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
