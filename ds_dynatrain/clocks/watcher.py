"""The process that gives a clock back once its member has ended, whichever way: python -m ds_dynatrain.clocks.watcher.

A process that is killed can give nothing back itself. Its watcher waits for its end, in a session of its own, so that
torchrun's signals to the member's session do not end the watcher, too.
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
    """Start the watcher of this process.

    actuator: the name of the actuator in the configuration.
    device: the number of this process's device.
    """
    command = [sys.executable, "-m", __name__, str(os.getpid()), actuator, str(device)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # it finds the same actuator
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=variables, start_new_session=True)


def main() -> None:
    """Wait for the end of the process that started this one, and give the clock of its device back."""
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
