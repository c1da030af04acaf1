"""DeepSpeed's compiled operators, and the test device: built once, before any rank asks for one.

DeepSpeed compiles an operator at its first use, under a lock file that a killed process leaves behind; so the test
process has it built first, into a folder that only tests with this torch and this DeepSpeed use: beside the first
tests, which keep one core busy. About a minute each on a fresh machine, nothing afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from threading import Timer

import pytest

BUILD_SECONDS = 280
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "torch_extensions" / "-".join(map(metadata.version, ("torch", "deepspeed")))
COMPILER = ROOT / "tests" / "compile.sh"
BUILT = "built"
BUILD = f"""
import sys
from deepspeed.accelerator import get_accelerator
from tests.device import lab
for builder in map(str.strip, sys.stdin):
    if builder == lab.NAME:
        lab.build()
    else:
        get_accelerator().create_op_builder(builder).load(verbose=False)
    print("{BUILT}", flush=True)
"""


class Builds:
    """Operators that are being built in the background, one after the other, in one process that knows DeepSpeed."""

    def __init__(self, builders: Iterable[str]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._futures: dict[str, Future[None]] = {}
        self._process: subprocess.Popen[str] | None = None
        for builder in builders:
            self._begin(builder)

    def wait(self, builder: str) -> None:
        """Until `builder` is through; skips the test where nothing can be compiled."""
        self._begin(builder).result()

    def stop(self) -> None:
        """Begin no other one."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, builder: str) -> Future[None]:
        if builder not in self._futures:
            self._futures[builder] = self._thread.submit(self._build, builder)
        return self._futures[builder]

    def _build(self, builder: str) -> None:
        """Have DeepSpeed compile what `builder` (such as "CPUAdamBuilder") builds, or the test device."""
        if shutil.which("c++") is None:
            pytest.skip(f"{builder}: it is compiled at first use, and there is no C++ compiler")
        if self._process is None:
            _remove_old_locks()
            self._process = _builder_process()
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None and answers is not None
        limit = Timer(BUILD_SECONDS, self._process.kill)
        limit.start()
        said = []
        try:
            print(builder, file=orders, flush=True)
            for line in answers:
                if line.strip() == BUILT:
                    return
                said.append(line)
        finally:
            limit.cancel()
        self._process = None
        raise RuntimeError(f"{builder} was not built:\n{''.join(said)[-4000:]}")


def _remove_old_locks() -> None:
    """Those of processes that were killed: nobody holds one for so long."""
    for lock in FOLDER.glob("*/lock"):
        if time.time() - lock.stat().st_mtime > BUILD_SECONDS:
            lock.unlink(missing_ok=True)


def _builder_process() -> subprocess.Popen[str]:
    """It ends with its standard input."""
    return subprocess.Popen(
        [sys.executable, "-c", BUILD],
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def surroundings() -> dict[str, str]:
    """Environment of all processes that may load an operator: where it is, ninja, which lies beside Python, and the
    compiler, as by another one it would be compiled anew.
    """
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    return {"TORCH_EXTENSIONS_DIR": str(FOLDER), "PATH": path, "CXX": str(COMPILER)}
