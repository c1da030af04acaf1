"""The coordinator's process stands still for a while: training does not, and no checkpoint holds it up. Real agents."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_dynatrain.checkpoint.folder import tags
from ds_dynatrain.fallback.extension import AGAIN_SECONDS, ANSWER_SECONDS
from tests.elastic.agents import Job
from tests.elastic.runs import Static, check_history, finish, steps_on

pytestmark = pytest.mark.full

HUNG_SECONDS = 12.0


def test_saves_are_put_off(train: Callable[..., Job], static: Static, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    job = train(nodes="1:2", block={"fallback": {"path": str(kept), "every_steps": 5, "every_seconds": 2.0}})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    job.node("b", is_host=0)
    job.settled(2)
    steps_on(job, 12)  # and through an epoch: where the first one in a world begins, members ask the board
    job.kill("coordinator", signal.SIGSTOP)
    steps_on(job, 1)
    end, longest, last, made = time.monotonic() + HUNG_SECONDS, 0.0, time.monotonic(), len(job.rows("step"))
    while time.monotonic() < end:
        if len(job.rows("step")) > made:
            longest, last, made = max(longest, time.monotonic() - last), time.monotonic(), len(job.rows("step"))
        time.sleep(0.05)
    job.kill("coordinator", signal.SIGCONT)
    assert max(longest, end - last) < 2 * ANSWER_SECONDS + 3.0, "how long a step took at most"
    assert "the board has not answered a member for 2 s; it is put off" in job.logs()
    before = tags(kept)
    job.wait(lambda: set(tags(kept)) - set(before), "the next checkpoint", AGAIN_SECONDS + 30.0)
    finish(job, "a", "b")
    check_history(job, static)
