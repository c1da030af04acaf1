"""Exact jobs whose members come, go and die: losses, norms and all state are those of one process, bit for bit.

So it counts for nothing how large a world is, or who is in it; and that a death has lost no step is seen by its bits.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.checkpoint.folder import tags
from ds_dynatrain.exact.bits.bit_records import read_exact
from ds_dynatrain.exact.bits.difference import compare
from tests.elastic.agents import Job, processes
from tests.elastic.deaths import NODES, Deaths, protected
from tests.elastic.exact_jobs import BLOCK, MACHINE, OWN, SCRIPT, Exact, exact_job
from tests.elastic.runs import finish, finish_together, first_leaves, node_of, second_joins, steps_on, variables, worker
from tests.elastic.test_late_switches import ask, in_window
from tests.elastic.test_switch_faults import go_through
from tests.engine.jobs import PRECISIONS

FULL = pytest.mark.full


@pytest.fixture(scope="session")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Exact:
    """One process."""
    return Exact(tmp_path_factory.mktemp("exact"))


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job of `exactly.py`, see `exact_job`, and leaves nothing of it behind."""
    jobs: list[Job] = []

    def make(stage: int, name: str = "job", **given: Any) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        jobs.append(exact_job(folder, stage, **given))
        return jobs[-1]

    yield make
    for job in jobs:
        job.clean_up()


def log_of(job: Job, node: str) -> str:
    """What a node has written."""
    return (job.folder / f"{node}.log").read_text()


def again(job: Job) -> int:
    """How many steps a process has made again, the one that has made most."""
    made = [[row["step"] for row in job.rows("step") if row["pid"] == pid] for pid in pids(job)]
    return max(len(each) - len(set(each)) for each in made)


def pids(job: Job) -> set[int]:
    """All processes that have made a step."""
    return {row["pid"] for row in job.rows("step")}


# ---- they come and go ------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("stage", "late"), [(2, False), *(pytest.param(each, True, marks=FULL) for each in (1, 3))])
def test_nodes_join_and_the_first_one_leaves(train: Callable[..., Job], exact: Exact, stage: int, late: bool) -> None:
    """Whose machine rounds otherwise is refused by name; and another seed of who joins makes no difference."""
    job = train(stage, nodes="1:4", block={"late": late})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)
    with variables(job, MKL_CBWR="AVX2"):
        job.node("other", is_host=0)
    with variables(job, SEED="9"):
        job.node("b", is_host=0)
    joined = job.settled(2, first.generation)
    assert job.code("other") != 0
    said = "cannot join the job: dynatrain.exact: MKL_CBWR is COMPATIBLE in the running job and AVX2 here: make"
    assert said in log_of(job, "other")
    job.kill("a", signal.SIGTERM)
    left = job.settled(1, joined.generation)
    assert processes(left) == processes(joined)[1:]
    job.code("a")
    finish(job, "b", "coordinator")
    assert exact.mistakes(job) == []


@FULL
def test_without_it_bits_differ(train: Callable[..., Job], exact: Exact) -> None:
    """What the other tests would not see they could not hold."""
    job = train(2, nodes="1:4", block={"exact": False})
    first_leaves(job, second_joins(job))
    found = " ".join(exact.mistakes(job))
    assert "norms" in found and "losses" in found and "master" in found


@FULL
def test_more_members_than_leaves(train: Callable[..., Job], tmp_path: Path) -> None:
    """Of two leaves: the third member waits, idle, until another one leaves."""
    own = {"train_batch_size": 4}
    job = train(2, nodes="1:4", own=own)
    joined = second_joins(job)
    job.node("c", is_host=0)
    job.wait(lambda: "1 of 3 members wait" in job.logs(), "an idle member")
    assert "data=3 ranks share 2 leaves of 2 samples of a train_batch_size of 4" in job.logs()
    steps_on(job)
    third = worker(job, "c")
    job.kill("a", signal.SIGTERM)
    left = job.settled(2, joined.generation)
    assert third in processes(left)
    job.code("a")
    finish(job, "b", "c", "coordinator")
    assert Exact(tmp_path / "exact", own).mistakes(job) == []


