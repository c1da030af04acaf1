"""A worker's side, against a coordinator on a real socket: what it tells the script, and when its process ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ds_dynatrain.elastic import member as member_module
from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.elastic.connection import ask_to_leave
from ds_dynatrain.elastic.environment import WorkerPlace
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.member import Ending, Member
from ds_dynatrain.elastic.messages import Tally
from ds_dynatrain.elastic.token import Reading
from ds_dynatrain.errors import JobFinished, PeerRefused
from tests.elastic.relaying import relayed
from tests.elastic.served import ANY, SECONDS, Served, enter, serving, told
from tests.elastic.watched import READERS, status, switched


@dataclass
class Script:
    """Makes members and remembers what they said; all are stopped at the end."""

    members: list[Member] = field(default_factory=list)
    worlds: list[Generation] = field(default_factory=list)
    endings: list[tuple[Ending, str]] = field(default_factory=list)

    def member(self, address: Address, node: str, is_ready: bool = True, **settings: Any) -> Member:
        member = Member(
            WorkerPlace(node, 0, 1, address),
            on_end=lambda ending, reason: self.endings.append((ending, reason)),
            **{"on_world": self.hear, **settings},
        )
        self.members.append(member)
        member.start(SECONDS)
        if is_ready:
            member.ready()
        return member

    def hear(self, world: Generation) -> bool:
        self.worlds.append(world)
        return True


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr(member_module, "end_with_parent", lambda agent: None)
    script = Script()
    yield script
    for member in reversed(script.members):
        member.stop()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # several members in one process put back each other's
    signal.set_wakeup_fd(-1)


def joined(member: Member, after: int = 0) -> Generation:
    world = member.wait_for_world(after, SECONDS)
    member.enter(world)
    return world


def test_it_joins_and_hears_of_others(script: Script) -> None:
    with serving() as served:
        a = script.member(served.address, "a")
        assert joined(a).members == ("a/0",)
        a.progress(7, "data=1")
        b = served.join("b")
        assert told(b) == joined(a, after=1) == script.worlds[-1]
        enter(b, 2)
        assert wait_until(lambda: served.status().members[0].step == 7)
        b.close()
        world = joined(a, after=2)
        assert (world.change, world.members, world.rank("a/0")) == ("failure", ("a/0",), 0)
        assert a.is_newest(world) and not a.is_newest(script.worlds[0])


def test_a_failed_collective_is_told_to_all(script: Script) -> None:
    with serving(least=2) as served:
        a, b = script.member(served.address, "a"), served.join("b")
        a.broken(joined(a))
        assert told(b).generation == 1
        assert told(b) == a.wait_for_world(1, SECONDS)
        assert script.worlds[-1].change == "failure" and len(script.worlds[-1].members) == 2


def test_a_failed_collective_is_told_until_it_was_heard(script: Script) -> None:
    """A generation that knows nothing of it is published while the word is on its way."""
    with serving(least=2) as served:
        hears_on = threading.Event()

        def on_world(world: Generation) -> bool:
            hears_on.wait(10 * SECONDS)
            return world.broken > 0

        a, b = script.member(served.address, "a", on_world=on_world), served.join("b")
        world = told(b)
        assert wait_until(lambda: a.newest == world)
        a.enter(world)
        enter(b, 1)
        c = served.join("c")
        assert told(b) == told(c)
        assert a.is_newest(world), "it has not heard of that yet"
        a.breach()
        hears_on.set()
        aborted = told(b)
        assert aborted == told(c)
        assert (aborted.generation, aborted.change, aborted.broken) == (3, "failure", 2)
        assert a.wait_for_world(2, SECONDS) == aborted


def test_a_new_coordinator_learns_from_the_members(script: Script) -> None:
    with serving(least=2, recovery_seconds=1.0) as served:
        a, b = script.member(served.address, "a"), script.member(served.address, "b")
        assert joined(a) == joined(b)
        served.stop()
        time.sleep(0.3)
        assert not script.endings
        again = Served(served.settings, listener=listen(served.address, is_guarded=False))
        again.start()
        assert wait_until(lambda: len(again.status().members) == 2)
        assert wait_until(lambda: again.status().generation == 1)
        c = again.join("c")
        world = joined(a, after=1)
        assert world.members == (*script.worlds[0].members, "c/0") and world.term == "abc"
        assert told(c) == joined(b, after=1) == world
        again.stop()
    assert not script.endings


def test_without_a_coordinator_it_ends(script: Script) -> None:
    with serving() as served:
        joined(script.member(served.address, "a", orphan_seconds=0.5))
    assert wait_until(lambda: bool(script.endings))
    assert script.endings[0][0] is Ending.ORPHANED and "no coordinator for 0.5 s" in script.endings[0][1]


def test_who_was_given_up_ends(script: Script) -> None:
    """Silent, until the others have gone on without it."""
    with serving(least=3, silent_seconds=0.5) as served:
        script.member(served.address, "a", on_world=lambda world: time.sleep(2) is None)
        others = [script.member(served.address, node) for node in "bc"]
        for generation in range(2):
            for one in others:
                joined(one, after=generation)
        assert wait_until(lambda: bool(script.endings))
    assert script.endings[0][0] is Ending.GIVEN_UP and "no heartbeat" in script.endings[0][1]


def test_nobody_is_given_up_while_the_link_of_the_coordinator_is_cut(script: Script) -> None:
    with serving(least=3, silent_seconds=0.5) as served, relayed(served.address) as relay:
        members = [script.member(relay.address, node) for node in "abc"]
        for one in members:
            joined(one)
        relay.cut()
        time.sleep(1.5)
        relay.mend()
        time.sleep(1.0)
        status = served.status()
        assert status.generation == 1 and len(status.ranks) == 3 and not script.endings
        assert all(one.heard_seconds < 0.5 for one in status.members)


def test_a_connection_that_breaks_unnoticed_is_replaced(script: Script) -> None:
    """The coordinator lives and still holds the former connection, as after a time-out of some box in between."""
    with serving() as served, relayed(served.address) as relay:
        a = script.member(relay.address, "a")
        joined(a)
        a.progress(7, "data=1")
        others = []
        for generation in (2, 3, 4):
            relay.drop()
            others.append(served.join(f"b{generation}"))
            world = joined(a, after=generation - 1)
            assert (world.generation, world.change) == (generation, "planned")
            for one in others:
                enter(one, generation)
        assert wait_until(lambda: all(one.entered == 4 for one in served.status().members))
        assert served.status().members[0].step == 7 and not script.endings


def test_a_node_can_be_asked_to_leave(script: Script) -> None:
    with serving() as served:
        a, spare = script.member(served.address, "a"), script.member(served.address, "b", is_ready=False)
        joined(a)
        assert ask_to_leave(served.address, "a") == ("a/0",) == ask_to_leave(served.address, "a")
        assert a.wait_for_world(1, SECONDS).leaving == ("a/0",) and a.is_leaving
        ask_to_leave(served.address, "b")
        with pytest.raises(JobFinished, match="b/0 was told to leave"):
            spare.wait_for_world(0, SECONDS)


def test_a_node_without_work_goes_home_unless_it_has_to_stay(script: Script) -> None:
    with serving(least=2) as served:
        a, b, c, d = (script.member(served.address, node) for node in "abcd")

        def all_work() -> bool:
            for one in (a, b, c, d):
                if one.newest is not None:
                    one.enter(one.newest)
            return len(served.status().ranks) == 4

        assert wait_until(all_work) and a.min_nodes == 2
        served.coordinator.host_node = "b"
        with pytest.raises(PeerRefused, match="its agent hosts the coordinator"):
            a.send_home("b")
        for node in "cd":
            a.send_home(node)
        with pytest.raises(PeerRefused, match="the nodes that stay would be 1, and MIN is 2"):
            b.send_home("a")
        assert wait_until(lambda: c.is_leaving and d.is_leaving) and not (a.is_leaving or b.is_leaving)


def test_sigterm_means_leave(script: Script) -> None:
    seen: list[int] = []
    own = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with serving() as served:
            a = script.member(served.address, "a")
            joined(a)
            os.kill(os.getpid(), signal.SIGTERM)
            world = a.wait_for_world(1, SECONDS)
            assert a.is_leaving and world.members == () and world.leaving == ("a/0",)
            assert seen == [signal.SIGTERM], "a handler of the user's own is called, too"
            a.stop()
            assert wait_until(lambda: not served.status().members)
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(seen) == 2 and signal.set_wakeup_fd(-1) == -1, "all is as it was"
    finally:
        signal.signal(signal.SIGTERM, own)


def test_who_is_told_to_go_before_it_joined_can_go(script: Script) -> None:
    with serving(least=2) as served:
        a = script.member(served.address, "a")
        a.leave()
        with pytest.raises(JobFinished, match="told to leave"):
            a.wait_for_world(0, SECONDS)


def test_a_spare_is_sent_home(script: Script) -> None:
    with serving(most=1) as served:
        a, spare = script.member(served.address, "a"), script.member(served.address, "b")
        joined(a)
        with pytest.raises(TimeoutError, match="no generation after 0"):
            spare.wait_for_world(0, 0.2)
        a.stop()
        with pytest.raises(JobFinished):
            spare.wait_for_world(0, SECONDS)


def test_children_do_not_speak_for_it(script: Script) -> None:
    with serving(least=2) as served:
        a, b = script.member(served.address, "a"), served.join("b")
        joined(a)
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.2)
        assert not a.is_leaving and told(b).generation == 1


def test_another_coordinator_is_told_of_switches_again(script: Script) -> None:
    """Once each, with what this member has counted; that one knows nothing of before."""
    with serving(reading=Reading(ANY, READERS)) as served:
        a = script.member(served.address, "a")
        joined(a)
        a.switched(switched(1))
        a.progress(5, "data=1", tally=Tally(steps=5))
        assert wait_until(lambda: len(status(served.url)["switches"]) == 1)
        address = served.address
    a.switched(switched(2))
    with serving(address=address, reading=Reading(ANY, READERS), term="def") as served:
        assert wait_until(lambda: len(status(served.url)["switches"]) == 2)
        seen = status(served.url)
        assert [one["step"] for one in seen["switches"]] == [1, 2] and seen["counts"]["committed"] == 2
        assert seen["changes"][0]["kind"] == "taken over" and seen["counts"]["steps"] == 0
        a.progress(8, "data=1", tally=Tally(steps=8))
        assert wait_until(lambda: status(served.url)["counts"]["steps"] == 3)


def wait_until(holds: Callable[[], bool]) -> bool:
    """Whether it holds within a few seconds."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return False
