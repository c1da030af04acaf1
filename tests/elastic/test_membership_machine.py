"""The coordinator's decisions under any order of events: what holds after each one."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ds_dynatrain.elastic.generation import Generation, nodes_of
from ds_dynatrain.elastic.settings import Settings
from tests.elastic.driver import Driver
from tests.sets import examples


class Members(RuleBasedStateMachine):
    """Nodes come, die, hang and leave, also in the middle of a switch, and the coordinator is started anew."""

    driver: Driver

    @initialize(least=st.integers(1, 2), more=st.integers(0, 2))
    def begin(self, least: int, more: int) -> None:
        self.driver = Driver(Settings(least, least + more))
        self.nodes = 0
        self.dead: set[str] = set()
        self.checked = 0

    # -- what members do ---------------------------------------------------------------------------------------------

    @rule(size=st.integers(1, 2), is_ready=st.booleans())
    def come(self, size: int, is_ready: bool) -> None:
        self.nodes += 1
        self.driver.start(f"n{self.nodes}", size=size, is_ready=is_ready)

    @rule(data=st.data())
    def get_ready(self, data: st.DataObject) -> None:
        cold = [one for one in self._alive() if not self.driver.reports[one].ready]
        if cold:
            self.driver.say(data.draw(st.sampled_from(cold)), ready=True)

    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        late = [one for one in self._told_to_work() if not self._has_entered(one)]
        if late:
            self.driver.enter(data.draw(st.sampled_from(late)))

    @rule()
    def all_enter(self) -> None:
        for member in self._told_to_work():
            self.driver.enter(member)

    @rule(data=st.data())
    def be_told_to_leave(self, data: st.DataObject) -> None:
        self._on_one(data, lambda member: self.driver.say(member, leaving=True))

    @rule(data=st.data())
    def go_after_the_hand_over(self, data: st.DataObject) -> None:
        driver = self.driver
        free = [one for one in self._alive() if driver.reports[one].leaving and not self._works(one)]
        if free:
            member = data.draw(st.sampled_from(free))
            driver.bye(member)
            self.dead.add(member)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self._on_one(data, self._kill)

    @rule(data=st.data())
    def node_dies(self, data: st.DataObject) -> None:
        nodes = sorted(nodes_of(self._alive()))
        if nodes:
            node = data.draw(st.sampled_from(nodes))
            for member in self._alive():
                if nodes_of([member]) == {node}:
                    self._kill(member)

    @rule(data=st.data(), is_late=st.booleans())
    def break_a_collective(self, data: st.DataObject, is_late: bool) -> None:
        training = [one for one in self._told_to_work() if self.driver.reports[one].entered]
        if training:
            self.driver.breach(data.draw(st.sampled_from(training)), is_late)

    @rule(data=st.data())
    def fail_to_form(self, data: st.DataObject) -> None:
        working = self._told_to_work()
        if working:
            member = data.draw(st.sampled_from(working))
            self.driver.say(member, broken=self.driver.told[member].generation)

    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        self._on_one(data, self.driver.silent.add)

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.06, 0.06, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.driver.wait(seconds)

    @precondition(lambda self: bool(self.driver.worlds))
    @rule(data=st.data())
    def coordinator_is_started_anew(self, data: st.DataObject) -> None:
        """Members come back in any order; some die before they do."""
        driver, alive = self.driver, data.draw(st.permutations(self._alive()))
        driver.restart()
        deaths = data.draw(st.sets(st.sampled_from(alive), max_size=1)) if alive else set()
        for member in alive:
            if member in deaths or member in driver.silent:
                self.dead.add(member)
                continue
            driver.announce(member)
            driver.say(member)
            if member in driver.breaches:
                driver.breach(member)
        if driver.told.keys().isdisjoint(driver.membership.roster):  # nobody knows of the job before
            driver.worlds.clear()
            self.checked = 0
        driver.wait(driver.settings.recovery_seconds + 0.2)

    # -- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def every_new_world_follows_from_the_one_before(self) -> None:
        for place in range(self.checked, len(self.driver.worlds)):
            self._check(self.driver.worlds[place - 1] if place else None, self.driver.worlds[place])
        self.checked = len(self.driver.worlds)
        self.dead |= set(self.driver.fenced)

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        membership = self.driver.membership
        world = membership.world
        for entry in membership.roster.values():
            phase = membership.phase(entry)
            assert (phase == "working") <= (world is not None and entry.member in world.members)
            assert entry.member not in self.dead

    def teardown(self) -> None:
        """Left in peace, the job has all nodes that it may have."""
        driver = self.driver
        for member in driver.breaches.keys() & set(driver.membership.roster):
            driver.breach(member)  # late words arrive, too
        for _ in range(4):
            driver.wait(10.0)
            self._all_go_if_nobody_stays()
            for member in self._told_to_work():
                driver.enter(member)
            driver.wait()
        self.every_new_world_follows_from_the_one_before()
        for member in self.driver.breaches.keys() & set(driver.membership.roster):
            assert not self._works(member), f"{member} waits for ever for a word that its world is aborted"
        present = {entry.member for entry in driver.membership.roster.values() if entry.is_waiting}
        complete = {node for node in nodes_of(present) if self._is_whole(node, present)}
        world = driver.membership.world
        working = set() if world is None else set(world.members) & set(driver.membership.roster)
        spare = complete - nodes_of(working)
        assert not spare or len(nodes_of(working)) >= driver.settings.max_nodes or self._is_too_small(working, spare)

    def _check(self, old: Generation | None, new: Generation) -> None:
        driver, before = self.driver, () if old is None else old.members
        assert new.generation == (1 if old is None else old.generation + 1)
        assert len(nodes_of(new.members)) <= driver.settings.max_nodes
        assert new.paused == (len(nodes_of(new.members)) < driver.settings.min_nodes)
        stayed = [member for member in new.members if member in before]
        assert stayed == [member for member in before if member in new.members], "survivors keep their order"
        assert list(new.members[: len(stayed)]) == stayed, "newcomers follow"
        assert new.survivors <= len(stayed)
        assert set(new.members).isdisjoint(self.dead), "nobody comes back from the dead"
        assert set(new.lost) <= set(before)
        assert new.broken in (0 if old is None else old.broken, new.generation - 1)
        assert new.change == "failure" or new.broken == (0 if old is None else old.broken)
        if new.change == "planned" and old is not None:
            assert not new.lost
            assert set(new.members) != set(before), "a planned change changes something"
        if not before:
            assert len(nodes_of(new.members)) >= driver.settings.min_nodes or not new.members

    def _all_go_if_nobody_stays(self) -> None:
        driver, world = self.driver, self.driver.membership.world
        for member in () if world is None or world.members else world.leaving:
            if member in driver.membership.roster:
                driver.bye(member)
        driver.wait()

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _alive(self) -> list[str]:
        return sorted(self.driver.membership.roster)

    def _works(self, member: str) -> bool:
        world = self.driver.membership.world
        return world is not None and member in world.members

    def _told_to_work(self) -> list[str]:
        told = self.driver.told
        return [one for one in self._alive() if one in told and one in told[one].members and self._works(one)]

    def _has_entered(self, member: str) -> bool:
        return self.driver.reports[member].entered == self.driver.told[member].generation

    def _on_one(self, data: st.DataObject, act: object) -> None:
        alive = self._alive()
        if alive:
            assert callable(act)
            act(data.draw(st.sampled_from(alive)))

    def _kill(self, member: str) -> None:
        self.driver.membership.lost(member, "the connection ended", self.driver.now)
        self.dead.add(member)

    def _is_whole(self, node: str, present: set[str]) -> bool:
        mine = [member for member in present if nodes_of([member]) == {node}]
        return len(mine) == self.driver.sizes[mine[0]]

    def _is_too_small(self, working: set[str], spare: set[str]) -> bool:
        return not working and len(spare) < self.driver.settings.min_nodes


Members.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestMembers = Members.TestCase
