"""The coordinator's decisions, one situation each."""

from __future__ import annotations

import pytest

from ds_dynatrain.elastic import membership_machine as membership_module
from ds_dynatrain.elastic.messages import Report
from ds_dynatrain.elastic.settings import ORPHAN_SECONDS, Settings
from ds_dynatrain.elastic.view import snapshot
from ds_dynatrain.errors import ConfigError, JobFinished, PeerRefused
from tests.elastic.driver import Driver, running


def test_a_job_starts_with_min_nodes_and_not_before() -> None:
    driver = Driver(Settings(2, 4))
    driver.start("a")
    driver.wait(10)
    assert not driver.worlds
    driver.start("b", size=2)
    driver.wait()
    assert driver.world.members == ("a/0", "b/0", "b/1")
    assert (driver.world.generation, driver.world.change, driver.world.survivors) == (1, "planned", 0)


def test_a_node_joins_as_a_whole() -> None:
    driver = running("a")
    driver.start("b", size=2, is_ready=False)
    driver.say("b/1", ready=True)
    driver.wait(1)
    assert driver.world.members == ("a/0",)
    driver.say("b/0", ready=True)
    driver.wait()
    assert driver.world.members == ("a/0", "b/0", "b/1")
    assert driver.world.survivors == 1 and "b joined" in driver.world.reason


def test_several_changes_at_once_are_one() -> None:
    driver = running("a", "b", "c")
    driver.start("d")
    driver.say("a/0", leaving=True)
    driver.start("e")
    driver.wait()
    assert len(driver.worlds) == 2
    assert driver.world.members == ("b/0", "c/0", "d/0", "e/0")
    assert driver.world.leaving == ("a/0",) and driver.world.survivors == 2 and driver.world.change == "planned"


def test_all_ranks_of_a_dead_node_are_one_failure() -> None:
    driver = running("a", "b", size=2)
    driver.membership.lost("a/0", "the connection ended", driver.now)
    driver.wait(0.02)
    driver.membership.lost("a/1", "the connection ended", driver.now)
    driver.wait()
    assert len(driver.worlds) == 2
    assert (driver.world.change, driver.world.members, driver.world.lost) == (
        "failure",
        ("b/0", "b/1"),
        ("a/0", "a/1"),
    )


def test_planned_changes_wait_until_everybody_has_entered() -> None:
    driver = running("a", "b")
    driver.start("c")
    driver.wait()
    driver.start("d")
    driver.enter("a/0", "b/0")
    driver.wait(1)
    assert driver.world.generation == 2
    driver.enter("c/0")
    driver.wait()
    assert driver.world.generation == 3 and driver.world.members[-1] == "d/0"


@pytest.mark.parametrize("engines", ["building", "built"])
def test_a_failure_does_not_wait(engines: str) -> None:
    driver = running("a", "b")
    driver.start("c")
    driver.wait()
    driver.say("c/0", engines=engines)
    driver.membership.lost("b/0", "the connection ended", driver.now)
    driver.wait()
    stay = ("a/0",) if engines == "building" else ("a/0", "c/0")
    assert driver.world.change == "failure" and driver.world.members == stay
    assert driver.world.survivors == 1, "c has got nothing yet"
    assert driver.told["c/0"] == driver.world, "who is not waited for knows that it has to wait"
    driver.enter("a/0")
    driver.wait(5)
    assert driver.world.generation == 3
    driver.say("c/0", engines="built")
    driver.wait()
    assert driver.world.members == ("a/0", "c/0")
    assert driver.world.change == ("planned" if engines == "building" else "failure")


def test_a_node_is_late_as_a_whole() -> None:
    driver = running("a", "b")
    driver.start("c", size=2)
    driver.wait()
    driver.say("c/0", engines="built")
    driver.membership.lost("b/0", "the connection ended", driver.now)
    driver.wait()
    assert driver.world.members == ("a/0",)


def test_below_min_late_nodes_are_needed() -> None:
    driver = running("a", "b", least=2)
    driver.start("c")
    driver.wait()
    driver.say("c/0", engines="building")
    driver.membership.lost("b/0", "the connection ended", driver.now)
    driver.wait()
    assert driver.world.members == ("a/0", "c/0") and not driver.world.paused


def test_a_node_comes_into_a_paused_world_that_nobody_can_enter() -> None:
    """Those that are left have no layout, and whoever comes makes one possible."""
    driver = running("a", "b", least=2)
    driver.membership.lost("b/0", "the connection ended", driver.now)
    driver.wait(20)
    assert driver.world.paused and driver.world.members == ("a/0",)
    driver.say("a/0", lacking=2)
    driver.start("c")
    driver.wait()
    assert driver.world.members == ("a/0", "c/0") and not driver.world.paused and driver.world.change == "failure"


def test_a_spare_is_needed_where_the_others_have_no_layout() -> None:
    """Also above MIN: they say so, and then it comes, though it has made no engines yet."""
    driver = running("a", "b", most=2)
    driver.start("c")
    driver.wait()
    driver.membership.lost("b/0", "the connection ended", driver.now)
    driver.wait(10)
    assert driver.world.members == ("a/0",)
    driver.say("a/0", lacking=driver.world.generation)
    driver.wait()
    assert driver.world.members == ("a/0", "c/0") and driver.world.survivors == 1
    driver.wait(1000)
    assert driver.world.generation == 3, "and not again"


