"""Python processes that have imported torch and DeepSpeed when they start: each takes four processor seconds less.

`python -m tests.elastic.warm FD` imports once, and forks what a test would start with `python -m MODULE`. Torchrun's
agents among these fork their workers, which would be `python SCRIPT`, in the same way. All else is as in new processes:
arguments, environment, files, signals, what happens at the end. But a worker's frames stand on those of its agent, and
so `test_main_thread.py` has new processes, as `test_training.py` has for the sake of what torchrun itself does.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tools.nodes import ROOT, Job

START_SECONDS = 120.0
REQUEST_BYTES = 1 << 20


# ---- in the test process ---------------------------------------------------------------------------------------------


class Warm:
    """A process that was forked, with what tests ask of a `subprocess.Popen`."""

    def __init__(self, pid: int, reap: Callable[[int], int]) -> None:
        self.pid, self._reap, self.returncode = pid, reap, None
        self._watched = os.pidfd_open(pid)

    returncode: int | None

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None and select.select([self._watched], [], [], 0)[0]:
            os.close(self._watched)
            self.returncode = self._reap(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; TimeoutExpired after so many seconds."""
        if self.returncode is None and not select.select([self._watched], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that has imported everything; it ends with this one."""

    def __init__(self) -> None:
        self._control, there = socket.socketpair()
        names = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        names |= {"MKL_CBWR": "COMPATIBLE"}  # what exact jobs ask for; it is read once
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.elastic.warm", str(there.fileno())],
                cwd=ROOT,
                env={**os.environ, **names},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._control.settimeout(START_SECONDS)

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, *files: int) -> Warm:
        """`python -m` this; files: a descriptor for all that it prints, or one for each of its two outputs."""
        request = {"command": list(command), "env": dict(env), "cwd": str(cwd)}
        return Warm(self._ask(request, files), lambda pid: self._ask({"reap": pid}))

    def fileno(self) -> int:
        """The descriptor over which it is asked; a process that has it may ask, too (forked_torchrun.py)."""
        return self._control.fileno()

    def _ask(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> int:
        socket.send_fds(self._control, [json.dumps(request).encode() + b"\n"], files)
        answer = self._control.recv(64)
        if not answer:
            raise RuntimeError(f"the process that forks others has ended{self._code()}")
        return int(answer)

    def _code(self) -> str:
        return f" with code {self._process.wait()}"


class Lent(Nursery):
    """The one of the process that has handed its descriptor on."""

    def __init__(self, descriptor: int) -> None:
        self._control = socket.socket(fileno=descriptor)
        self._control.settimeout(START_SECONDS)

    def _code(self) -> str:
        return ""


@functools.cache
def nursery() -> Nursery:
    """The one of this session."""
    return Nursery()


def torchrun(words: Sequence[str], seconds: float, is_warm: bool = True) -> tuple[int, str]:
    """A launch of torchrun's on this machine: its exit code, and all that was printed. TimeoutError with that, too.

    is_warm: its processes are forked; else they are new ones.
    """
    command = ["torch.distributed.run", "--standalone", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as log:
        process = nursery().start(command, env, ROOT, log.fileno()) if is_warm else _new(command, env, log)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()  # it ends its workers
            process.wait()
        log.seek(0)
        printed = log.read().decode(errors="replace")
    if code is None:
        raise TimeoutError(f"{' '.join(words)}: no end within {seconds:g} s\n{printed[-6000:]}")
    return code, printed


def _new(command: Sequence[str], env: Mapping[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *command], env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )


class WarmJob(Job):
    """Whose agents, coordinators and workers are forked, but those on other hosts."""

    def _open(self, command: Any, host: Any, env: Any, log: Any) -> Any:
        if host:
            return super()._open(command, host, env, log)
        return nursery().start(command, env, self.folder, log.fileno())


# ---- in the process that forks, and in those that are forked ---------------------------------------------------------


def serve(control: socket.socket) -> None:
    """Until the test process closes the socket."""
    while True:
        data, files, _, _ = socket.recv_fds(control, REQUEST_BYTES, 2)
        while data and not data.endswith(b"\n"):
            data += control.recv(REQUEST_BYTES)
        if not data:
            return
        request = json.loads(data)
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        elif not (answer := os.fork()):
            become(request["command"], request["env"], request["cwd"], (files[0], files[-1]), is_module=True)
        for file in files:
            os.close(file)
        control.sendall(str(answer).encode())


class Forked:
    """A worker of an agent, with what torchrun asks of a `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], output: Sequence[int | None]) -> None:
        self.args, self.returncode = args, None
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            become([each for each in args[1:] if each != "-u"], env, os.getcwd(), output)

    returncode: int | None

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; TimeoutExpired after so many seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(0.01)
        return code


def become(
    command: Sequence[str], env: Mapping[str, str], cwd: str, output: Sequence[int | None], is_module: bool = False
) -> None:
    """In a process that was just forked: run it as Python would in a new one, and end. output: None as it is."""
    code = 1
    try:
        _as_new(env, cwd, output)
        try:
            code = _run(command, is_module)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _as_new(env: Mapping[str, str], cwd: str, output: Sequence[int | None]) -> None:
    """Files, signals and variables that a new process has."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, file in enumerate(output, start=1):
        if file is not None:
            os.dup2(file, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    gc.freeze()  # what the process before had open is not to be closed once more
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    _end_with_parent(0)


def _run(command: Sequence[str], is_module: bool) -> int:
    """The exit code."""
    sys.argv = list(command)
    if command[0] == "-m":
        sys.argv, is_module = sys.argv[1:], True
    script = sys.argv[0]
    sys.path[0] = os.getcwd() if is_module else str(Path(script).parent)
    for place in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(1, place)
    sys.modules.pop(script, None)
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _end_with_parent(number: int = signal.SIGKILL) -> None:
    """The signal that comes when the parent dies; 0: none."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, number)


def _warm_up() -> None:
    """Import what agents, coordinators and workers do; from now on agents fork their workers."""
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    import torch.distributed.run  # noqa: F401
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    import ds_dynatrain.checkpoint.arrow
    import ds_dynatrain.cli.main
    import ds_dynatrain.elastic.handler
    import ds_dynatrain.engine.initialize  # noqa: F401

    if importlib.util.find_spec("transformers") is not None:
        import tests.integrations.trainers  # noqa: F401

    def popen(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> Forked:
        files = (handler._stdout, handler._stderr)
        return Forked(args, env, [None if file is None else file.fileno() for file in files])

    subprocess_handler.SubprocessHandler._popen = popen
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _end_with_parent()
    _warm_up()
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve(listening)
