"""DeepSpeed's compiled operators: built once, before any rank asks for one.

DeepSpeed compiles an operator at its first use, under a lock file that a killed process leaves behind; so the test
process has it built first, into a folder that only tests use: beside the first tests, which keep one core busy. About a
minute each on a fresh machine, nothing afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

BUILD_SECONDS = 280
FOLDER = Path(__file__).parents[1] / "build" / "torch_extensions"
BUILD = "from deepspeed.accelerator import get_accelerator as g; g().create_op_builder('{}').load(verbose=False)"


class Builds:
    """Operators that are being built, one after the other, in the background."""

    def __init__(self, builders: Iterable[str]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._futures: dict[str, Future[None]] = {}
        for builder in builders:
            self._begin(builder)

    def wait(self, builder: str) -> None:
        """Until `builder` is through; skips the test where nothing can be compiled."""
        self._begin(builder).result()

    def _begin(self, builder: str) -> Future[None]:
        if builder not in self._futures:
            self._futures[builder] = self._thread.submit(_build, builder)
        return self._futures[builder]

    def stop(self) -> None:
        """Begin no other one."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _build(builder: str) -> None:
    """Have DeepSpeed compile what `builder` (such as "CPUAdamBuilder") builds."""
    if shutil.which("c++") is None:
        pytest.skip(f"{builder}: DeepSpeed compiles it at first use, and there is no C++ compiler")
    subprocess.run(
        [sys.executable, "-c", BUILD.format(builder)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", **surroundings()},
        check=True,
        timeout=BUILD_SECONDS,
        capture_output=True,
    )


def surroundings() -> dict[str, str]:
    """Environment of processes that load an operator: where it is, and ninja, which lies beside Python."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    return {"TORCH_EXTENSIONS_DIR": str(FOLDER), "PATH": path}