def test_who_is_restored_for_long_is_left_in_peace() -> None:
    """All have made their engines, or need none: nobody is late."""
    driver = running("a", "b", most=2)
    driver.start("c")
    driver.wait()
    driver.membership.lost("b/0", "the connection ended", driver.now)
    driver.wait(10 * driver.settings.stuck_seconds)
    assert driver.world.members == ("a/0",) and driver.world.generation == 2
    driver.enter("a/0")
    driver.wait()
    assert driver.world.members == ("a/0", "c/0")


def test_a_late_leaver_is_asked_for_nothing() -> None:
    driver = running("a", "b")
    driver.start("c")
    driver.wait()
    driver.say("c/0", engines="building", leaving=True)
    driver.membership.lost("b/0", "the connection ended", driver.now)
    driver.wait()
    assert driver.world.members == ("a/0",) and not driver.world.leaving and driver.told["c/0"] == driver.world


def test_who_leaves_waits_for_late_nodes_only_for_a_moment() -> None:
    driver = running("a", "b")
    driver.start("c")
    driver.wait()
    driver.say("c/0", engines="building")
    driver.say("b/0", leaving=True)
    driver.wait(4)
    assert driver.world.generation == 2
    driver.wait(2)
    world = driver.world
    assert world.members == ("a/0",) and world.leaving == ("b/0",) and world.survivors == 1 and not world.broken
    driver.wait(10)
    assert driver.world == world, "and not again"


def test_the_only_one_with_the_state_waits_for_who_takes_it() -> None:
    driver = running("a")
    driver.start("c")
    driver.wait()
    driver.say("c/0", engines="building")
    driver.say("a/0", leaving=True)
    driver.wait(30)
    assert driver.world.generation == 2


def test_a_node_that_never_makes_its_engines_keeps_no_others_out() -> None:
    driver = running("a")
    driver.start("c")
    driver.wait()
    driver.say("c/0", engines="building")
    driver.wait(10)
    driver.start("d")
    driver.wait(driver.settings.stuck_seconds - 12)
    assert driver.world.generation == 2
    driver.wait(4)
    assert driver.world.members == ("a/0",) and "c is not waited for" in driver.world.reason
    driver.enter("a/0")
    driver.wait()
    assert driver.world.members == ("a/0", "d/0")
    driver.say("c/0", engines="built")
    driver.enter("a/0", "d/0")
    driver.wait()
    assert driver.world.members == ("a/0", "d/0", "c/0")


def test_a_node_that_never_makes_its_engines_keeps_nobody_out_who_came_with_it() -> None:
    driver = running("a")
    driver.start("c", "d")
    driver.wait()
    driver.say("c/0", engines="building")
    driver.say("d/0", engines="built")
    driver.wait(driver.settings.stuck_seconds + 1)
    assert driver.world.members == ("a/0", "d/0") and driver.world.survivors == 1


def test_a_late_member_that_is_needed_and_hangs_is_given_up() -> None:
    driver = running("a", "b", least=2)
    driver.start("c")
    driver.wait()
    driver.membership.lost("b/0", "the connection ended", driver.now)
    driver.wait()
    driver.say("c/0", engines="building", blocked_seconds=driver.settings.stuck_seconds)
    driver.wait()
    assert driver.fenced == ["c/0"] and driver.world.lost == ("c/0",)


def test_who_died_after_the_switch_has_passed_on_the_state() -> None:
    driver = running("a")
    driver.start("b")
    driver.wait()
    driver.enter("a/0")
    driver.membership.lost("a/0", "the connection ended", driver.now)
    driver.wait()
    assert driver.world.members == ("b/0",) and driver.world.survivors == 1


def test_a_joiner_that_is_left_alone_holds_nothing() -> None:
    driver = running("a")
    driver.start("b")
    driver.wait()
    driver.membership.lost("a/0", "the connection ended", driver.now)
    driver.wait()
    assert driver.world.members == ("b/0",) and driver.world.survivors == 0


def test_a_job_that_has_made_steps_does_not_begin_anew() -> None:
    """Whoever comes when all have died with the state is told so, also by a coordinator that was started again."""
    driver = running("a")
    driver.say("a/0", step=1)
    driver.membership.lost("a/0", "the connection ended", driver.now)
    driver.start("b")
    driver.wait()
    assert (driver.world.members, driver.world.survivors, driver.world.begun) == (("b/0",), 0, True)
    driver.restart()
    driver.announce("b/0")
    driver.start("c")
    driver.wait(4)
    driver.membership.lost("b/0", "the connection ended", driver.now)
    driver.wait()
    assert (driver.world.members, driver.world.survivors, driver.world.begun) == (("c/0",), 0, True)


def test_a_job_whose_first_world_failed_may_begin_again() -> None:
    driver = running("a", "b")
    driver.say("b/0", broken=1)
    driver.wait()
    assert driver.world.change == "failure" and not driver.world.begun


