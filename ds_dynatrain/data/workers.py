"""Worker processes of loaders: they end with the process that started them, and their random streams are chosen here.

torch's `DataLoader` draws one number, the base seed of its workers, whenever it starts to iterate. A loader that starts
over because the world changed must not draw this number from the user's random stream, which plain DeepSpeed would have
left alone.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ds_dynatrain.space.leaves import seed_of

PR_SET_PDEATHSIG = 1
"""Request number in <sys/prctl.h>: send this process a signal when the thread that started it ends."""


class SharedEnd:
    """A flag that says whether this process is ending, shared with the processes forked from it.

    At the end of the process multiprocessing sends SIGTERM to the remaining workers and waits for them.
    """

    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)
        atexit.register(self._byte.__setitem__, 0, 1)  # runs before multiprocessing's handler, registered earlier

    def heed(self, number: int, frame: object) -> None:
        """Handler of SIGTERM in a worker: exit if the parent is ending, and otherwise ignore the signal."""
        if self._byte[0]:
            os._exit(0)


@dataclass(frozen=True)
class WorkerStart:
    """The `worker_init_fn` of every loader: ties the worker's life to its parent's, and runs the user's function after
    that.

    A worker inherits the sockets of its parent. If the worker outlived a killed parent, the parent's peers would see
    its connections still open and notice the death only seconds later. Works on Linux only; on other systems torch's
    own watchdog ends the worker.

    A worker ignores SIGTERM until its parent is ending, because the parent may still need batches before it ends. The
    worker therefore has a process group of its own, because torchrun signals the parent's group, and a handler of its
    own, because Slurm sends the signal to every process.
    """

    then: Callable[[int], None] | None = None
    parent: int | None = None
    """Process id of the parent; None if the worker is started by a different process (forkserver)."""
    end: SharedEnd | None = None
    """Flag of the parent, for forked workers; other workers end when they receive SIGTERM."""

    def __call__(self, worker: int) -> None:
        """Prepare the worker process in which this is called.

        worker: the worker's number, counted from 0.
        """
        gc.freeze()  # this process must not destroy the parent's uncollected objects, above all process groups
        gc.enable()
        if sys.platform == "linux":
            os.setpgid(0, 0)
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if self.parent is not None and os.getppid() != self.parent:
                os._exit(1)  # the parent died before the line above
        if self.end is not None:
            signal.signal(signal.SIGTERM, self.end.heed)
        if self.then is not None:
            self.then(worker)


@contextmanager
def without_collection() -> Iterator[None]:
    """Context manager that switches off automatic garbage collection inside its block.

    Worker processes that are started in the block collect no garbage before `WorkerStart` has run in them. This also
    avoids a full collection during a pause, which takes 0.2 s in a large process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def like_stock() -> torch.Generator:
    """Return a generator that will draw what torch's default generator would draw next, and advance the default
    generator past that draw.

    A pass over the data therefore advances the user's random stream exactly the way a stock `DataLoader` does when it
    starts to iterate.
    """
    generator = torch.Generator(device="cpu")
    generator.set_state(torch.get_rng_state())
    torch.empty((), dtype=torch.int64, device="cpu").random_()
    return generator


def apart(*place: int) -> torch.Generator:
    """Return a generator seeded with a position in training (seed, epoch, step, ...). Leaves all other random streams
    unchanged."""
    return torch.Generator(device="cpu").manual_seed(seed_of(*place))
