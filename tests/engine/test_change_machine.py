"""What members decide about generations, under any order of events: see `simulated`."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import event, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.simulated import Job, Member
from tests.sets import examples


class Processes(RuleBasedStateMachine):
    """They come, die and leave at any point, hear of it at different times; attempts fail, and boards are lost."""

    job: Job

    @initialize(
        nodes=st.integers(1, 3),
        more=st.integers(0, 2),
        stage=st.integers(0, 1),
        engines=st.integers(1, 2),
        widest=st.integers(1, 4),
        has_checkpoints=st.booleans(),
        has_buddies=st.booleans(),
    )
    def begin(
        self, nodes: int, more: int, stage: int, engines: int, widest: int, has_checkpoints: bool, has_buddies: bool
    ) -> None:
        self.job = Job(nodes, nodes + more, stage, engines, widest, has_checkpoints, has_buddies=has_buddies)
        self.count = nodes

    # -- what happens --------------------------------------------------------------------------------------------------

    @rule()
    def come(self) -> None:
        self.count += 1
        self.job.come(f"m{self.count}")

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self._on_one(data, self.job.kill)

    @rule(data=st.data())
    def be_told_to_leave(self, data: st.DataObject) -> None:
        def leave(member: Member) -> None:
            self.job.driver.say(member.id, leaving=True)
            member.elastic.member.leave()

        self._on_one(data, leave)

    @rule(data=st.data())
    def break_a_collective(self, data: st.DataObject) -> None:
        def breach(member: Member) -> None:
            if member.engines and member.engines[0].works:
                member.elastic.breach()
                member.say()

        self._on_one(data, breach)

    @rule(data=st.data())
    def lose_the_board(self, data: st.DataObject) -> None:
        def lose(member: Member) -> None:
            if member.engines and member.waits_in is None:
                member._carry_out(member.machine.board_is_lost("cut"))

        self._on_one(data, lose)

    @rule(votes=st.lists(st.booleans(), min_size=1, max_size=3))
    def attempts_will_fail(self, votes: list[bool]) -> None:
        self.job.votes = votes

    @rule(turns=st.lists(st.integers(1, 12), min_size=1, max_size=2))
    def newcomers_will_be_late(self, turns: list[int]) -> None:
        self.job.building = turns

    # -- how it goes on ------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def one_goes_on(self, data: st.DataObject) -> None:
        def go(member: Member) -> None:
            member.hear()
            member.turn()

        self._on_one(data, go)

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.06]))
    def wait(self, seconds: float) -> None:
        self.job.driver.wait(seconds)

    @rule(data=st.data(), turns=st.integers(1, 4))
    def all_go_on(self, data: st.DataObject, turns: int) -> None:
        self.job.driver.wait()
        for _ in range(turns):
            for member in data.draw(st.permutations(self.job.alive)) if self.job.alive else ():
                member.hear()
                member.turn()

    # -- what holds ----------------------------------------------------------------------------------------------------

    @invariant()
    def who_is_in_a_world_knows_its_members(self) -> None:
        """Also while others are still on their way into it."""
        for member in self.job.alive:
            for engine in member.engines:
                assert not engine.works or engine.number in engine.members

    def teardown(self) -> None:
        """Left in peace, all that live train in the newest generation, or have a reason why not."""
        job = self.job
        job.votes = []
        for _ in range(80):
            job.driver.wait()
            for member in job.alive:
                member.hear()
                member.turn()
        newest = job.driver.membership.world
        standing = [one for one in job.alive if newest is not None and one.id in newest.members]
        for member in job.alive:
            assert member.waits_in is None, f"{member.id} waits for ever in {member.waits_in}"
            assert not member.elastic.is_aborted, f"{member.id} has no world"
        for member in standing:
            assert member.elastic.world == newest, f"{member.id} is not where the others are: {member.machine.stage}"
        for place in range(job.engines):
            where = {(one.engines[place].layout, one.engines[place].members) for one in standing}
            assert len(where) <= 1, "all know who trains, and in what"
            working = [one.engines[place] for one in standing if one.engines[place].works]
            assert not standing or len(working) == len(working[0].members) == working[0].layout.world_size
            assert len({engine.generation for engine in working}) <= 1
            assert max((engine.step for engine in working), default=0) <= 1 + min(
                (engine.step for engine in working), default=0
            )
        before = [one.engines[0].step for one in standing]
        for _ in range(6):
            for member in job.alive:
                member.turn()
        assert all(
            one.engines[0].step > step or not one.engines[0].works for one, step in zip(standing, before, strict=True)
        ), "training goes on"

    def _on_one(self, data: st.DataObject, act: object) -> None:
        alive = self.job.alive
        if alive:
            assert callable(act)
            act(data.draw(st.sampled_from(alive)))


Processes.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestProcesses = Processes.TestCase


@given(data=st.data())
@settings(deadline=None, max_examples=examples(40))
def test_deaths_under_zero_with_buddies(data: st.DataObject) -> None:
    """One dies after the other, at any point of what follows from the death before; others come in their place."""
    process = Processes()
    process.job = job = Job(4, 4, 1, data.draw(st.integers(1, 2)), 4, False, has_buddies=True)
    went_back = 0

    def go_on(turns: int) -> None:
        nonlocal went_back
        for _ in range(turns):
            job.driver.wait()
            for member in data.draw(st.permutations(job.alive)) if job.alive else ():
                member.hear()
                member.turn()
                went_back += bool(member.restores_from)

    go_on(30)
    for number in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            job.come(f"spare{number}")
        go_on(data.draw(st.integers(0, 12)))
        if job.alive:
            job.kill(data.draw(st.sampled_from(job.alive)))
        go_on(data.draw(st.integers(0, 12)))
    process.teardown()
    errors = [one.end for one in job.members.values() if one.end.startswith("error")]
    are_all_dead = all(
        one.end == "dead" for one in job.members.values() if any(engine.copies for engine in one.engines)
    )
    assert not errors or are_all_dead or any("no sound copy of" in each for each in errors), errors
    event("restored" if went_back else "lost")
