"""Members die under ZeRO, and no checkpoint is there: all go on from copies that members keep of each other.

A spare takes the place of who has died. So every world is of three, and the losses must be those, bit for bit, of a run
in which nobody dies.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from ds_dynatrain.buddies.assignment import buddies_of
from tests.elastic.agents import Job, processes
from tests.elastic.deaths import Deaths, Undisturbed, protected
from tests.elastic.runs import SCRIPT, Static, check_history, finish, node_of, steps_on

DEATHS = 10
LONGEST_PAUSE = 30.0
"""Seconds, on a busy machine; half of `timeout_seconds` there."""

INSTANTS = ("forward", "backward", "step", "norm", "update", "gather", "boundary", "ship")
OF_STAGE_3 = ("forward", "backward", "step", "norm of stage 3", "update", "boundary", "ship")


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "instant"),
    [(stage, instant) for stage in (1, 2, 3) for instant in (OF_STAGE_3 if stage == 3 else INSTANTS)],
)
def test_one_dies_and_a_spare_takes_its_place(
    tmp_path: Path, undisturbed: Undisturbed, stage: int, instant: str
) -> None:
    deaths = Deaths(tmp_path, stage, {"b": f"{instant} dies kill"})
    try:
        deaths.check_spare(undisturbed, most_again=2 if instant == "ship" else 1)
    finally:
        deaths.job.clean_up()


def test_nobody_waits_for_a_copy_that_the_dead_would_take(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """One dies while copies are on their way, and gloo does not hear of it on those that live."""
    faults = {"a": "boundary dies deaf", "b": "ship dies kill", "c": "boundary dies deaf"}
    deaths = Deaths(tmp_path, 2, faults, block={"timeout_seconds": 2 * LONGEST_PAUSE})
    try:
        deaths.check_spare(undisturbed, most_again=2)
        times = sorted(row["time"] for row in deaths.job.rows("step"))
        assert max(after - before for before, after in pairwise(times)) < LONGEST_PAUSE
    finally:
        deaths.job.clean_up()


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_deaths_in_the_launch_of_the_readme(train: Callable[..., Job], static: Static, seed: int) -> None:
    """An empty block, ZeRO 2, two nodes: ten times one of them dies at any instant, the other goes on, one more comes.

    Nobody makes more than one step again for a death, and what is protected says so.
    """
    job, chance, nodes = train(nodes="1:2", stage=2, own={"dynatrain": {}}), random.Random(seed), ["n0", "n1"]
    job.coordinator("coordinator")
    for node in nodes:
        job.node(node, is_host=0)
    joined, again = job.settled(2), dict[int, int]()
    for number in range(DEATHS):
        job.wait(lambda: protected(job.status()), "protection")
        time.sleep(chance.uniform(0.0, 1.6))
        victim = node_of(job, joined, chance.randrange(2))
        job.kill(victim)
        alone = job.settled(1, joined.generation)
        assert protected(job.status()) is None
        (survivor,) = processes(alone)
        made = [row["step"] for row in job.rows("step") if row["pid"] == survivor]
        again[survivor] = again.get(survivor, 0) + 1
        assert len(made) - len(set(made)) <= again[survivor], made
        nodes = [*(node for node in nodes if node != victim), f"n{2 + number}"]
        job.node(nodes[-1], is_host=0)
        joined = job.settled(2, alone.generation)
    finish(job, *nodes, "coordinator")
    check_history(job, static, kills=DEATHS)
    log = "".join((job.folder / f"n{number}.log").read_text() for number in range(2 + DEATHS))
    assert "buddies: unprotected: all members that train are on node" in log


@pytest.mark.full
@pytest.mark.parametrize(("instant", "ahead"), [("commit", 0), ("boundary", 7)])
def test_one_dies_after_a_switch(tmp_path: Path, static: Static, instant: str, ahead: int) -> None:
    """The script has asked for another stage: at first all copies are of the world before, later of this one."""
    deaths = Deaths(tmp_path, 1, {"b": f"{instant} dies kill"}, script=SCRIPT.with_name("doing.py"))
    try:
        deaths.tell(ahead=ahead)
        deaths.tell("switches", more='{"zero_stage": 2}')
        settled = deaths.job.settled(3, deaths.first.generation)
        assert len(set(processes(settled)) - set(processes(deaths.first))) == 1
        assert [row for row in deaths.job.rows("switch") if row["layout"]["zero_stage"] == 2]
        assert "restored step" in deaths.log("a")
        steps_on(deaths.job)
        finish(deaths.job)
        check_history(deaths.job, static, kills=1)
        made = [row["step"] for row in deaths.job.rows("step") if row["pid"] == processes(settled)[0]]
        assert len(made) - len(set(made)) <= 2, made
    finally:
        deaths.job.clean_up()


@pytest.mark.full
def test_a_damaged_copy_is_passed_over(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """A bit of each copy of the newest moment has flipped: all go on from the one before."""
    survivors = dict.fromkeys("ac", "survived dies flip")
    deaths = Deaths(tmp_path, 2, {"b": "boundary dies kill", **survivors})
    try:
        deaths.tell()
        deaths.job.settled(3, deaths.first.generation)
        assert "is damaged; another one is taken" in deaths.log("a", "c")
        deaths.check(undisturbed, most_again=2)
    finally:
        deaths.job.clean_up()


@pytest.mark.full
@pytest.mark.parametrize("instant", ["forming", "answer"])
def test_one_dies_while_it_gives_copies(tmp_path: Path, undisturbed: Undisturbed, instant: str) -> None:
    """Two pairs of buddies lose a member each, the second one in the midst of the restoration, or as it begins."""
    faults = {"b": "boundary dies kill", **{node: f"{instant} {node} kill" for node in "acd"}}
    deaths = Deaths(tmp_path, 1, faults, ("a", "b", "c", "d"), spares=2)
    try:
        deaths.tell(deaths.of_another_pair("b"))
        deaths.tell()
        settled = deaths.job.settled(4, deaths.first.generation)
        assert len(set(processes(settled)) - set(processes(deaths.first))) == 2, deaths.job.logs()
        deaths.check(undisturbed)
    finally:
        deaths.job.clean_up()


@pytest.mark.full
def test_half_of_them_die_at_once(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """One of each pair of buddies, at whatever instant."""
    deaths = Deaths(tmp_path, 1, {}, ("a", "b", "c", "d"), spares=2)
    try:
        first = deaths.job.wait(lambda: protected(deaths.job.status()), "whole copies")
        ranks, buddies = processes(first), buddies_of("abcd")
        assert buddies[0] == (1,) and buddies[2] == (3,)
        for node in [node_of(deaths.job, first, rank) for rank in (0, 2)]:
            deaths.job.kill(node)
        settled = deaths.job.settled(4, first.generation)
        assert set(processes(settled)) & set(ranks) == {ranks[1], ranks[3]}
        deaths.check(undisturbed, most_again=2)
    finally:
        deaths.job.clean_up()


@pytest.mark.full
@pytest.mark.parametrize("instant", ["update", "boundary", "ship"])
def test_two_of_three_that_have_a_state_die(tmp_path: Path, undisturbed: Undisturbed, instant: str) -> None:
    """With two copies of each, on four nodes: whoever dies at once with a buddy, somebody lives who has its state."""
    block = {"buddies": {"mode": "copy", "copies": 2}}
    faults = dict.fromkeys("ab", f"{instant} dies together")  # each by itself, one might not come to its instant
    deaths = Deaths(tmp_path, 1, faults, tuple("abcd"), spares=2, block=block)
    try:
        dying = [number for node in "ab" for number in deaths.numbers(node)]
        (deaths.job.folder / "together").write_text(" ".join(map(str, dying)))
        deaths.tell()
        settled = deaths.job.settled(4, deaths.first.generation)
        assert len(set(processes(settled)) - set(processes(deaths.first))) == 2, deaths.job.logs()
        assert "restored step" in deaths.log("c", "d")
        deaths.check(undisturbed, most_again=2 if instant == "ship" else 1)
    finally:
        deaths.job.clean_up()


@pytest.mark.full
def test_a_restoration_from_copies_fails(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Where nobody dies of it, all go back to the fallback checkpoint."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 3}
    faults = {"b": "boundary dies kill", "a": "proof dies fail"}
    deaths = Deaths(tmp_path, 2, faults, block={"fallback": fallback})
    try:
        deaths.tell(ahead=6)
        deaths.job.settled(3, deaths.first.generation)
        assert "told to fail; all goes back to the fallback checkpoint" in deaths.log("a")
        deaths.check(undisturbed, most_again=6)
    finally:
        deaths.job.clean_up()


@pytest.mark.full
def test_buddies_die_together_without_a_checkpoint(tmp_path: Path) -> None:
    """Two of a group of three: the job ends, and says whose loss it was."""
    deaths = Deaths(tmp_path, 2, dict.fromkeys("bc", "boundary dies kill"))
    try:
        deaths.tell()
        assert deaths.job.code("a") != 0
        assert "is left: all members that had one died together" in deaths.log("a")
    finally:
        deaths.job.clean_up()


@pytest.mark.full
def test_buddies_die_together_with_a_checkpoint(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """All go back to the fallback checkpoint, and the log says why."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 3}
    faults = dict.fromkeys("bc", "boundary dies kill")
    deaths = Deaths(tmp_path, 2, faults, spares=2, block={"fallback": fallback})
    try:
        deaths.tell(ahead=6)
        deaths.job.settled(3, deaths.first.generation)
        assert "; all goes back to the fallback checkpoint" in deaths.log("a")
        deaths.check(undisturbed, most_again=6)
    finally:
        deaths.job.clean_up()
