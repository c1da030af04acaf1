"""Members with several engines die, and no checkpoint is there: all engines go back to copies of one boundary.

A spare takes the place of who has died. So the losses of all must be those, bit for bit, of runs in which nobody dies,
and where they stood to each other is what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import Job, processes
from tests.elastic.deaths import Deaths, Undisturbed
from tests.elastic.runs import SCRIPT, Static, check_history, finish, living, node_of, steps_on

SEVERAL = SCRIPT.with_name("several.py")
EVENTS = ("step", "beside", "beside 3")
"""What the script calls the steps of each engine."""
COPIES = {"buddies": {"mode": "copy"}}


def of_several(folder: Path, stages: tuple[int, ...], faults: dict[str, str], *nodes: str, **given: Any) -> Deaths:
    """A job of some nodes, and a spare, each with engines in these stages."""
    beside = ",".join(map(str, stages[1:]))
    return Deaths(folder, stages[0], faults, *([nodes] if nodes else []), script=SEVERAL, BESIDE=beside, **given)


def check(deaths: Deaths, undisturbed: Undisturbed, stages: tuple[int, ...], most_again: int = 1) -> None:
    """The history of each engine is that of a run in which nobody dies."""
    steps_on(deaths.job)
    finish(deaths.job)
    for event, stage in zip(EVENTS, stages, strict=False):
        deaths.compare(*undisturbed.of(data=deaths.size, zero_stage=stage), most_again, event=event)


QUICK = (((2, 2), "update of the other", ""),)
OPEN = ("boundary", "forward", "update")
"""In these the first engine has not finished the step after the last boundary, whose copies may travel still."""
INSTANTS = (*OPEN, "after the step", "forward of the other", "update of the other")
TRAVELLING = ("ship", "ship of the other")
ALL = [((1, 3), instant, "") for instant in (*INSTANTS, *TRAVELLING)]
ALL += [(stages, instant, "") for stages in ((2, 0), (0, 1)) for instant in ("boundary", "after the step", *TRAVELLING)]
ALL += [((1, 3, 0), instant, "") for instant in ("update", "forward of the other", "ship of the other")]
ALL += [((2, 1), "forward of the other", style) for style in ("zip", "boundaries")]


def named(case: tuple[tuple[int, ...], str, str], **given: Any) -> Any:
    """A case under its name."""
    stages, instant, style = case
    return pytest.param(*case, id=f"{'+'.join(map(str, stages))} {instant} {style}".strip(), **given)


@pytest.mark.parametrize(
    ("stages", "instant", "style"),
    [*(named(each) for each in QUICK), *(named(each, marks=pytest.mark.full) for each in ALL)],
)
def test_both_engines_go_back_to_one_moment(
    tmp_path: Path, undisturbed: Undisturbed, stages: tuple[int, ...], instant: str, style: str
) -> None:
    """Also one of which the living have everything: what it holds is of another moment."""
    deaths = of_several(tmp_path, stages, {"b": f"{instant} dies kill"}, STYLE=style)
    try:
        deaths.tell()
        settled = deaths.job.settled(3, deaths.first.generation)
        assert len(set(processes(settled)) - set(processes(deaths.first))) == 1
        assert deaths.log("a").count("from copies that members keep of each other") == len(stages)
        check(deaths, undisturbed, stages, most_again=1 if instant in OPEN else 2)
    finally:
        deaths.job.clean_up()


@pytest.mark.full
def test_a_damaged_copy_of_one_engine_is_passed_over_in_all(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """A bit of each copy of the newest moment of the second engine has flipped: both go on from the one before."""
    deaths = of_several(tmp_path, (1, 2), {"b": "boundary dies kill", **dict.fromkeys("ac", "survived dies flip")})
    try:
        deaths.tell()
        deaths.job.settled(3, deaths.first.generation)
        assert "is damaged; another one is taken" in deaths.log("a", "c")
        check(deaths, undisturbed, (1, 2), most_again=2)
    finally:
        deaths.job.clean_up()


@pytest.mark.full
@pytest.mark.parametrize("instant", ["forming of the other", "answer of the other", "proof of the other"])
def test_one_dies_while_it_gives_copies_of_the_other(tmp_path: Path, undisturbed: Undisturbed, instant: str) -> None:
    """The first engine has gone back already, or has a world: the next attempt begins with both."""
    faults = {"b": "boundary dies kill", **{node: f"{instant} {node} kill" for node in "acd"}}
    deaths = of_several(tmp_path, (1, 2), faults, *"abcd", spares=2)
    try:
        deaths.tell(deaths.of_another_pair("b"))
        deaths.tell()
        settled = deaths.job.settled(4, deaths.first.generation)
        assert len(set(processes(settled)) - set(processes(deaths.first))) == 2, deaths.job.logs()
        check(deaths, undisturbed, (1, 2))
    finally:
        deaths.job.clean_up()


@pytest.mark.full
def test_a_restoration_of_one_engine_fails(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Where nobody dies of it, both go back to the joint fallback checkpoint, also the one that was through."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 3}
    faults = {"b": "boundary dies kill", "a": "proof of the other dies fail"}
    deaths = of_several(tmp_path, (2, 1), faults, block={"fallback": fallback})
    try:
        deaths.tell(ahead=6)
        deaths.job.settled(3, deaths.first.generation)
        said = deaths.log("a")
        assert "told to fail; all goes back to the fallback checkpoint" in said
        assert "from copies that members keep" not in said and said.count("restored step") == 2
        check(deaths, undisturbed, (2, 1), most_again=7)
    finally:
        deaths.job.clean_up()


@pytest.mark.full
def test_buddies_die_together(tmp_path: Path) -> None:
    """Two of a group of three, without a checkpoint: the job ends, and says whose loss it was."""
    deaths = of_several(tmp_path, (0, 2), dict.fromkeys("bc", "after the step dies together"))
    try:
        dying = [number for node in "bc" for number in deaths.numbers(node)]
        (deaths.job.folder / "together").write_text(" ".join(map(str, dying)))
        deaths.tell()
        assert deaths.job.code("a") != 0
        assert "is left: all members that had one died together" in deaths.log("a")
    finally:
        deaths.job.clean_up()


def check_all(job: Job, static: Static, kills: int) -> None:
    """Within the bound of worlds of several sizes."""
    for event in EVENTS[:2]:
        check_history(job, static, kills, event)


@pytest.mark.full
@pytest.mark.parametrize(("stages", "style"), [((1, 3), ""), ((0, 2), ""), ((2, 1), "smaller")])
def test_worlds_become_smaller_and_larger(
    train: Callable[..., Job], static: Static, stages: tuple[int, int], style: str
) -> None:
    """Nobody takes the place of the dead; a node comes, and one dies again, until one member is alone."""
    variables = {"BESIDE": str(stages[1]), "STYLE": style}
    job = train(nodes="1:4", stage=stages[0], script=SEVERAL, variables=variables, block=COPIES)
    job.coordinator("coordinator")
    for node in "abc":
        job.node(node, is_host=0)
    world = job.settled(3)
    for size, joins in ((2, "d"), (2, ""), (1, "")):
        steps_on(job)
        job.kill(node_of(job, world, 1))
        world = job.settled(size, world.generation)
        if joins:
            steps_on(job)
            job.node(joins, is_host=0)
            world = job.settled(size + 1, world.generation)
    finish(job, *living(job))
    check_all(job, static, kills=3)


@pytest.mark.full
def test_one_dies_after_one_engine_has_switched(train: Callable[..., Job], static: Static) -> None:
    """At first its copies are of the layout before, later of this one."""
    variables = {"BESIDE": "3", "STYLE": "switches"}
    job = train(nodes="1:4", stage=1, script=SEVERAL, variables=variables, block=COPIES)
    job.coordinator("coordinator")
    for node in "ab":
        job.node(node, is_host=0)
    both = job.settled(2)
    job.wait(lambda: len(job.rows("asked")) == 2, "the switch")
    steps_on(job)
    dead = node_of(job, both, 0)
    job.kill(dead)
    job.settled(1, both.generation)
    steps_on(job)
    finish(job, *living(job))
    (log,) = [(job.folder / f"{name}.log").read_text() for name in {"a", "b"} - {dead}]
    assert log.count("from copies that members keep of each other") == 2, log
    check_all(job, static, kills=1)


@pytest.mark.full
@pytest.mark.parametrize("stages", [(1, 3), (0, 2)])
def test_who_has_no_place_gives_what_it_has(train: Callable[..., Job], static: Static, stages: tuple[int, int]) -> None:
    """Two are left of three, and there is a layout for one: the other one gives copies of both engines, and waits."""
    block = {**COPIES, "layouts": {"3": {"data": 3}, "1": {"data": 1}}}
    job = train(nodes="1:4", stage=stages[0], script=SEVERAL, variables={"BESIDE": str(stages[1])}, block=block)
    job.coordinator("coordinator")
    for node in "abc":
        job.node(node, is_host=0)
    three = job.settled(3)
    steps_on(job)
    job.kill(node_of(job, three, 1))
    made = job.wait(lambda: [row for row in job.rows("step") if row["generation"] > three.generation], "a world of one")
    assert made[0]["size"] == 1
    steps_on(job)
    finish(job, *living(job))
    check_all(job, static, kills=1)