def test_members_that_were_told_to_go_end_the_job_in_good_order() -> None:
    driver = running("a")
    driver.say("a/0", step=1)
    driver.say("a/0", leaving=True)
    driver.wait()
    assert driver.world.members == () and driver.world.begun
    driver.bye("a/0")
    driver.start("b")
    driver.wait()
    assert driver.world.members == ("b/0",) and not driver.world.begun


def test_the_last_holder_goes_without_handing_over() -> None:
    """All members wait for what it has to say of the state: they get another generation, in which nobody asks it."""
    driver = running("a")
    driver.start("b")
    driver.wait()
    driver.say("a/0", leaving=True)
    driver.breach("a/0")
    driver.wait()
    assert (driver.world.members, driver.world.leaving, driver.world.survivors) == (("b/0",), ("a/0",), 0)
    driver.bye("a/0")
    driver.wait()
    assert (driver.world.change, driver.world.members, driver.world.leaving) == ("failure", ("b/0",), ())


def test_a_leaver_that_dies_while_it_hands_over_is_a_failure() -> None:
    driver = running("a", "b")
    driver.say("a/0", leaving=True)
    driver.wait()
    assert driver.world.leaving == ("a/0",)
    driver.membership.lost("a/0", "the connection ended", driver.now)
    driver.wait()
    assert (driver.world.generation, driver.world.change, driver.world.members) == (3, "failure", ("b/0",))
    assert driver.world.broken == 2, "whoever has entered it already may have got too little"


def test_one_of_several_that_all_leave_dies() -> None:
    """The others meet to save what they have: they would wait for it."""
    driver = running("a", "b", "c")
    for member in ("a/0", "b/0", "c/0"):
        driver.say(member, leaving=True)
    driver.wait()
    assert driver.world.members == () and driver.world.leaving == ("a/0", "b/0", "c/0")
    driver.membership.lost("b/0", "the connection ended", driver.now)
    driver.wait()
    assert (driver.world.generation, driver.world.change, driver.world.broken) == (3, "failure", 2)
    assert (driver.world.members, driver.world.leaving) == ((), ("a/0", "c/0"))


def test_a_collective_that_fails_though_all_live() -> None:
    driver = running("a", "b", "c")
    driver.say("b/0", broken=1)
    driver.wait()
    assert (driver.world.change, driver.world.members, driver.world.lost) == ("failure", ("a/0", "b/0", "c/0"), ())
    assert driver.world.broken == 1
    driver.say("c/0", broken=1)  # it noticed later; that world is over
    driver.wait(1)
    assert driver.world.generation == 2


def test_a_failed_collective_and_a_death_at_once_are_one_failure_that_says_both() -> None:
    """A death of one that holds nothing yet is no reason to stop for those who train; a failed collective is."""
    driver = running("a", "b")
    driver.start("c")
    driver.wait()
    driver.say("a/0", broken=2)
    driver.wait(0.02)
    driver.membership.lost("c/0", "the connection ended", driver.now)
    driver.wait()
    assert (driver.world.generation, driver.world.lost, driver.world.broken) == (3, ("c/0",), 2)
    assert {driver.reports[one].entered for one in ("a/0", "b/0")} == {1}, "all of them train in what is broken"


@pytest.mark.parametrize("between", ["a node joins", "a newcomer dies"])
def test_a_failed_collective_is_heard_whatever_was_published_before(between: str) -> None:
    driver = running("a", "b")
    driver.start("c", is_ready=between == "a newcomer dies")
    driver.wait()
    driver.breach("b/0", is_late=True)
    if between == "a node joins":
        driver.say("c/0", ready=True)
    else:
        driver.membership.lost("c/0", "the connection ended", driver.now)
    driver.wait(1)
    assert driver.world.change == "failure" and driver.world.broken == driver.world.generation - 1
    assert not driver.breaches, "it knows that this was heard"


def test_what_failed_before_is_in_each_later_record() -> None:
    driver = running("a", "b")
    driver.breach("b/0")
    driver.wait()
    driver.enter()
    driver.start("c")
    driver.wait()
    assert (driver.world.generation, driver.world.change, driver.world.broken) == (3, "planned", 1)
    driver.restart()
    for member in ("a/0", "b/0", "c/0"):
        driver.announce(member)
        driver.say(member)
    driver.wait(4)
    driver.start("d")
    driver.enter()
    driver.wait()
    assert (driver.world.generation, driver.world.broken) == (4, 1)


def test_a_collective_that_fails_on_one_that_hands_over() -> None:
    driver = running("a", "b")
    driver.say("a/0", leaving=True)
    driver.wait()
    driver.breach("a/0")
    driver.wait()
    assert (driver.world.generation, driver.world.change, driver.world.broken) == (3, "failure", 2)
    assert driver.world.leaving == ("a/0",)


@pytest.mark.parametrize("ends", ["bye", "lost"])
def test_a_leaver_that_has_handed_over_goes_unnoticed(ends: str) -> None:
    driver = running("a", "b")
    driver.say("a/0", leaving=True)
    driver.wait()
    driver.enter("b/0")
    if ends == "bye":
        driver.bye("a/0")
    else:
        driver.membership.lost("a/0", "the connection ended", driver.now)
    driver.wait(1)
    assert len(driver.worlds) == 2


