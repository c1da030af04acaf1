"""A main thread that stands still: how a process sees it of itself, and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_dynatrain.checkpoint.folder import latest
from tests.elastic.agents import ROOT, Job
from tests.elastic.driver import running
from tests.elastic.runs import Static, check_history, finish, processes, steps_on, worker

WATCHED = """
import threading, time
from ds_dynatrain.elastic.main_thread import OWN_WAITS, MainThread
watched, most, end = MainThread(), 0.0, threading.Event()
def look():
    global most
    while not end.wait(0.05):
        most = max(most, watched.blocked_seconds())
threading.Thread(target=look).start()
def busy():
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        pass
def blocked():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=1.5)
def saving():
    with OWN_WAITS.waiting("saving"):
        assert str(OWN_WAITS) == "saving, 0 s"
        blocked()
    assert not str(OWN_WAITS)
waiting = {"__name__": "torch.distributed.distributed_c10d", "blocked": blocked}
exec("def wait(): blocked()", waiting)
{"busy": busy, "blocked": blocked, "wait": waiting["wait"], "saving": saving}[WHAT]()
end.set()
print(most)
"""


@pytest.mark.parametrize(("what", "is_seen"), [("busy", False), ("blocked", True), ("wait", False), ("saving", False)])
def test_how_long_it_has_run_no_python(what: str, is_seen: bool) -> None:
    script = f"WHAT = {what!r}\n{WATCHED}"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=True, capture_output=True)
    seconds = float(ended.stdout)
    assert seconds > 1.0 if is_seen else seconds < 1.0


class TestMembership:
    def test_it_is_given_up(self) -> None:
        driver = running("a", "b")
        driver.say("b/0", step=7)
        driver.say("b/0", blocked_seconds=299.0)
        driver.wait(1)
        assert driver.world.generation == 1
        driver.say("b/0", blocked_seconds=301.0)
        driver.wait(1)
        assert driver.fenced == ["b/0"] and "main thread has not moved for 300 s" in driver.world.reason
        assert (driver.world.change, driver.world.members) == ("failure", ("a/0",))

    def test_one_that_has_made_no_step_has_time(self) -> None:
        """It may be compiling."""
        driver = running("a", "b")
        driver.say("b/0", blocked_seconds=1000.0)
        driver.wait(1)
        assert driver.world.generation == 1

    def test_one_that_says_nothing_of_what_fails_is_given_up(self) -> None:
        """It may hang where it seems to wait for the others, so that its main thread is not to blame."""
        driver = running("a", "b", "c")
        for failures in range(4):
            driver.say("a/0", broken=driver.told["a/0"].generation)
            driver.say("b/0", broken=driver.told["b/0"].generation)
            driver.wait(120)
            assert driver.fenced == (["c/0"] if failures == 3 else [])
        assert driver.world.members == ("a/0", "b/0") and "said nothing of" in driver.world.reason

    def test_one_that_is_late_with_its_answer_has_time(self) -> None:
        """All of them may be busy with a generation for long, and one of them then gives it up."""
        driver = running("a", "b")
        for _ in range(3):
            driver.say("a/0", broken=driver.told["a/0"].generation)
            driver.wait(400)
            driver.say("b/0", broken=driver.told["b/0"].generation)
            driver.wait(1)
        assert not driver.fenced

    def test_one_that_holds_nobody_up_has_time(self) -> None:
        driver = running("a", most=1)
        driver.start("b")
        driver.say("b/0", step=7, blocked_seconds=1000.0)
        driver.wait(1)
        assert driver.world.generation == 1 and not driver.fenced


@pytest.mark.full
def test_training_goes_on_without_a_worker_that_stands_still(
    train: Callable[..., Job], static: Static, tmp_path: Path
) -> None:
    job = train(nodes="1:2", stage=0, kind=Job)
    job.times["stuck_seconds"] = 4.0
    job.node("a", is_host=1)
    first = job.settled(1)
    job.node("b", is_host=0)
    both = job.settled(2, first.generation)
    steps_on(job)
    stuck = processes(both)[1]
    (tmp_path / f"hang-{stuck}").touch()
    job.settled(1, both.generation)
    steps_on(job)
    said = (tmp_path / "b.log").read_text()
    assert "the main thread has not moved" in said and "in hang" in said
    finish(job, "a")
    check_history(job, static, kills=1)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seconds", "stuck_seconds"), [(15, 4.0), (400, 300.0)])
def test_a_save_that_takes_longer_than_a_hang_is_no_hang(
    train: Callable[..., Job], tmp_path: Path, seconds: int, stuck_seconds: float
) -> None:
    """All are told to end, and save on a slow disk: nobody is given up, and the status says what they do."""
    library, slow, kept = tmp_path / "slow_disk.so", tmp_path / "slow", tmp_path / "kept"
    source = Path(__file__).with_name("slow_disk.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    block = {"fallback": {"path": str(kept), "every_steps": 1000}, "buddies": {"mode": "copy"}}
    variables = {"LD_PRELOAD": str(library), "SLOW_WHEN": str(slow), "SLOW_SECONDS": str(seconds)}
    job = train(nodes="1:2", stage=1, kind=Job, block=block, variables=variables)
    job.times["stuck_seconds"], job.seconds = stuck_seconds, seconds + 90.0
    job.coordinator("coordinator")
    for name in "ab":
        job.node(name, is_host=0)
    job.settled(2)
    steps_on(job)
    slow.touch()
    for name in "ab":
        os.kill(worker(job, name), signal.SIGTERM)
    job.wait(lambda: any("saving, " in one.waits_for for one in job.status().members), "a word on the save")
    assert {job.code(name) for name in "ab"} == {0}, job.logs()
    assert latest(kept) is not None
    assert "given up" not in (tmp_path / "coordinator.log").read_text()
