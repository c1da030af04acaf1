"""Watcher: a process that removes the limit on a device's clock after its member has ended, even by SIGKILL.

It runs in a session of its own, so that torchrun's signals to the member's session do not end it. Started as `python -m
ds_dynatrain.clocks.watcher`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

from ds_dynatrain.clocks.actuator import made


def start(actuator: str, device: int) -> subprocess.Popen[bytes]:
    """Start a watcher, which removes the limit on the device's clock after this process has ended.

    actuator: the name of the actuator in the configuration.
    device: the number of this process's device.
    """
    command = [sys.executable, "-m", __name__, str(os.getpid()), actuator, str(device)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # it finds the same actuator
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=variables, start_new_session=True)


def main() -> None:
    """Wait until the process that started this one has ended, and remove the limit on its device's clock."""
    member, actuator = int(sys.argv[1]), made(sys.argv[2], int(sys.argv[3]))
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(ProcessLookupError):  # it has ended already
        ended = os.pidfd_open(member)
        if os.getppid() == member:  # otherwise another process has its number now
            select.select([ended], [], [])
    actuator.give_back()


if __name__ == "__main__":
    main()
