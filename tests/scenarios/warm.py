"""Processes of a launch that are forked where everything is imported already: each takes seconds less than a new one.

`start` runs `torchrun` or `ds-dynatrain`. Agents of torchrun fork their workers in the same way. All else is as in new
processes: arguments, environment, files, signals, exit codes.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1
READ_ONCE = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "MKL_CBWR": "COMPATIBLE", "PYTHONPATH": str(ROOT)}
READ_ONCE |= {"HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables that libraries read when they are imported."""


@functools.cache
def forking() -> ForkServerContext:
    """Begin the process that forks; it imports everything before it forks for the first time."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.scenarios.preloaded"])
    with mock.patch.dict(os.environ, READ_ONCE):
        forkserver.ensure_running()
    return context


def start(command: Sequence[str], env: Mapping[str, str], log: Path) -> BaseProcess:
    """Run `torchrun` or `ds-dynatrain` with these arguments, and append what it prints to `log`."""
    given = (list(command), {**os.environ, **READ_ONCE, **env}, str(log))
    process = forking().Process(target=become, args=given)
    process.start()
    return process


def become(command: list[str], env: dict[str, str], log: str) -> None:
    """Turn this process, which was just forked, into that command."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.set_start_method(None, force=True)  # its own processes begin as those of any other
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(file, output)
    sys.argv = command
    (main,) = {each.load() for each in entry_points(group="console_scripts", name=command[0])}
    with mock.patch("torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler._popen", popen):
        ended(main)


def ended(main: Callable[[], object]) -> None:
    """Call it, and end as Python does: first threads, then what `atexit` was told."""
    gc.freeze()  # sockets of the process before are not to be closed once more
    try:
        main()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def popen(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> Worker:
    """Start a worker of torchrun's: called as a method of its `SubprocessHandler`."""
    return Worker([each for each in args[1:] if each != "-u"], env)


class Worker:
    """A forked worker of an agent, with what torchrun asks of a `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        self.args, self.returncode = args, None
        self.pid = os.fork()
        if not self.pid:
            self._run(env)

    returncode: int | None

    def poll(self) -> int | None:
        """Return its exit code if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code once it has ended; raise TimeoutExpired after so many seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(0.01)
        return code

    def _run(self, env: Mapping[str, str]) -> None:
        """Run the script in the forked process, and end it."""
        code: object = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            os.environ.clear()
            os.environ.update(env)
            sys.argv, sys.path[0] = list(self.args), str(Path(self.args[0]).parent)
            ended(lambda: runpy.run_path(self.args[0], run_name="__main__"))
            code = 0
        except SystemExit as end:
            code = end.code or 0
            if not isinstance(code, int):
                print(code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