@FULL
def test_more_members_than_leaves_begin(train: Callable[..., Job], tmp_path: Path) -> None:
    """One of three that come at once waits."""
    own = {"train_batch_size": 4}
    job = train(2, nodes="3:4", own=own)
    job.coordinator("coordinator")
    for node in ("a", "b", "c"):
        job.node(node, is_host=0)
    job.settled(3)
    assert len(pids(job)) == 2
    finish(job)
    assert Exact(tmp_path / "exact", own).mistakes(job) == []


@FULL
def test_all_are_told_to_end_and_others_go_on(train: Callable[..., Job], exact: Exact, tmp_path: Path) -> None:
    """With another seed, in a world of another size, which another member joins: the seed is that of the job."""
    kept = str(tmp_path / "kept")
    block = {"fallback": {"path": kept, "every_steps": 1000}, "resume": {"path": kept}}
    job = train(1, block=block)
    job.node("a")
    job.node("b", is_host=0)
    job.settled(2)
    steps_on(job)
    for name in ("a", "b"):
        os.kill(worker(job, name), signal.SIGTERM)
    assert {job.code("a"), job.code("b")} == {0}, job.logs()
    later = train(3, "later", block=block, workers=3, variables={"SEED": "9"})
    later.node("a")
    first = later.settled(3)
    with variables(later, SEED="10"):
        later.node("b", is_host=0)
    later.settled(6, first.generation)
    finish(later)
    assert exact.mistakes(job, later) == []
    assert not {row["step"] for row in job.rows("step")} & {row["step"] for row in later.rows("step")}


# ---- they die --------------------------------------------------------------------------------------------------------

COPY = {"buddies": {"mode": "copy"}}


@FULL
@pytest.mark.parametrize(("dtype", "stage"), [("bf16", 1), ("bf16", 2), ("bf16", 3), ("fp16", 1)])
def test_16_bits(tmp_path: Path, dtype: str, stage: int) -> None:
    """One of three dies in a step; in fp16 the loss scale changes every few steps."""
    own = PRECISIONS[dtype]
    (folder := tmp_path / "job").mkdir()
    assert one_dies(folder, Exact(tmp_path / "exact", own), stage, "update", COPY, own=own) <= 1


ONE_IS_LOST = (
    *((1, each) for each in ("slice", "sum", "norm of leaves", "update", "ship")),
    *((2, each) for each in ("backward", "slice", "sum", "update", "gather", "boundary")),
    *((3, each) for each in ("forward", "slice", "sum", "norm of leaves", "update", "boundary")),
)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "instant"), ONE_IS_LOST)
def test_the_newest_copies_count(tmp_path: Path, exact: Exact, stage: int, instant: str) -> None:
    """One of three dies, and two go on from copies."""
    assert one_dies(tmp_path, exact, stage, instant, COPY) <= 1 + (instant == "ship")


def one_dies(
    folder: Path,
    exact: Exact,
    stage: int,
    instant: str,
    block: dict[str, Any],
    own: dict[str, Any] | None = None,
    victim: str = "b",
    **given: str,
) -> int:
    """How many steps were made again; at the instant one of three nodes loses power, and the others go on.

    own, given: of the configuration and the environment.
    """
    given, own = {**MACHINE, **given}, {**OWN, **(own or {})}
    faults, block = {victim: f"{instant} dies kill"}, {**BLOCK, **block}
    deaths = Deaths(folder, stage, faults, spares=0, block=block, own=own, script=SCRIPT, least=1, **given)
    job = deaths.job
    try:
        job.wait(lambda: protected(job.status()), "whole copies")
        deaths.tell()
        job.settled(2, deaths.first.generation)
        assert "from copies that members keep of each other" in deaths.log(*{*NODES} - {victim})
        steps_on(job)
        finish_together(job)
        assert exact.mistakes(job, deaths=1) == []
        return again(job)
    finally:
        job.clean_up()


@FULL
@pytest.mark.parametrize("victim", ["a", "c"])
@pytest.mark.parametrize("instant", ["boundary", "ship"])
def test_one_dies_where_tensors_follow_their_owners(tmp_path: Path, exact: Exact, instant: str, victim: str) -> None:
    """Two ranks go on in another order of tensors than the three of which they have copies.

    In this model our order moves fewer bytes if the first or the last of three ranks is lost.
    """
    one_dies(tmp_path, exact, 2, instant, {"owners": "nearest", **COPY}, victim=victim)


