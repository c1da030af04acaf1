"""Rank processes that live as long as the test session and run cases as functions.

`RankPool.run(function, **arguments)` calls a module-level function on every rank and returns what each returned. The
ranks form one gloo group at the start, the launch group, in which every case begins and must end. A case that fails,
hangs or kills a rank fails alone: the ranks are started anew for the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SLOW = {"transformers": "transformers.models.mixtral.modeling_mixtral"}
"""What ranks would import, a second each: before they are forked, if a test of this session has the first."""
PORTS = 20_000, 32_000
START_SECONDS = 120.0
CASE_SECONDS = 60.0
GRACE_SECONDS = 3.0
"""How long the other ranks may go on after the first one has failed: their own messages are worth having."""
LOG_CHARACTERS = 4000
MOST_THREADS = 150
"""Ranks with more threads start anew: stock DeepSpeed never lets go of its groups, and each of gloo's has three."""


@dataclass(frozen=True)
class Died:
    """In place of the result of a rank that was allowed to die: its exit code (-9 for SIGKILL)."""

    code: int


class CaseFailed(AssertionError):  # noqa: N818
    """A case did not end well on some rank; the message holds the trace of each one."""


@dataclass
class Rank:
    """One process, the pipe to it, and the file with all that it printed."""

    process: int
    pipe: Connection
    log: Path

    def threads(self) -> int:
        """Number of its threads, those of gloo too; 0 once it has ended."""
        try:
            return len(os.listdir(f"/proc/{self.process}/task"))
        except FileNotFoundError:
            return 0

    def tail(self, since: int) -> str:
        """What it printed from position `since` of its log, the last part."""
        with self.log.open("rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")[-LOG_CHARACTERS:]


def free_port() -> int:
    """One that nobody listens at, and that no connection is given: the system gives those from 32768 on."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


class Nursery:
    """The process that has imported everything and forks ranks; see rank_process.py.

    module: what it runs, `rank_process.py` or another one that ends in it. imports: what ranks would import, each.
    """

    def __init__(self, log: Path, accelerator: str, module: str, imports: Sequence[str]) -> None:
        slow = [*(models for name, models in SLOW.items() if name in sys.modules), *imports]
        names = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": accelerator, "PYTHONWARNINGS": "ignore"}
        names |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONFAULTHANDLER": "1"}
        names |= {"MKL_CBWR": "COMPATIBLE"}  # what exact jobs ask for
        self._control, there = socket.socketpair()
        with there, log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(there.fileno()), *slow],
                cwd=ROOT,
                env={**os.environ, **names},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def start(self, port: int, logs: Sequence[Path]) -> list[Rank]:
        """One rank per log, joining each other at `port`."""
        pairs = [socket.socketpair() for _ in logs]
        request = json.dumps({"port": port, "logs": [str(log) for log in logs]}).encode()
        socket.send_fds(self._control, [request], [there.fileno() for _, there in pairs])
        children = self._answer()
        for _, there in pairs:
            there.close()
        return [
            Rank(child, Connection(here.detach()), log)
            for child, (here, _), log in zip(children, pairs, logs, strict=True)
        ]

    def reap(self, process: int) -> int:
        """The exit code of a rank that has died or is about to."""
        self._control.sendall(json.dumps({"reap": process}).encode())
        return int(self._answer())

    def stop(self) -> None:
        """End it; ranks that are left die with it."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        self._control.settimeout(START_SECONDS)
        answer = self._control.recv(1 << 16)
        if not answer:
            raise RuntimeError(f"the process that forks ranks has ended with code {self._process.wait()}")
        return json.loads(answer)