def test_a_leaver_that_ends_too_early_is_a_failure() -> None:
    driver = running("a", "b")
    driver.say("b/0", leaving=True)
    driver.bye("b/0")
    driver.wait()
    assert driver.world.change == "failure" and driver.world.lost == ("b/0",)


def test_above_max_a_spare_waits_and_steps_in() -> None:
    driver = running("a", "b", most=2)
    driver.start("c", size=2)
    driver.start("d")
    driver.wait(1)
    assert len(driver.worlds) == 1
    driver.membership.lost("a/0", "the connection ended", driver.now)
    driver.wait()
    assert driver.world.members == ("b/0",) and driver.world.change == "failure"
    driver.enter("b/0")
    driver.wait()
    assert driver.world.members == ("b/0", "c/0", "c/1") and driver.world.change == "planned"


def test_below_min_the_world_is_paused() -> None:
    driver = running("a", "b", "c", least=2)
    for node in ("a", "b"):
        driver.membership.lost(f"{node}/0", "the connection ended", driver.now)
    driver.wait()
    assert driver.world.paused and driver.world.members == ("c/0",)
    driver.start("d")
    driver.wait()
    driver.enter()
    driver.wait()
    assert not driver.world.paused and driver.world.members == ("c/0", "d/0")


def test_a_silent_member_is_fenced_once_the_others_have_gone_on() -> None:
    driver = running("a", "b")
    driver.silent.add("b/0")
    driver.wait(6)
    assert driver.world.change == "failure" and driver.world.members == ("a/0",) and not driver.fenced
    assert "no heartbeat for 5 s" in driver.world.reason
    driver.enter()
    driver.wait()
    assert driver.fenced == ["b/0"]
    with pytest.raises(PeerRefused, match="was given up"):
        driver.announce("b/0")


@pytest.mark.parametrize("has_new_connection", [False, True])
def test_a_silent_member_comes_back_before_the_others_go_on(has_new_connection: bool) -> None:
    """It holds what they hold, and stands where it stood."""
    driver = Driver(Settings(1, 8))
    driver.sizes = dict.fromkeys(("a/0", "b/0", "c/0"), 1)
    for member in driver.sizes:
        driver.announce(member, nonce=member)
        driver.say(member, ready=True)
    driver.wait(4)
    driver.enter()
    driver.silent.add("b/0")
    driver.wait(6)
    assert driver.world.members == ("a/0", "c/0")
    driver.silent.clear()
    if has_new_connection:
        driver.announce("b/0", nonce="b/0")
    driver.say("b/0")
    driver.wait()
    world = driver.world
    assert (world.generation, world.change, world.members, world.survivors) == (3, "failure", ("a/0", "b/0", "c/0"), 3)
    assert "b/0 was heard of again" in world.reason and world.lost == ()
    driver.enter()
    driver.wait(10)
    assert driver.world == world and not driver.fenced


def test_a_silent_member_comes_back_a_moment_too_late() -> None:
    """Others enter the generation without it between its word and the next decision."""
    driver = running("a", "b", "c")
    driver.silent.add("b/0")
    driver.wait(6)
    driver.say("b/0")
    driver.say("a/0", entered=2)
    driver.silent.clear()
    driver.wait(1)
    assert driver.fenced == ["b/0"] and "b/0" not in driver.world.members


