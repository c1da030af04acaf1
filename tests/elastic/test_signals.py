"""Several in one process that watch for SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.elastic.agents import ROOT

SCRIPT = """
import signal
from ds_dynatrain.elastic.worker_process import Termination
pair = Termination(), Termination()
for each in pair:
    each.watch()
signal.raise_signal(signal.SIGTERM)
assert [each.read() for each in pair] == [True, True]
for place in {order}:
    pair[place].stop()
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_sigterm_ends_the_process_again_whoever_stops_first(order: tuple[int, int]) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(order=order)], cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == -signal.SIGTERM