@FULL
def test_an_idle_member_stands_in(train: Callable[..., Job], tmp_path: Path) -> None:
    """It has copies, no leaf, and then the place of who has died."""
    own = {"train_batch_size": 4}
    job = train(1, nodes="2:3", own=own, block=COPY)
    job.coordinator("coordinator")
    for node in ("a", "b"):
        job.node(node, is_host=0)
    job.settled(2)
    job.node("c", is_host=0)
    first = job.wait(lambda: (status := job.status()) and len(status.ranks) == 3 and status, "an idle member")
    steps_on(job, 8)
    working, idle = pids(job), set(processes(first)) - pids(job)
    assert len(working) == 2 and len(idle) == 1
    victim = next(node for node in ("a", "b", "c") if worker(job, node) in working)
    job.kill(victim)
    job.wait(lambda: idle < pids(job), "steps of the idle one")
    steps_on(job)
    assert again(job) <= 1
    finish(job)
    assert Exact(tmp_path / "exact", own).mistakes(job, deaths=1) == []


@FULL
@pytest.mark.parametrize("role", ["joiner", "other"])
def test_one_dies_in_a_late_switch(train: Callable[..., Job], exact: Exact, role: str) -> None:
    """Before the record: the leaves of that step, some of which were added up, are trained again in the old world."""
    job = train(2, nodes="1:9", block={"late": True, **COPY})
    go_through(job, role, in_window(role, "backward", "step"))
    finish(job)
    assert exact.mistakes(job, deaths=2) == []


@FULL
@pytest.mark.parametrize("stage", [1, 3])
def test_one_dies_without_buddies(train: Callable[..., Job], exact: Exact, tmp_path: Path, stage: int) -> None:
    """All go back to the fallback checkpoint; what is made again has the bits that it had."""
    kept = tmp_path / "kept"
    job = train(stage, nodes="1:4", block={"fallback": {"path": str(kept), "every_steps": 7}})
    job.coordinator("coordinator")
    for node in ("a", "b", "c"):
        job.node(node, is_host=0)
    joined = job.settled(3)
    job.wait(lambda: tags(kept), "a checkpoint")
    steps_on(job, 4)
    job.kill(node_of(job, joined, 1))
    job.settled(2, joined.generation)
    finish(job)
    assert again(job) > 0
    assert exact.mistakes(job) == []


@FULL
def test_all_who_had_a_state_die(train: Callable[..., Job], exact: Exact, tmp_path: Path) -> None:
    """A spare, which has another seed, goes on from the fallback checkpoint with that of the job."""
    kept = tmp_path / "kept"
    job = train(2, nodes="1:1", block={"fallback": {"path": str(kept), "every_steps": 3}})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    job.settled(1)
    with variables(job, SEED="9"):
        job.node("spare", is_host=0)
    job.wait(lambda: (status := job.status()) and "waiting" in [one.phase for one in status.members], "the spare")
    job.wait(lambda: tags(kept), "a checkpoint")
    steps_on(job)
    job.kill("a")
    pid = worker(job, "spare")
    job.wait(lambda: [row for row in job.rows("step") if row["pid"] == pid], "a step of the spare")
    finish(job)
    assert exact.mistakes(job) == []


@pytest.fixture(scope="module")
def exact_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Exact:
    """One process with all layers."""
    return Exact(tmp_path_factory.mktemp("pipeline"), PIPELINE, **OF_STAGES)


PIPELINE = {"train_batch_size": 14, "dataloader_drop_last": True}
OF_STAGES = {"KIND": "pipeline"}
LAYOUTS = {"1": {"data": 1}, "2": {"data": 1, "pipe": 2}, "3": {"data": 3}, "4": {"data": 2, "pipe": 2}}


