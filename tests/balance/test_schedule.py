"""The schedule: DeepSpeed's own commands, diagrams made by hand, and the same time command by command."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.balance import step_time
from ds_dynatrain.balance.deal import in_flight
from ds_dynatrain.balance.step_time import StageWork
from tests.balance.commands import buffer_count, commands

STAGES, MICRO_BATCHES = range(1, 9), range(1, 33)


def work(
    forward: Sequence[float],
    backward: Sequence[float],
    send: float | Sequence[float] = 0,
    returns: Any = True,
) -> StageWork:
    links = len(forward) - 1
    lasts, returned = np.broadcast_to(np.asarray(send, float), links), np.broadcast_to(returns, links)
    return StageWork(np.asarray(forward, float), np.asarray(backward, float), lasts, returned)


def test_commands_are_those_of_deepspeed() -> None:
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    for stages in STAGES:
        for micro_batches in MICRO_BATCHES:
            for stage in range(stages):
                theirs = schedule.TrainSchedule(micro_batches, stages, stage)
                said = [[(each.name, each.kwargs.get("buffer_id")) for each in step] for step in theirs.steps()]
                ours = [[(each.name, each.buffer) for each in step] for step in commands(stages, micro_batches, stage)]
                assert ours == said, (stages, micro_batches, stage)
                assert buffer_count(stages, micro_batches, stage) == theirs.num_pipe_buffers()


def test_no_stage_holds_more_than_is_said() -> None:
    for stages in STAGES:
        for micro_batches in MICRO_BATCHES:
            for stage in range(stages):
                held = most = 0
                for step in commands(stages, micro_batches, stage):
                    names = [each.name for each in step]
                    held += names.count("ForwardPass") - names.count("BackwardPass")
                    most = max(most, held)
                assert (held, most) == (0, in_flight(stages, micro_batches, stage))


def test_two_stages_two_micro_batches() -> None:
    """Forward 1, backward 2, messages free.

    seconds  0  1  2  3  4  5  6  7  8
    stage 0  F0 F1 .  .  B0 B0 .  B1 B1
    stage 1  .  F0 B0 B0 F1 B1 B1 .  .

    Stage 0 hands micro-batch 1 on only when it has taken the gradient of 0, at 4.
    """
    found = simulate(work([1, 1], [2, 2]), 2)
    assert found.ends.tolist() == [9, 7]
    assert found.busy.tolist() == [6, 6]
    assert found.ends.max() == 9


def test_two_unequal_stages() -> None:
    """The second takes three times as long: it never waits again once it has begun.

    seconds  0  1  2  ...
    stage 0  F0 F1, gradient of 0 at 10, B0 10-12, F2 12-13, gradient of 1 at 19, B1 19-21, gradient of 2 at 28, B2
    stage 1  F0 1-4, B0 4-10, F1 10-13, B1 13-19, F2 19-22, B2 22-28
    """
    found = simulate(work([1, 3], [2, 6]), 3)
    assert found.ends.tolist() == [30, 28]
    assert found.busy.tolist() == [9, 27]


def test_a_message_holds_up_both() -> None:
    """Half a second each way: F0 0-1, sent until 1.5, F0 1.5-2.5, B0 2.5-4.5, sent until 5, B0 5-7."""
    found = simulate(work([1, 1], [2, 2], send=0.5), 1)
    assert found.ends.tolist() == [7, 5]


def test_a_stage_hands_on_only_after_it_has_the_gradient() -> None:
    """DeepSpeed's order at a step: stage 0 takes the gradient of 0 before it sends the activations of 2."""
    forward, backward = [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]
    steps = list(commands(3, 4, 0))
    joint = [[each.name for each in step] for step in steps if len(step) == 3]
    assert joint and set(map(tuple, joint)) == {("RecvGrad", "SendActivation", "BackwardPass")}
    assert simulate(work(forward, backward), 4).ends.max() == by_commands(work(forward, backward), 4)[0]


