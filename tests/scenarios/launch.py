"""Four ranks that torchrun has started once, and that play one scenario after the other."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.scenarios import warm
from tests.scenarios.actions import Seen
from tests.scenarios.row import Run
from tests.scenarios.worker import ADDRESS

RANKS = 4
START_SECONDS = 180.0
RUN_SECONDS = 40.0
LOG_CHARACTERS = 4000


class LaunchFailed(AssertionError):  # noqa: N818
    """A rank did not come to the end of a scenario; the message has what each of them printed."""


class WarmRanks:
    """`torchrun --standalone` of `worker.py`, started at the first scenario."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.played = folder, 0
        self._torchrun: BaseProcess | None = None
        self._pipes: list[Connection] = []

    def play(self, runs: Sequence[Run], folders: Sequence[Path]) -> list[list[Seen]]:
        """Play runs one after the other on all ranks; what each rank saw, run by run."""
        if self._torchrun is None:
            self._start()
        self.played += 1
        folder = self.folder / f"played{self.played}"
        folder.mkdir()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in self._pipes:
            pipe.send((store.port, list(zip(runs, folders, strict=True)), folder))
        children = [pipe.recv() for pipe in self._pipes]
        codes = self._codes(children, RUN_SECONDS * len(runs))
        if any(codes):
            logs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(RANKS)]
            parts = [
                f"---- rank {rank}, exit code {codes[rank]}:\n{log[-LOG_CHARACTERS:]}" for rank, log in enumerate(logs)
            ]
            raise LaunchFailed("\n".join(parts))
        ranks = [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(RANKS)]
        return [list(each) for each in zip(*ranks, strict=True)]

    def stop(self) -> None:
        """End torchrun and its workers."""
        for pipe in self._pipes:
            pipe.close()
        if self._torchrun is not None:
            self._torchrun.kill()  # its workers end with it
            self._torchrun.join()

    def _start(self) -> None:
        address, log = str(self.folder / "socket"), self.folder / "torchrun.log"
        command = ["torchrun", "--standalone", f"--nproc-per-node={RANKS}"]
        command.append(str(Path(__file__).with_name("worker.py")))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(RANKS)
            listener.settimeout(START_SECONDS)
            self._torchrun = warm.start(command, {ADDRESS: address}, log)
            found = [Connection(listener.accept()[0].detach()) for _ in range(RANKS)]
        self._pipes = [pipe for _, pipe in sorted(((pipe.recv(), pipe) for pipe in found), key=lambda pair: pair[0])]

    def _codes(self, children: Sequence[int], seconds: float) -> list[int]:
        """Return the exit codes of the processes that play; those that take too long are killed."""
        codes: dict[Any, int] = {}
        end = time.monotonic() + seconds
        while len(codes) < RANKS:
            left = [pipe for pipe in self._pipes if pipe not in codes]
            ready: list[Any] = wait(left, max(0.1, end - time.monotonic()))
            if not ready:
                for pipe, child in zip(self._pipes, children, strict=True):
                    if pipe not in codes:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(child, signal.SIGABRT)
                end = time.monotonic() + 5
            for each in ready:
                codes[each] = each.recv()
                if codes[each]:
                    end = min(end, time.monotonic() + 5)
        return [codes[pipe] for pipe in self._pipes]
