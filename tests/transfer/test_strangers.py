"""Connections of processes that are no members hold no meeting of neighbors up: they are sent away unheard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore

from ds_dynatrain.transfer import Neighbors
from tests.transfer.meeting import SECONDS, Share, shared

ROOT = Path(__file__).parents[2]
USERS = (os.geteuid(), *([65534] if os.geteuid() == 0 else []))
"""This user, and another one where this process may act as it."""
COUNT = 4
SILENT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
links = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(int(sys.argv[3]))]
for link in links:
    link.connect(bytes.fromhex(sys.argv[1]))
print("connected", flush=True)
sys.stdin.read()
"""


@contextmanager
def strangers(name: str, user: int) -> Iterator[None]:
    """So many silent connections to a listener."""
    command = [sys.executable, "-c", SILENT, name, str(user), str(COUNT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "connected\n"
        yield
        process.stdin.close()


def test_silent_strangers_hold_nobody_up(tmp_path: Path) -> None:
    names = [f"user-{user}" for user in USERS]
    command = [sys.executable, "-m", "tests.transfer.meeting", str(tmp_path / "store"), *names]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        for name, user in zip(names, USERS, strict=True):
            share = shared(PrefixStore(name, FileStore(str(tmp_path / "store"), 2)), 0)
            with ExitStack() as there:

                def late(
                    what: str, record: Any, share: Share = share, user: int = user, there: ExitStack = there
                ) -> dict[int, Any]:
                    """The strangers connect before member 0 does."""
                    found = share(what, record)
                    if what == "cards":
                        there.enter_context(strangers(found[1]["socket"], user))
                    return found

                near = Neighbors.meet(0, late, SECONDS)
                assert near.members == {1}
                near.close()
                seen = json.loads(other.stdout.readline())
                assert seen["members"] == [0] and seen["seconds"] < SECONDS / 2
    assert other.returncode == 0