@dataclass
class RankPool:
    """`size` ranks, started at the first `run`.

    beside: another pool, whose process forks these ranks, too; it is stopped after this one.
    """

    size: int
    folder: Path
    accelerator: str = "cpu"
    module: str = "tests.engine.rank_process"
    imports: Sequence[str] = ()
    beside: RankPool | None = None
    ranks: list[Rank] = field(default_factory=list)
    nursery: Nursery | None = None
    starts: int = 0
    reaped: dict[int, int] = field(default_factory=dict)
    first_failed: int | None = None
    kept: dict[bytes, bytes] = field(default_factory=dict)
    """What `once` has run, by its arguments."""

    def run(
        self,
        function: Callable[..., Any],
        *,
        seconds: float = CASE_SECONDS,
        may_die: Iterable[int] = (),
        **arguments: Any,
    ) -> list[Any]:
        """`function(**arguments)` on all ranks at once; their results in the order of ranks.

        Arguments and results are pickled. `SystemExit(0)` is a normal end with the result None. may_die: ranks that the
        case kills; `Died` stands in place of their result. CaseFailed with every rank's trace if one raises, dies
        or takes longer than `seconds`.
        """
        self._start_if_needed()
        mortal = frozenset(may_die)
        call = (function.__module__, function.__qualname__, arguments, not mortal)
        places = [rank.log.stat().st_size for rank in self.ranks]
        answers = self._ask(call, seconds, mortal)
        failed = any(isinstance(answer, str) for answer in answers)
        logs = [rank.tail(place) for rank, place in zip(self.ranks, places, strict=True)] if failed else []
        if failed or mortal or max(rank.threads() for rank in self.ranks) > MOST_THREADS:
            self._end_ranks()
        if failed:
            title = f"{function.__qualname__}: rank {self.first_failed} failed first"
            raise CaseFailed(_report(title, arguments, answers, logs))
        return [answer if isinstance(answer, Died) else answer[0] for answer in answers]

    def once(
        self,
        function: Callable[..., Any],
        *,
        seconds: float = CASE_SECONDS,
        following: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """What `run` gives, made only at the first call with these arguments: for runs that others are held against.

        following: further arguments, which follow from those. Each call gets a copy of its own.
        """
        key = pickle.dumps((function.__module__, function.__qualname__, arguments))
        if key not in self.kept:
            self.kept[key] = pickle.dumps(self.run(function, seconds=seconds, **arguments, **(following or {})))
        results: list[Any] = pickle.loads(self.kept[key])
        return results

    def renew(self) -> None:
        """End the ranks: the next case gets new ones."""
        self._end_ranks()

    def stop(self) -> None:
        """End all ranks and the process that forks them."""
        self._end_ranks()
        if self.nursery is not None and self.beside is None:
            self.nursery.stop()
        self.nursery = None

    def _end_ranks(self) -> None:
        for rank in self.ranks:
            rank.pipe.close()
            if rank.process not in self.reaped:
                os.kill(rank.process, signal.SIGKILL)
                self._reap(rank)
        self.ranks, self.reaped = [], {}

    def _reap(self, rank: Rank) -> int:
        if rank.process not in self.reaped and self.nursery is not None:
            self.reaped[rank.process] = self.nursery.reap(rank.process)
        return self.reaped[rank.process]

    def started(self) -> Nursery:
        """The process that forks its ranks."""
        if self.beside is not None:
            return self.beside.started()
        if self.nursery is None:
            self.nursery = Nursery(self.folder / "nursery.log", self.accelerator, self.module, self.imports)
        return self.nursery

    def _start_if_needed(self) -> None:
        if self.ranks:
            return
        self.nursery = self.started()
        port = free_port()
        self.starts += 1
        files = [self.folder / f"{self.starts}_{rank}.log" for rank in range(self.size)]
        try:
            self.ranks = self.nursery.start(port, files)
        except TimeoutError:  # its answer would be taken for that to the next request
            (self.beside or self).stop()
            raise
        failed = [answer for answer in self._collect(START_SECONDS, frozenset()) if isinstance(answer, str)]
        if failed:
            logs = [rank.tail(0) for rank in self.ranks]
            self._end_ranks()
            raise CaseFailed(_report("start of the ranks", {}, failed, logs))

    def _ask(self, call: tuple[Any, ...], seconds: float, mortal: frozenset[int]) -> list[Any]:
        for rank in self.ranks:
            rank.pipe.send_bytes(pickle.dumps(call))
        return self._collect(seconds, mortal)

    def _collect(self, seconds: float, mortal: frozenset[int]) -> list[Any]:
        """Per rank a 1-tuple with its result, a string that says what went wrong, or `Died`."""
        answers: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while len(answers) < self.size:
            open_ends = {rank.pipe: number for number, rank in enumerate(self.ranks) if number not in answers}
            ready = wait(list(open_ends), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                number = open_ends[pipe]  # type: ignore[index]
                answers[number] = self._receive(number, number in mortal)
                if isinstance(answers[number], str):
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        self.first_failed = next((number for number, answer in answers.items() if isinstance(answer, str)), None)
        for number in range(self.size):
            answers.setdefault(number, "no answer in time; it is killed")
        return [answers[number] for number in range(self.size)]

    def _receive(self, number: int, mortal: bool) -> Any:
        rank = self.ranks[number]
        try:
            return pickle.loads(rank.pipe.recv_bytes())
        except (EOFError, OSError):
            code = self._reap(rank)
            return Died(code) if mortal else f"died with exit code {code}"


def _report(name: str, arguments: dict[str, Any], answers: Sequence[Any], logs: Sequence[str]) -> str:
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    parts = [f"{name}({given[:300]})"]
    for number, answer in enumerate(answers):
        parts.append(f"---- rank {number}: {answer.rstrip() if isinstance(answer, str) else 'ended well'}")
    for number, log in enumerate(logs):
        if log.strip():
            parts.append(f"---- printed by rank {number}:\n{log.rstrip()}")
    return "\n".join(parts)
