"""A rank of a warm launch: torchrun, forked where all is imported (warm.py), forks it, and it forks each scenario.

What it has forked has the environment that torchrun gave it, but for the port of the store: each scenario has a store
of its own, which the test process holds as torchrun does.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path

import deepspeed
import torch

from tests.scenarios.play import play
from tests.scenarios.row import Run

ADDRESS = "SCENARIOS_ADDRESS"
"""Names the socket at which the test process gives out scenarios."""
Task = tuple[int, Sequence[tuple[Run, Path]], Path]
"""The port of the store, the runs with their folders, and the folder for what ranks write."""


def main() -> None:
    """Serve the test process until it closes the connection."""
    end_with_parent()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at first use, for a minute
    torch.set_num_threads(1)
    gc.freeze()
    pipe = Client(os.environ[ADDRESS], "AF_UNIX")
    pipe.send(int(os.environ["RANK"]))
    while (task := received(pipe)) is not None:
        child = os.fork()
        if child == 0:
            pipe.close()
            run_forked(task)
        pipe.send(child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        import_like(task[2] / f"rank{os.environ['RANK']}.modules")
        pipe.send(code)


def import_like(names: Path) -> None:
    """Import what a scenario has imported, so that the next ones find it there."""
    for name in names.read_text().split() if names.exists() else ():
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.freeze()


def received(pipe: Connection) -> Task | None:
    """Return the next scenario, or None if the test process is gone."""
    try:
        task: Task = pipe.recv()
    except EOFError:
        return None
    return task


def run_forked(task: Task) -> None:
    """Play a scenario in this new process, write what it saw to a file, and end the process."""
    port, runs, folder = task
    end_with_parent()
    rank, code = os.environ["RANK"], 1
    output = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["MASTER_PORT"] = str(port)
    try:
        found = [play(run, into) for run, into in runs]
        (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(found))
        (folder / f"rank{rank}.modules").write_text(" ".join(list(sys.modules)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_with_parent() -> None:
    """Let this process be killed when its parent dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
