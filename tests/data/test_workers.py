"""Loader processes: none is left behind, none outlives its parent, their random streams are stock torch's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ds_dynatrain.data import DataSource, TrainLoader, WorkerStart
from tests.data.fakes import Job, Member

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Noisy(list[int]):
    """A data set whose samples carry a number from the worker's random stream."""

    def __getitem__(self, index: Any) -> Any:
        return index, int(torch.randint(1 << 30, ()))


def numbers(samples: list[Any]) -> list[Any]:
    return samples


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_workers_draw_what_those_of_stock_torch_draw() -> None:
    data = Noisy(range(16))
    torch.manual_seed(3)
    sampler = DistributedSampler(data, 1, 0)  # type: ignore[var-annotated, arg-type]
    stock = [*DataLoader(data, 4, sampler=sampler, collate_fn=numbers, num_workers=2)]  # type: ignore[arg-type]
    torch.manual_seed(3)
    ours = [*TrainLoader(DataSource.build(data, collate_fn=numbers), Member(Job([0], 4, 4), 0))]
    assert ours == stock


def test_changes_leave_no_process_and_no_descriptor() -> None:
    host = Member(Job([0], 4, 4), 0)
    loader = TrainLoader(DataSource.build(Noisy(range(80)), collate_fn=numbers), host)
    before = children()
    workers: set[str] = set()
    open_files: list[int] = []
    seen: list[int] = []
    for batch in loader:
        seen += [index for index, _ in batch]
        workers |= children() - before
        open_files.append(descriptors())
        host.job.pending = [0] if len(seen) % 8 == 0 else None
    assert host.generation == 9 and seen == loader.order.permutation(0).tolist()
    assert len(workers) == 2, "a change starts no process anew"
    assert children() == before and open_files[-1] <= open_files[0]


@pytest.mark.parametrize("how", ["break", "close"])
def test_leaving_ends_the_workers(how: str) -> None:
    loader = TrainLoader(DataSource.build(Noisy(range(80)), collate_fn=numbers), Member(Job([0], 4, 4), 0))
    before = children()
    turning = iter(loader)
    first = next(turning)
    assert children() > before
    if how == "close":
        loader.close()
        assert children() == before
        second = next(turning)
        assert {index for index, _ in first}.isdisjoint(index for index, _ in second)
    del turning
    assert children() == before


SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
from ds_dynatrain.data import DataSource, TrainLoader, WorkerStart
from tests.data.fakes import Job, Member

class Slow(list):
    def __getitem__(self, index):
        time.sleep(0 if index < 4 else 600)
        return os.getpid()

source = DataSource.build(Slow(range(64)), num_workers=2, shuffle=False)
turning = iter(TrainLoader(source, Member(Job([0], 4, 4), 0)))
next(turning)
print(open(f"/proc/self/task/{{os.getpid()}}/children").read(), flush=True)
time.sleep(600)
"""


def test_a_worker_that_starts_after_its_parent_died_ends_at_once() -> None:
    child = os.fork()
    if child == 0:
        try:
            WorkerStart(parent=os.getppid() + 1)(0)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_worker_dies_with_its_parent() -> None:
    script = SCRIPT.format(root=str(Path(__file__).parents[2]))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise AssertionError("no pipe")
        workers = [int(word) for word in process.stdout.readline().split()]
        assert len(workers) >= 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 20.0
    while (alive := [worker for worker in workers if running(worker)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not alive


def test_sigterm_is_the_parents_affair() -> None:
    """Slurm sends it to all processes; who is told to go may need a batch yet."""
    loader = TrainLoader(DataSource.build(Noisy(range(80)), collate_fn=numbers), Member(Job([0], 4, 4), 0))
    before = children()
    turning = iter(loader)
    seen = [next(turning) for _ in range(2)]  # one of each worker: both have started
    for worker in children() - before:
        os.kill(int(worker), signal.SIGTERM)
    seen += turning
    assert len(seen) == 20 and children() == before


LEFT = """
import sys
sys.path.insert(0, {root!r})
from ds_dynatrain.data import DataSource

loader = DataSource.build(list(range(64)), num_workers=2).fetch([[number] for number in range(64)], None, {persistent})
first = next(iterator := iter(loader))
sys.exit(5)
"""


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_are_left_end_with_the_script(persistent: bool) -> None:
    """multiprocessing sends them SIGTERM at its end, and waits for them without a limit."""
    script = LEFT.format(root=str(Path(__file__).parents[2]), persistent=persistent)
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 5


STAYS = """
import os, select, signal, sys
sys.path.insert(0, {root!r})
from ds_dynatrain.data import DataSource, TrainLoader
from tests.data.fakes import Job, Member

signal.signal(signal.SIGTERM, lambda *_: print("told to go", flush=True))
source = DataSource.build(list(range(64)), num_workers=2, shuffle=False)
turning = iter(TrainLoader(source, Member(Job([0], 4, 4), 0)))
print("began with", [next(turning) for _ in range(2)], flush=True)  # one of each worker: both have started
while not select.select([sys.stdin], [], [], 0.1)[0]:
    pass  # a signal just before a read that blocks would be seen only after it
print("ended with", [next(turning) for _ in range(12)][-1], flush=True)
"""


def test_workers_go_on_when_the_group_of_their_parent_is_told_to_go() -> None:
    """As torchrun does it; the parent may need batches until its state is handed over."""
    script = STAYS.format(root=str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("no pipes")
        assert process.stdout.readline().startswith("began with")
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "told to go\n"
        time.sleep(0.2)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("ended with")


def running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
