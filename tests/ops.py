"""DeepSpeed's compiled operators: built once, before any rank asks for one.

DeepSpeed compiles an operator at its first use, under a lock file that a killed rank would leave behind; so the test
process has it built first. Takes about a minute each on a fresh machine, nothing afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

BUILD_SECONDS = 280
BUILD = "from deepspeed.accelerator import get_accelerator as g; g().create_op_builder('{}').load(verbose=False)"


def build(builder: str) -> None:
    """Have DeepSpeed compile what `builder` (such as "CPUAdamBuilder") builds; skip the test where that cannot be."""
    if shutil.which("c++") is None:
        pytest.skip(f"{builder}: DeepSpeed compiles it at first use, and there is no C++ compiler")
    subprocess.run(
        [sys.executable, "-c", BUILD.format(builder)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PATH": path_with_ninja()},
        check=True,
        timeout=BUILD_SECONDS,
        capture_output=True,
    )


def path_with_ninja() -> str:
    """PATH for processes that load an operator: ninja lies beside Python, whose environment need not be activated."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