def test_a_frozen_first_stage_runs_ahead() -> None:
    """Nothing comes back to it: it hands over its last micro-batch when the second stage takes that."""
    found = simulate(work([1, 1], [0, 2], returns=False), 3)
    assert found.ends.tolist() == [7, 10]
    assert found.busy.tolist() == [3, 9]


def test_one_stage_computes_all_the_time() -> None:
    found = simulate(work([1.5], [2.5]), 5)
    assert found.ends.max() == 20 and found.busy.tolist() == [20]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 16), (8, 8), (4, 2)])
def test_equal_stages_have_the_known_bubble(stages: int, micro_batches: int) -> None:
    """(M + P - 1) (f + b) where forward and backward take alike and messages are free."""
    assert simulate(work([1] * stages, [1] * stages), micro_batches).ends.max() == 2 * (micro_batches + stages - 1)


whole = st.integers(0, 12).map(float)


@st.composite
def works(draw: st.DrawFn) -> StageWork:
    stages = draw(st.integers(1, 6))
    lines = [draw(st.lists(whole, min_size=n, max_size=n)) for n in (stages, stages, stages - 1)]
    frozen = draw(st.integers(0, stages - 1))
    return work(*lines, returns=np.arange(stages - 1) >= frozen)


@given(works(), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_it_is_what_the_commands_take(given_work: StageWork, micro_batches: int) -> None:
    found = simulate(given_work, micro_batches)
    seconds, ends = by_commands(given_work, micro_batches)
    assert found.ends.tolist() == ends and found.ends.max() == seconds
    assert found.busy.tolist() == (micro_batches * (given_work.forward + given_work.backward)).tolist()
    assert found.ends.max() >= found.busy.max()


def test_it_is_so_up_to_eight_stages() -> None:
    """Of every number of stages and micro-batches whose commands were compared."""
    random = np.random.default_rng(3)
    for stages in STAGES:
        lines = [random.integers(0, 12, count).astype(float) for count in (stages, stages, stages - 1)]
        for micro_batches in MICRO_BATCHES:
            found = simulate(work(*lines), micro_batches)
            assert (found.ends.max(), found.ends.tolist()) == by_commands(work(*lines), micro_batches)


def simulate(given_work: StageWork, micro_batches: int) -> SimpleNamespace:
    ends, busy = step_time.simulate(given_work, micro_batches)
    return SimpleNamespace(ends=ends, busy=busy)


def by_commands(given_work: StageWork, micro_batches: int) -> tuple[float, list[float]]:
    """(seconds, end of each stage), command by command: a send and its receive begin when both sides are there."""
    stages = len(given_work.forward)
    lines = [[each for step in commands(stages, micro_batches, stage) for each in step] for stage in range(stages)]
    place, clock = [0] * stages, [Fraction(0)] * stages
    while any(place[stage] < len(line) for stage, line in enumerate(lines)):
        before = list(place)
        for stage, line in enumerate(lines):
            if place[stage] == len(line):
                continue
            name, micro_batch, _ = line[place[stage]]
            if name in ("ForwardPass", "BackwardPass"):
                clock[stage] += Fraction((given_work.forward if name == "ForwardPass" else given_work.backward)[stage])
            elif name in ("SendActivation", "SendGrad"):
                forth = name == "SendActivation"
                peer, link = (stage + 1, stage) if forth else (stage - 1, stage - 1)
                if forth or given_work.returns[link]:
                    wanted = ("RecvActivation" if forth else "RecvGrad", micro_batch)
                    if lines[peer][place[peer]][:2] != wanted:
                        continue
                    lasts = Fraction(given_work.send[link])
                    clock[stage] = clock[peer] = max(clock[stage], clock[peer]) + lasts
                    place[peer] += 1
            elif name == "RecvGrad" and not given_work.returns[stage]:
                pass
            elif name.startswith("Recv"):
                continue  # goes on with its send
            place[stage] += 1
        assert place != before, "nobody can go on"
    return float(max(clock)), [float(each) for each in clock]