@pytest.mark.parametrize("nodes", [1, 3, 4])
@pytest.mark.parametrize("seconds", [6, 20, 28])
def test_where_most_are_silent_together_nobody_is_given_up(nodes: int, seconds: int) -> None:
    """The coordinator's own link is cut, or its process pauses in pieces; training has gone on meanwhile."""
    driver = running(*"abcd"[:nodes])
    quiet = [f"{node}/0" for node in "abcd"[: nodes // 2 + 1]]
    driver.silent.update(quiet)
    driver.wait(seconds)
    for member in quiet:  # they are heard of again one after the other
        driver.silent.discard(member)
        driver.wait(1)
    driver.wait(10)
    assert not driver.fenced and len(driver.worlds) == 1


def test_members_that_fall_silent_shortly_after_each_other_count_together() -> None:
    driver = running("a", "b", "c")
    driver.silent.add("a/0")
    driver.wait(3)
    driver.silent.add("b/0")
    driver.wait(10)
    assert len(driver.worlds) == 1
    driver.silent.remove("b/0")  # the coordinator can be heard: a is silent by itself
    driver.wait(8)
    assert driver.world.members == ("b/0", "c/0")


def test_a_silence_that_outlasts_any_living_member_is_a_death() -> None:
    driver = running("a", "b", "c")
    driver.silent.update(("a/0", "b/0"))
    driver.wait(ORPHAN_SECONDS + 2)
    assert driver.world.members == ("c/0",) and "no heartbeat for 30 s" in driver.world.reason


def test_a_connection_that_breaks_is_a_death_unless_the_member_was_silent_before() -> None:
    driver = running("a", "b", "c")
    driver.membership.disconnected("c/0", "its connection ended", driver.now)
    driver.wait()
    assert driver.world.members == ("a/0", "b/0")
    driver.enter()
    driver.silent.add("b/0")
    driver.wait(3)
    driver.membership.disconnected("b/0", "its connection ended", driver.now)
    driver.wait(1)
    assert driver.world.members == ("a/0", "b/0")
    driver.wait(2)
    assert driver.world.members == ("a/0",)


def test_a_further_connection_of_one_process_takes_the_place_of_the_first() -> None:
    """What was published while it broke is told again; another process under the same name is refused."""
    driver = Driver(Settings(1, 8))
    driver.sizes = {"a/0": 1, "b/0": 1}
    driver.announce("a/0", nonce="x")
    driver.say("a/0", ready=True)
    driver.wait(4)
    driver.enter()
    before = driver.told["a/0"]
    driver.announce("b/0", nonce="y")
    driver.say("b/0", ready=True)
    driver.wait()
    driver.told["a/0"] = before  # it was sent over the connection that has broken
    driver.announce("a/0", nonce="x")
    driver.wait()
    assert driver.told["a/0"] == driver.world and driver.world.generation == 2
    with pytest.raises(PeerRefused, match="is over here"):
        driver.announce("a/0", nonce="z")


def test_never_more_than_half_of_a_world_is_given_up_for_being_stuck() -> None:
    driver = running("a", "b", "c", "d")
    for member in ("a/0", "b/0", "c/0"):
        driver.say(member, step=3, blocked_seconds=400)
    driver.wait(5)
    assert not driver.fenced and len(driver.worlds) == 1
    driver.say("c/0", blocked_seconds=0)
    driver.wait(1)
    assert driver.fenced == ["a/0", "b/0"] and driver.world.members == ("c/0", "d/0")


def test_who_waits_for_a_member_that_hangs_is_not_stuck() -> None:
    """The other one has said nothing of two generations that failed: it waits for what the stuck one would say."""
    driver = running("a", "b", "c")
    for generation in (1, 2, 3):
        driver.say("c/0", step=3, broken=generation)
        driver.wait(1)
        assert driver.world.generation == generation + 1
    driver.say("a/0", step=3, blocked_seconds=driver.settings.stuck_seconds - 2)
    driver.wait(driver.settings.stuck_seconds - 4)
    assert not driver.fenced
    driver.say("a/0", blocked_seconds=driver.settings.stuck_seconds)
    driver.wait(5)
    assert driver.fenced == ["a/0"] and driver.world.members == ("b/0", "c/0")


def test_nobody_is_silent_while_the_coordinator_sleeps() -> None:
    driver = running("a", "b")
    driver.now += 60  # the process was stopped, or the machine was suspended
    driver.membership.advance(driver.now)
    driver.wait(1)
    assert not driver.fenced and len(driver.worlds) == 1


def test_newcomers_that_nobody_waited_for_are_sent_home() -> None:
    """The scripts of the others end before they have entered the world in which the job has them."""
    driver = running("a")
    driver.start("b")
    driver.wait()
    assert driver.world.members == ("a/0", "b/0")
    driver.bye("a/0")
    driver.wait()
    assert driver.finished == ["b/0"]


def test_scripts_that_end_make_no_change_and_spares_are_sent_home() -> None:
    driver = running("a", "b", most=2)
    driver.start("c")
    driver.bye("b/0")
    driver.wait(1)
    assert len(driver.worlds) == 1 and not driver.finished
    driver.bye("a/0")
    driver.wait()
    assert len(driver.worlds) == 1 and driver.finished == ["c/0"]
    with pytest.raises(JobFinished):
        driver.start("d")


def test_who_trains_on_after_a_script_has_ended_may_leave() -> None:
    driver = running("a", "b", "c")
    driver.bye("b/0")
    driver.say("a/0", leaving=True)
    driver.wait(1)
    assert len(driver.worlds) == 1, "the others may be about to end, too"
    driver.breach("c/0")
    driver.wait()
    assert (driver.world.change, driver.world.members, driver.world.leaving) == ("failure", ("c/0",), ("a/0",))
    driver.enter("c/0")
    driver.bye("a/0")
    driver.start("d")
    driver.say("c/0", leaving=True)
    driver.wait()
    assert (driver.world.change, driver.world.members, driver.world.leaving) == ("planned", (), ("c/0",))


def test_a_script_whose_agent_says_that_it_failed_has_not_ended_the_job() -> None:
    """A process does not know its exit code when it says good-bye; until its agent has spoken nobody is sent home."""
    driver = running("a", "b")
    driver.membership.watched.update(a=driver.now, b=driver.now)
    driver.bye("b/0")
    driver.start("c")
    driver.wait(1)
    assert len(driver.worlds) == 1
    driver.membership.failed("b", driver.now)
    driver.wait()
    assert (driver.world.change, driver.world.lost, driver.world.members) == ("failure", ("b/0",), ("a/0",))
    driver.enter()
    driver.wait()
    assert driver.world.members == ("a/0", "c/0")
    driver.enter()
    driver.bye("a/0")
    driver.bye("c/0")
    driver.wait()
    assert not driver.finished
    driver.start("d")
    driver.membership.watched.clear()
    driver.wait()
    assert driver.finished == ["d/0"]


def test_the_last_member_can_leave() -> None:
    driver = running("a")
    driver.say("a/0", leaving=True)
    driver.wait()
    assert driver.world.members == () and driver.world.leaving == ("a/0",) and driver.world.paused
    driver.bye("a/0")
    driver.start("b")
    driver.wait()
    assert (driver.world.generation, driver.world.members, driver.world.survivors) == (3, ("b/0",), 0)


@pytest.mark.parametrize("comes", ["before", "after"])
def test_nodes_that_come_while_all_leave_begin_when_these_have_gone(comes: str) -> None:
    """They would begin without what the others hold, beside these, which still train."""
    driver = running("a", "b", most=2)
    if comes == "before":
        driver.start("c")
        driver.wait()
    driver.say("a/0", leaving=True)
    driver.say("b/0", leaving=True)
    driver.wait()
    assert driver.world.members == () and driver.world.leaving == ("a/0", "b/0") and driver.world.change == "planned"
    if comes == "after":
        driver.start("c")
    driver.bye("a/0")
    driver.wait(1)
    assert len(driver.worlds) == 2
    driver.bye("b/0")
    driver.wait()
    assert (driver.world.members, driver.world.leaving, driver.world.survivors) == (("c/0",), (), 0)


class TestRestart:
    def test_members_come_back_and_nothing_changes(self) -> None:
        driver = running("a", "b")
        driver.restart()
        for member in ("b/0", "a/0"):
            driver.announce(member)
        driver.wait(10)
        assert driver.world.generation == 1
        driver.start("c")
        driver.wait()
        assert (driver.world.generation, driver.world.term, driver.world.members) == (2, "2", ("a/0", "b/0", "c/0"))

    def test_who_does_not_come_back_is_lost(self) -> None:
        driver = running("a", "b", "c")
        driver.restart()
        driver.announce("c/0")
        driver.announce("a/0")
        driver.wait(10)
        assert (driver.world.change, driver.world.members, driver.world.lost) == ("failure", ("a/0", "c/0"), ("b/0",))
        assert driver.world.survivors == 2
        assert driver.fenced == ["b/0"], "it may hang, and nobody else will see to that"

    def test_a_newcomer_cannot_start_a_second_job(self) -> None:
        driver = running("a", "b")
        driver.restart()
        driver.start("c")
        driver.wait(1)
        driver.announce("a/0")
        driver.announce("b/0")
        driver.wait(10)
        assert driver.world.members == ("a/0", "b/0", "c/0")

    def test_the_newest_world_that_anybody_knows_counts(self) -> None:
        driver = running("a", "b")
        old = driver.world
        driver.start("c")
        driver.wait()
        driver.told["b/0"] = old  # the coordinator died before it told b
        driver.restart()
        for member in ("b/0", "a/0", "c/0"):
            driver.announce(member)
        driver.wait(4)
        assert driver.told["b/0"].generation == 2 and driver.told["b/0"].members == ("a/0", "b/0", "c/0")

    def test_who_was_left_behind_is_given_up(self) -> None:
        driver = running("a", "b", "c")
        driver.membership.lost("c/0", "the connection ended", driver.now)
        driver.wait()
        driver.enter()
        driver.restart()
        for member in ("c/0", "a/0", "b/0"):
            driver.announce(member)
        driver.wait(4)
        assert driver.fenced == ["c/0"] and driver.world.members == ("a/0", "b/0")

    def test_a_leaver_may_still_hand_over(self) -> None:
        driver = running("a", "b")
        driver.say("a/0", leaving=True)
        driver.wait()
        driver.restart()
        for member in ("a/0", "b/0"):
            driver.announce(member)
            driver.say(member)
        driver.wait(4)
        assert not driver.fenced and driver.world.generation == 2

    def test_all_are_back_and_it_goes_on_at_once(self) -> None:
        driver = running("a", "b")
        driver.restart()
        driver.announce("a/0")
        driver.start("c")
        driver.wait()
        assert driver.world.generation == 1
        driver.announce("b/0")
        driver.say("b/0")
        driver.wait()
        assert driver.world.members == ("a/0", "b/0", "c/0")

    def test_while_members_come_back_the_others_have_time(self) -> None:
        driver = running("a", "b", "c")
        driver.restart()
        for member in ("a/0", "b/0", "c/0"):
            driver.wait(2.5)
            driver.announce(member)
        driver.wait(10)
        assert driver.world.generation == 1 and not driver.fenced

    def test_time_in_which_nobody_listened_does_not_count(self) -> None:
        driver = running("a", "b")
        driver.restart()
        driver.announce("a/0")
        driver.now += 20.0  # the machine stood still
        driver.wait(1.0)
        driver.announce("b/0")
        driver.wait(10)
        assert driver.world.generation == 1 and not driver.fenced

    def test_a_worker_that_was_started_again_begins_nothing_while_members_may_live(self) -> None:
        driver = running("a", "b")
        driver.restart()
        driver.start("c", restarts=1)
        driver.wait(20)
        assert len(driver.worlds) == 1
        driver.announce("b/0")
        driver.announce("a/0")
        driver.wait()
        assert (driver.world.generation, driver.world.members) == (2, ("a/0", "b/0", "c/0"))

    def test_but_it_does_once_they_have_ended_themselves(self) -> None:
        driver = running("a")
        driver.restart()
        driver.start("c", restarts=1)
        driver.wait(29)
        assert len(driver.worlds) == 1
        driver.wait(2)
        assert (driver.world.generation, driver.world.members) == (1, ("c/0",))

    def test_a_job_that_was_begun_by_mistake_gives_way(self) -> None:
        driver = running("a", "b")
        driver.start("d")
        driver.wait()
        driver.enter()
        before = driver.world
        driver.restart()
        driver.start("c")
        driver.wait(4)
        driver.enter()
        assert driver.world.members == ("c/0",)
        for member in before.members:
            driver.announce(member)
        driver.wait()
        assert driver.membership.world == before and driver.fenced == ["c/0"]
        driver.wait(10)
        assert driver.membership.world == before

    def test_not_to_one_that_never_was_in_its_world(self) -> None:
        """Nobody of that job has come back who could hold anything."""
        driver = running("a")
        driver.start("b")
        driver.wait()
        driver.restart()
        driver.start("n")
        driver.wait(4)
        driver.enter("n/0")
        driver.announce("b/0")
        driver.say("b/0")
        driver.wait(4)
        assert driver.fenced == ["b/0"] and driver.world.members == ("n/0",)

    def test_a_leaver_of_a_job_begun_by_mistake_goes_with_it(self) -> None:
        driver = running("a")
        driver.restart()
        driver.start("n", "m")
        driver.wait(4)
        driver.enter()
        driver.say("m/0", leaving=True)
        driver.wait()
        assert driver.world.leaving == ("m/0",)
        old = next(world for world in driver.worlds if world.members == ("a/0",))
        driver.told["a/0"] = old
        driver.announce("a/0")
        driver.say("a/0")
        driver.wait(4)
        assert {*driver.fenced} == {"n/0", "m/0"} and driver.world.members == ("a/0",)

    def test_what_one_of_another_job_has_entered_is_no_matter_of_this_one(self) -> None:
        driver = running("a")
        driver.restart()
        driver.start("n", "m")
        driver.wait(4)
        driver.announce("a/0")
        driver.say("a/0")
        driver.die("a/0")
        driver.wait(4)
        driver.die("m/0")
        driver.wait()
        assert driver.world.members == ("n/0",) and driver.world.survivors == 0, "nobody has entered it"

    def test_who_has_begun_another_job_is_no_member_of_the_one_before(self) -> None:
        """It had not heard that the coordinator of before had let it in."""
        driver = running("a")
        driver.start("b")
        driver.wait()
        assert driver.told.pop("b/0").members == ("a/0", "b/0")
        driver.restart()
        driver.announce("b/0")
        driver.say("b/0")
        driver.wait(4)
        assert driver.world.members == ("b/0",) and driver.world.generation == 1
        driver.enter("b/0")
        driver.told["a/0"] = driver.worlds[-2]
        driver.announce("a/0")
        driver.say("a/0")
        driver.wait(4)
        assert set(driver.fenced) == {"b/0"} and driver.world.members == ("a/0",) and driver.world.lost == ("b/0",)

    def test_not_after_its_members_have_ended_themselves(self) -> None:
        driver = running("a", "b")
        driver.start("d")
        driver.wait()
        driver.restart()
        driver.start("c")
        driver.wait(31)
        with pytest.raises(PeerRefused, match="is over here"):
            driver.announce("a/0")

    def test_a_number_is_not_used_again_after_that(self) -> None:
        driver = running("a")
        before = driver.world
        driver.restart()
        driver.start("c")
        driver.wait(4)
        driver.enter("c/0")
        driver.start("d")
        driver.wait()
        assert driver.world.generation == 2
        driver.announce("a/0")
        driver.say("a/0")
        driver.start("e")
        driver.wait(4)
        assert driver.world.members == (*before.members, "e/0") and driver.world.generation == 3

    def test_a_leaver_that_does_not_come_back_has_handed_nothing_over(self) -> None:
        driver = running("a", "b")
        driver.say("a/0", leaving=True)
        driver.wait()
        driver.restart()
        driver.announce("b/0")
        driver.say("b/0")
        driver.wait(4)
        assert driver.world.change == "failure" and "a/0 broke off its hand-over" in driver.world.reason

    def test_a_leaver_that_others_went_on_without_is_told_so(self) -> None:
        driver = running("a", "b")
        driver.say("a/0", leaving=True)
        driver.wait()
        driver.enter("b/0")
        old = driver.told["a/0"]
        driver.start("c")
        driver.wait()
        assert driver.world.generation == 3
        driver.told["a/0"] = old
        driver.restart()
        for member in ("a/0", "b/0", "c/0"):
            driver.announce(member)
            driver.say(member)
        driver.wait(2)
        assert not driver.fenced and driver.told["a/0"].generation == 3

    def test_a_late_node_that_others_went_on_without_may_still_join(self) -> None:
        driver = running("a", "b")
        driver.start("c")
        driver.wait()
        driver.say("c/0", engines="building")
        old = driver.told["c/0"]
        driver.membership.lost("b/0", "the connection ended", driver.now)
        driver.wait()
        driver.enter("a/0")
        driver.told["c/0"] = old
        driver.restart()
        for member in ("a/0", "c/0"):
            driver.announce(member)
            driver.say(member)
        driver.wait(4)
        assert not driver.fenced and driver.told["c/0"].generation == 3
        driver.say("c/0", engines="built")
        driver.wait()
        assert driver.world.members == ("a/0", "c/0")

    def test_who_was_leaving_still_is_before_it_says_so_again(self) -> None:
        driver = running("a", "b")
        driver.say("a/0", leaving=True)
        driver.wait()
        driver.restart()
        driver.reports["a/0"] = driver.reports["b/0"]
        driver.announce("a/0")
        driver.wait(4)
        assert driver.world.change == "failure" and driver.world.leaving == ("a/0",)

    def test_of_two_jobs_the_one_that_has_made_steps_counts(self) -> None:
        driver = running("a", "b")
        driver.say("a/0", step=1)
        driver.start("c")
        driver.wait()
        begun = driver.world
        assert (begun.generation, begun.begun) == (2, True)
        driver.restart()
        for node in ("d", "e"):
            driver.start(node)
            driver.wait(4)
            driver.enter(f"{node}/0")
        assert (driver.world.generation, driver.world.begun) == (2, False)
        driver.restart()
        for member in ("e/0", "d/0", "a/0"):
            driver.announce(member)
            driver.say(member)
        driver.wait(4)
        assert driver.world.members[:1] == ("a/0",) and set(driver.fenced) >= {"d/0", "e/0"}

    def test_late_returns_are_refused(self) -> None:
        driver = running("a", "b")
        driver.restart()
        driver.announce("a/0")
        driver.wait(10)
        with pytest.raises(PeerRefused, match=r"given up|is over here"):
            driver.announce("b/0")


def test_those_given_up_are_remembered_as_many_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "REMEMBERED_GONE", 2)
    driver = running("a")
    for node in ("b", "c", "d"):
        driver.start(node)
        driver.membership.lost(f"{node}/0", "its connection ended", driver.now)
    for node in ("c", "d"):
        with pytest.raises(PeerRefused, match="was given up"):
            driver.start(node)
    driver.start("b")


def test_a_leaver_that_goes_before_it_hears_of_a_failure_is_not_waited_for() -> None:
    driver = running("a", "b", "c")
    driver.say("a/0", leaving=True)
    driver.wait()
    old = driver.told["a/0"]
    driver.breach("b/0")
    driver.wait()
    assert driver.world.change == "failure" and driver.world.leaving == ("a/0",)
    driver.told["a/0"] = old
    driver.bye("a/0")
    driver.wait()
    assert driver.world.change == "failure" and driver.world.leaving == ()


def test_what_cannot_be_is_refused() -> None:
    driver = running("a")
    with pytest.raises(PeerRefused, match="is over here"):
        driver.announce("a/0")
    del driver.told["a/0"]
    with pytest.raises(PeerRefused, match="is here already"):
        driver.announce("a/0")
    with pytest.raises(PeerRefused, match="takes back"):
        driver.membership.report("a/0", Report(), driver.now)
    with pytest.raises(PeerRefused, match="the newest is 1"):
        driver.say("a/0", entered=2)
    driver.sizes["b/3"] = 2
    with pytest.raises(PeerRefused, match="local rank 3 of 2"):
        driver.announce("b/3")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"min_nodes": 3, "max_nodes": 2}, "MIN <= MAX"),
        ({"min_nodes": 1, "max_nodes": 2, "silent_seconds": 1.0}, "three heartbeats"),
        ({"min_nodes": 1, "max_nodes": 2, "debounce_seconds": float("nan")}, "debounce_seconds"),
    ],
)
def test_settings_without_sense_are_refused(values: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings(**values)  # type: ignore[arg-type]


def test_the_status_has_ranks_first() -> None:
    driver = running("b", "a", most=2)
    driver.start("c")
    driver.start("d", is_ready=False)
    driver.say("a/0", step=7, layout="data=2")
    status = snapshot(driver.membership, "job", driver.now)
    assert [(one.member, one.rank, one.phase) for one in status.members] == [
        ("b/0", 0, "working"),
        ("a/0", 1, "working"),
        ("c/0", None, "waiting"),
        ("d/0", None, "warming"),
    ]
    assert status.members[1].step == 7 and status.generation == 1 and len(status.changes) == 1


def test_a_script_that_ends_by_itself_has_handed_nothing_over() -> None:
    driver = running("a", "b")
    driver.say("b/0", leaving=True)
    driver.wait()
    driver.bye("b/0", has_left=False)
    driver.wait()
    assert driver.world.change == "failure" and "its script ended by itself" in driver.world.reason


def test_once_all_have_entered_it_may_end_as_it_likes() -> None:
    driver = running("a", "b")
    driver.say("b/0", leaving=True)
    driver.wait()
    driver.enter("a/0")
    driver.bye("b/0", has_left=False)
    driver.wait()
    assert driver.world.generation == 2
