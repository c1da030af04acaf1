"""A clock is given back however its member ends; the actuator here is a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.pool import ROOT

ACTUATOR = '''
"""A clock in a file."""

from pathlib import Path

from ds_dynatrain.clocks.actuator import Actuator

CLOCK = Path(__file__).with_name("clock")


class Filed(Actuator):
    clocks = (100, 200)

    def set(self, clock):
        CLOCK.write_text(str(clock))

    def give_back(self):
        CLOCK.unlink(missing_ok=True)
'''
MEMBER = """
import sys, time
from ds_dynatrain.clocks import watcher
from filed import Filed

watching = watcher.start("filed:Filed", 0)
Filed(0).set(100)
print(watching.pid, flush=True)
if sys.argv[1] != "stays":
    sys.exit(int(sys.argv[1]))
time.sleep(60)
"""
SECONDS = 20.0
"""A busy machine takes a while to start an interpreter."""


def gone(process: int) -> bool:
    """Whether a process has ended; a container may leave it a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("end", ["0", "3", "SIGTERM", "SIGKILL", "SIGKILL of its session"])
@pytest.mark.parametrize("is_up", [True, False], ids=["later", "at once"])
def test_a_clock_is_given_back(tmp_path: Path, end: str, is_up: bool) -> None:
    """is_up: the watcher has had time to start before the member ends."""
    (tmp_path / "filed.py").write_text(ACTUATOR)
    (tmp_path / "member.py").write_text(MEMBER)
    command = [sys.executable, "member.py", end if end.isdigit() else "stays"]
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    given = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": paths}, "start_new_session": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **given) as member:  # type: ignore[call-overload]
        watching, clock = int(member.stdout.readline()), tmp_path / "clock"
        if not end.isdigit():
            assert clock.exists()
            time.sleep(1.0 if is_up else 0.0)
            assert clock.exists() and not gone(watching)
            send = os.killpg if "session" in end else os.kill
            send(member.pid, signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL)
        member.wait()
    deadline = time.monotonic() + SECONDS
    while (clock.exists() or not gone(watching)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not clock.exists() and gone(watching)