@FULL
def test_pipelines(train: Callable[..., Job], exact_pipeline: Exact, tmp_path: Path) -> None:
    """Two members, three, four in two stages of two; two die, and one leaves."""
    report = tmp_path / "report"
    block = {**COPY, "layouts": LAYOUTS, "report": {"jsonl": str(report)}}
    job = train(1, nodes="1:4", own=PIPELINE, block=block, variables=OF_STAGES)
    job.coordinator("coordinator")
    for node in ("a", "b"):
        job.node(node, is_host=0)
    generation = job.settled(2).generation
    for size, node in ((3, "c"), (4, "d"), (3, "a"), (2, "c"), (1, "d")):
        job.wait(lambda: protected(job.status()), "whole copies")
        if node not in job.processes:
            job.node(node, is_host=0)
        elif size == 1:
            job.kill(node, signal.SIGTERM)
        else:
            job.kill(node)
        generation = job.settled(size, generation).generation
        steps_on(job)
    job.code("d")
    finish_together(job)
    assert exact_pipeline.mistakes(job, deaths=2) == []
    assert {row["layout"]["pipe"] for row in job.rows("switch")} == {1, 2}
    assert compare(read_exact(report), exact_pipeline.report).is_identical


@FULL
@pytest.mark.parametrize("instant", ["layer", "backward of a stage", "sum", "norm of leaves", "update", "gather"])
def test_a_stage_of_a_pipeline_dies(tmp_path: Path, exact_pipeline: Exact, instant: str) -> None:
    """Of three stages one dies, and two go on."""
    layouts = {"1": {"data": 1}, "2": {"data": 1, "pipe": 2}, "3": {"data": 1, "pipe": 3}}
    block = {**COPY, "layout": {"data": 1, "pipe": 3, "zero_stage": 1}, "layouts": layouts}
    assert one_dies(tmp_path, exact_pipeline, 1, instant, block, own=PIPELINE, **OF_STAGES) <= 1


# ---- all of it -------------------------------------------------------------------------------------------------------

EVENTS = 8
SELDOM = {"buddies": {"mode": "copy", "every_steps": 3}}


@FULL
@pytest.mark.parametrize(("seed", "mode"), [(1, COPY), (2, COPY), (3, SELDOM), (4, {**COPY, "late": True})])
def test_random_chains(
    train: Callable[..., Job], exact: Exact, tmp_path: Path, seed: int, mode: dict[str, Any]
) -> None:
    """Of joins, leaves, deaths and switches of the stage, in worlds of one to five; so says the report file, too."""
    chance = random.Random(seed)
    report = tmp_path / "report"
    block = {**mode, "report": {"jsonl": str(report)}}
    job = train(chance.choice((1, 2, 3)), nodes="1:5", block=block, variables={"STEP_SECONDS": "0.1"})
    job.coordinator("coordinator")
    nodes = [f"n{number}" for number in range(2)]
    for node in nodes:
        job.node(node, is_host=0)
    status, done = job.settled(2), list[str]()
    for number in range(EVENTS):
        able = ["join"] * (len(nodes) < 5) + ["leave", "die", "die"] * (len(nodes) > 1) + ["switch"]
        done.append(chance.choice(able))
        if len(nodes) > 1:
            status = job.wait(lambda: protected(job.status()), "whole copies")
        if done[-1] == "switch":
            change_stage(job, chance)
            continue
        if done[-1] == "join":
            nodes.append(f"n{number + 2}")
            with variables(job, SEED=str(number)):
                job.node(nodes[-1], is_host=0)
        else:
            gone = nodes.pop(chance.randrange(len(nodes)))
            if done[-1] == "die":
                os.kill(worker(job, gone), signal.SIGKILL)
            job.kill(gone, signal.SIGTERM if done[-1] == "leave" else signal.SIGKILL)
        status = job.settled(len(nodes), status.generation)
        if done[-1] != "join":
            job.code(gone)
        steps_on(job, chance.randrange(1, 6))
    finish(job)
    assert exact.mistakes(job, deaths=done.count("die")) == [], done
    assert compare(read_exact(report), exact.report).is_identical


def change_stage(job: Job, chance: random.Random) -> None:
    """The script asks for another one."""
    switches = len(job.rows("switch"))
    present = job.rows("switch")[-1]["layout"]["zero_stage"] if switches else 0
    ask(job, {"zero_stage": chance.choice([stage for stage in (1, 2, 3) if stage != present])})
    steps_on(job, 8)
