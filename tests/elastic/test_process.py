"""A worker ends with its agent, however early that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.elastic.agents import ROOT
from tests.elastic.served import SECONDS

WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from ds_dynatrain.elastic.worker_process import end_with_parent
end_with_parent(int(sys.argv[2]))
print("goes on", flush=True)
time.sleep(float(sys.argv[3]))
"""


def command(agent: int, seconds: float = 0.0) -> list[str]:
    return [sys.executable, "-c", WORKER, str(ROOT), str(agent), str(seconds)]


def goes_on(agent: int) -> bool:
    """Whether a worker of this agent, which is not its parent, begins its work."""
    done = subprocess.run(command(agent), capture_output=True, text=True)
    assert (done.returncode, done.stdout) in ((0, "goes on\n"), (1, "")), done
    return done.returncode == 0


def test_a_worker_whose_agent_died_while_it_was_importing_ends() -> None:
    with subprocess.Popen(["sleep", "60"]) as agent:
        assert goes_on(agent.pid)
        agent.kill()
        wait_until_killed(agent.pid)
        assert not goes_on(agent.pid), "nobody has waited for it, so its number is still there"
    assert not goes_on(agent.pid)


def test_a_worker_dies_with_the_process_that_started_it() -> None:
    script = f"import os, subprocess; subprocess.run({command(0, 60.0)!r}[:4] + [str(os.getpid()), '60'])"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None and agent.stdout.readline() == "goes on\n"
        worker = int(Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text())
        os.kill(agent.pid, signal.SIGKILL)
    wait_until_killed(worker)


def test_a_forked_child_does_not_end_for_its_parent() -> None:
    script = (
        "import os, sys\nfrom ds_dynatrain.elastic.worker_process import at_exit\nat_exit(print, 'good-bye')\n"
        "if os.fork() == 0:\n    sys.exit(1)\nos.wait()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "good-bye\n"


def wait_until_killed(pid: int) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")
