"""What a member makes of a generation at once, on the thread that hears of it: does it abort the world that trains?"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import Store

from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.environment import WorkerPlace
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.main_thread import OWN_WAITS
from ds_dynatrain.elastic.member import Member
from ds_dynatrain.elastic.store import open_store, serve_store
from ds_dynatrain.engine.elastic import Elastic
from ds_dynatrain.errors import WorldChanged
from ds_dynatrain.membership.destinations import Registry

MEMBERS = ("a/0", "b/0", "c/0")


def world(generation: int, *members: str, change: str = "planned", **more: Any) -> Generation:
    return Generation(term="1", generation=generation, change=change, members=members, **more)


@pytest.fixture
def elastic() -> Elastic:
    """Member a/0 of three that train in generation 2; nothing is connected."""
    place = WorkerPlace("a", 0, 1, Address("127.0.0.1", 1))
    made = Elastic(place, DynatrainConfig(timeout_seconds=5.0))
    made.enter(world(2, *MEMBERS), Registry().extended(MEMBERS), frozenset(MEMBERS))
    return made


def hear(elastic: Elastic, said: Generation) -> None:
    """As if the coordinator had sent it."""
    elastic.member._hear(said)


def test_a_planned_change_aborts_nothing(elastic: Elastic) -> None:
    hear(elastic, world(3, "a/0", "b/0", leaving=("c/0",)))
    assert not elastic.is_aborted and not elastic.is_over(2)


def test_the_death_of_a_newcomer_aborts_nothing(elastic: Elastic) -> None:
    hear(elastic, world(3, *MEMBERS, "d/0", survivors=3))
    hear(elastic, world(4, *MEMBERS, change="failure", survivors=3, lost=("d/0",)))
    assert not elastic.is_aborted
    assert elastic.is_over(3), "what is being built for generation 3 will not come about"
    with pytest.raises(WorldChanged):
        elastic.stop_if_over(3)


def test_the_death_of_a_member_aborts_the_world(elastic: Elastic) -> None:
    hear(elastic, world(3, "a/0", "c/0", change="failure", survivors=2, lost=("b/0",)))
    assert elastic.is_aborted
    elastic.enter(world(3, "a/0", "c/0"), elastic.registry, frozenset(["a/0", "c/0"]))
    assert not elastic.is_aborted and elastic.registry.numbers == {"a/0": 0, "c/0": 2}


def test_a_failed_collective_aborts_the_world_though_all_are_alive(elastic: Elastic) -> None:
    hear(elastic, world(3, *MEMBERS, change="failure", survivors=3, broken=2))
    assert elastic.is_aborted


def test_a_failed_collective_aborts_the_world_whatever_else_has_happened(elastic: Elastic) -> None:
    """A newcomer dies within the same moment, which by itself would be no reason to stop."""
    hear(elastic, world(3, *MEMBERS, "d/0", survivors=3))
    hear(elastic, world(4, *MEMBERS, change="failure", survivors=3, lost=("d/0",), broken=3))
    assert elastic.is_aborted


def test_a_collective_that_does_not_end_is_named_once_it_was_waited_for_too_long(
    elastic: Elastic, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic.collective_seconds = 600.0
    monkeypatch.setattr(elastic, "waits", lambda blocked_seconds: ("allreduce", blocked_seconds))
    assert [elastic._hangs_in(seconds) for seconds in (599.0, 601.0)] == ["", "allreduce, 601 s"]
    with OWN_WAITS.waiting("saving"):
        assert elastic._hangs_in(601.0) == "", "that may take as long as it needs"
    hear(elastic, world(3, *MEMBERS, change="failure", survivors=3, broken=2, hangs=1))
    assert elastic.is_aborted and not elastic.ending
    assert elastic._hangs_in(601.0) == "", "the world is aborted already"


def test_collectives_that_do_not_end_twice_end_the_job_whatever_follows(elastic: Elastic) -> None:
    reason = "a collective has not ended on b/0: allreduce, 600 s"
    hear(elastic, world(3, *MEMBERS, change="failure", survivors=3, broken=2, hangs=2, reason=reason))
    hear(elastic, world(4, "a/0", "c/0", change="failure", survivors=2, lost=("b/0",), broken=2))
    assert elastic.ending.startswith(reason) and "dynatrain.elastic.collective_seconds" in elastic.ending


def test_what_failed_in_an_earlier_world_aborts_nothing(elastic: Elastic) -> None:
    elastic.enter(world(3, *MEMBERS, broken=2), elastic.registry, frozenset(MEMBERS))
    hear(elastic, world(4, *MEMBERS, "d/0", survivors=3, broken=2))
    hear(elastic, world(5, *MEMBERS, change="failure", survivors=3, lost=("d/0",), broken=2))
    assert not elastic.is_aborted


def test_it_stays_aborted_whatever_follows(elastic: Elastic) -> None:
    hear(elastic, world(3, "a/0", "c/0", "d/0", change="failure", survivors=2, lost=("b/0",)))
    hear(elastic, world(4, "a/0", "c/0", change="failure", survivors=2, lost=("d/0",)))
    assert elastic.is_aborted


def test_a_death_during_the_commit_is_seen_on_entering(elastic: Elastic) -> None:
    """The newcomer has died; the switch that made it a member of the world was committed all the same."""
    after = world(3, *MEMBERS, "d/0", survivors=3)
    hear(elastic, after)
    hear(elastic, world(4, *MEMBERS, change="failure", survivors=3, lost=("d/0",)))
    assert not elastic.is_aborted
    elastic.enter(after, elastic.registry.extended(after.members), frozenset(after.members))
    assert elastic.is_aborted


def test_an_idle_member_that_dies_aborts_nothing(elastic: Elastic) -> None:
    elastic.retrain((0, 1))
    hear(elastic, world(3, "a/0", "b/0", change="failure", survivors=2, lost=("c/0",)))
    assert not elastic.is_aborted


def test_who_is_told_to_go_still_holds_state(elastic: Elastic) -> None:
    hear(elastic, world(3, "a/0", "b/0", change="failure", survivors=2, leaving=("c/0",), lost=("x/0",)))
    assert not elastic.is_aborted


def test_a_planned_change_that_does_not_know_this_member_aborts_its_world(elastic: Elastic) -> None:
    hear(elastic, world(3, "b/0", "d/0", survivors=1))
    assert elastic.is_aborted


def test_in_the_window_of_a_late_switch_the_death_of_a_newcomer_aborts_both_worlds(elastic: Elastic) -> None:
    hear(elastic, world(3, *MEMBERS, "d/0", survivors=3))
    elastic.enter_window(3)
    assert not elastic.is_aborted
    hear(elastic, world(4, *MEMBERS, change="failure", survivors=3, lost=("d/0",)))
    assert elastic.is_aborted


def test_a_death_before_the_window_is_seen_on_entering_it(elastic: Elastic) -> None:
    hear(elastic, world(3, *MEMBERS, "d/0", survivors=3))
    hear(elastic, world(4, *MEMBERS, change="failure", survivors=3, lost=("d/0",)))
    assert not elastic.is_aborted
    elastic.enter_window(3)
    assert elastic.is_aborted


def test_after_the_window_such_a_death_is_harmless_again(elastic: Elastic) -> None:
    hear(elastic, world(3, *MEMBERS, "d/0", survivors=3))
    elastic.enter_window(3)
    elastic.let_go()
    hear(elastic, world(4, *MEMBERS, change="failure", survivors=3, lost=("d/0",)))
    assert not elastic.is_aborted


def test_who_gets_state_is_judged_by_what_was_heard_before(elastic: Elastic) -> None:
    """By a switch in the same generation: who dies just then is one of those that train now."""
    elastic.retrain((0, 1))
    hear(elastic, world(3, "a/0", "b/0", change="failure", survivors=2, lost=("c/0",)))
    assert not elastic.is_aborted
    elastic.retrain((0, 1, 2))
    assert elastic.is_aborted


def test_a_load_is_said_to_all_generations(elastic: Elastic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to one that is behind; nobody knows in the run of another coordinator, or without a store."""
    served = serve_store("127.0.0.1")

    def reach(port: int) -> None:
        def opened(_: Member, prefix: str, seconds: float) -> Store:
            return open_store("127.0.0.1", port, prefix, seconds)

        monkeypatch.setattr(Member, "store", opened)

    reach(served.port)
    other = Elastic(elastic.member.place, DynatrainConfig(timeout_seconds=5.0))
    assert other.replaced() is None, "it has been in no generation"
    other.enter(world(3, *MEMBERS), elastic.registry, frozenset(MEMBERS))
    for one, generation in ((elastic, 2), (other, 3)):
        hear(one, world(generation, *MEMBERS))
        assert one.replaced() == ()
    other.say_replaced((3, 1))
    other.say_replaced((3, 2))
    assert elastic.replaced() == other.replaced() == (3, 2)
    reach(1)
    assert elastic.replaced() is None
    reach(served.port)
    hear(elastic, world(4, *MEMBERS, change="failure", survivors=3, broken=3).model_copy(update={"term": "2"}))
    assert elastic.replaced() is None
