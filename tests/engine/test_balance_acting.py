"""Balance that acts: layers and samples move by themselves, and moves are judged by the clock."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from ds_dynatrain.report import read_events
from ds_dynatrain.reshard.switch import Transaction
from tests.engine import jobs
from tests.engine.burning import burning
from tests.engine.clocks import CLOCKS, STEP, clock
from tests.engine.pipeline_walks import layout, settings
from tests.engine.pool import RankPool
from tools.burning import WIDTH, Burn, Points, burn
from tools.launch import launch

SECONDS = (0.008, 0.004, 0.002, 0.002, 0.001, 0.001)
EVEN = layout(2, 1, 1, (0, 3, 6))
WORKING = 2
"""Of four members; the others are idle, so that two cores are enough for steps to take their time by the clock."""
FRONT = (0, 1, 6)
"""What is best for these seconds."""
BETTER, WORSE = {FRONT: 0.35}, {FRONT: 1.5}
"""Seconds that a step is said to take, by boundaries; `STEP` with all others. On shared cores a clock says little."""


def acting(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    """With a block that times a step of every four, and whose moves need not pay."""
    block = {"mode": "act", "every_steps": 4, "safety": 0.0, **more}
    return {**given, "dynatrain": {**given["dynatrain"], "balance": block}}


def trained(
    given: dict[str, Any], model: Any, steps: int, each: Any = None, seconds: Mapping[Any, float] | None = BETTER
) -> tuple[list[float], list[Any]]:
    """Losses of a pipeline, and the events of its switches, the last one also if it failed.

    seconds: of its steps, by its boundaries; None: what the clock says.
    """
    events: list[Any] = []
    engines: list[Any] = []

    def step_seconds() -> float:
        return (seconds or {}).get(engines[0].layout.boundaries, STEP)

    with clock(seconds is not None, step_seconds), jobs.job(given, model, data=Points(), groups=False) as made:
        engines.append(made.engine)
        made.engine.on_switch(events.append)
        losses = []
        while made.engine.idle or made.engine.global_steps < steps:
            if each is not None and not made.engine.idle:
                each(made.engine)
            losses.append(made.engine.train_batch().item())
        last = made.engine.last_switch
        is_missing = last is not None and last.generation not in {event.generation for event in events}
        return losses, [*events, last] if is_missing else events
    return [], events


def moving(file: str, block: bool, said: bool) -> tuple[list[float], list[Any]]:
    given = settings(EVEN, train_batch_size=24)
    given["dynatrain"]["report"] = {"jsonl": file}
    return trained(acting(given) if block else given, burning(SECONDS), 17, seconds=BETTER if said else None)


@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
@pytest.mark.parametrize("said", CLOCKS)
def test_layers_move_to_where_the_time_is(pool: RankPool, tmp_path: Any, said: bool) -> None:
    file = tmp_path / "switches.jsonl"
    ranks = pool.run(moving, file=str(file), block=True, said=said, seconds=120)
    losses, events = ranks[0]
    assert all(rank[0] == losses for rank in ranks[:WORKING])
    first = events[0]
    assert tuple(first.target.layout["boundaries"]) == FRONT and first.bytes_sent == first.bytes_minimum > 0
    assert first.cause == "balance" and first.predicted_gain >= 0.03 and first.step <= 10
    written = read_events(file)
    assert written[0].predicted_gain == first.predicted_gain and written[0].measured_gain is not None
    assert not said or written[0].measured_gain == pytest.approx(0.3)
    assert "for balance: predicted gain" in written[0].line() and "measured" in written[0].line()
    assert losses == pool.run(moving, file=str(tmp_path / "none"), block=False, said=said, seconds=120)[0][0]


class Placed(nn.Module):
    """A layer that takes longer on some stages than on others, and so long on one that it has no business there."""

    def __init__(self, seconds: float, by_stage: Sequence[float]) -> None:
        super().__init__()
        self.matrix, self.seconds, self.by_stage, self.stage = nn.Linear(WIDTH, WIDTH), seconds, by_stage, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seconds = self.seconds * self.by_stage[STAGE[0]]
        burn(seconds)
        made: torch.Tensor = Burn.apply(self.matrix(hidden), 2 * seconds, [])
        return made


STAGE = [0]


def placed() -> PipelineModule:
    """Six layers; the second one costs eight times as much on the second stage, which nobody can know before."""
    layers = [LayerSpec(Placed, each, (1.0, 8.0 if place == 1 else 1.0)) for place, each in enumerate(SECONDS)]
    return PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss())


def harmed(said: bool) -> list[Any]:
    given = acting(settings(EVEN, train_batch_size=24), safety=0.2)

    def note_stage(engine: Any) -> None:
        STAGE[0] = engine.layout.coordinate(engine.rank)["pipe"]

    return trained(given, placed(), 26 if said else 36, note_stage, WORSE if said else None)[1]


@pytest.mark.full
@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
@pytest.mark.parametrize("said", CLOCKS)
def test_a_move_that_made_steps_slower_is_taken_back(pool: RankPool, said: bool) -> None:
    """A layer turns out to cost more where it was moved to. Predictions then count for half, so the next try waits."""
    events = pool.run(harmed, said=said, seconds=120)[0]
    cuts = [tuple(event.target.layout["boundaries"]) for event in events]
    assert cuts[:2] == [FRONT, EVEN.boundaries]
    assert events[1].cause == "balance" and events[1].step - events[0].step <= 20
    assert len(events) == 2 or events[2].step >= events[1].step + 15


def asking(at: int) -> tuple[list[float], list[Any]]:
    """The script asks at a step, for what balance would not: while a move of balance's is on its way, or before it."""

    def ask(engine: Any) -> None:
        if engine.global_steps == at:
            engine.switch(layout(2, 1, 0, (0, 2, 6)))

    return trained(acting(settings(EVEN, train_batch_size=24)), burning(SECONDS), 12, ask)


@pytest.mark.parametrize("at", [6, pytest.param(7, marks=pytest.mark.full)])
def test_a_switch_of_the_script_goes_first(pool: RankPool, at: int) -> None:
    """The second window ends with step 7, and balance asks there."""
    for _, events in pool.run(asking, at=at, seconds=120)[:WORKING]:
        assert events[0].cause == "" and events[0].target.layout["zero_stage"] == 0
        assert all(event.outcome == "committed" for event in events)


def failing() -> tuple[list[float], list[Any]]:
    """The first switch fails on all before its vote."""
    whole, left = Transaction._verify, [True]

    def fail(self: Transaction, *arguments: Any) -> Any:
        if left and left.pop():
            raise RuntimeError("on purpose")
        return whole(self, *arguments)

    with patch.object(Transaction, "_verify", fail):
        return trained(acting(settings(EVEN, train_batch_size=24), safety=0.2), burning(SECONDS), 26)


@pytest.mark.full
@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
def test_a_move_that_fails_is_tried_again_after_the_cooldown(pool: RankPool) -> None:
    for _, events in pool.run(failing, seconds=120)[:WORKING]:
        assert tuple(events[0].target.layout["boundaries"]) == FRONT and events[0].generation == 3
        assert events[0].step >= 8 + 6


class Paced(nn.Module):
    """A model of which a member burns so much for each sample. pace: by member."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.matrix, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        seconds = self.seconds * PACE[0] * len(hidden)
        burn(seconds)
        made = Burn.apply(self.matrix(hidden), 2 * seconds, [])
        return (made - wanted).square().mean()


PACE = [1.0]


def slowed(
    pace: float, from_step: int, steps: int, ranks: int, said: bool, until: int = 10**6, **more: Any
) -> tuple[list[float], list[Any]]:
    """Rank 1 is slow from a step on, until another one."""
    given = jobs.config(start=(ranks, 1), train_batch_size=24, train_micro_batch_size_per_gpu=12)
    events: list[Any] = []
    losses: list[float] = []
    slowest = [1.0]
    with (
        clock(said, lambda: 0.04 * slowest[0]),
        jobs.job(acting(given, **more), Paced(0.001), data=Points(), groups=False) as made,
    ):
        engine = made.engine
        engine.on_switch(events.append)
        mine = engine.rank == 1
        while engine.idle or engine.global_steps < steps:
            for batch in made.loader:
                now = pace if from_step <= engine.global_steps < until else 1.0
                shares = engine.layout.shares or (24 // ranks,) * engine.layout.data
                slowest[0] = max(share * (now if rank == 1 else 1.0) for rank, share in enumerate(shares)) / 6
                PACE[0] = now if mine else 1.0
                loss = engine(*batch)
                engine.backward(loss)
                losses.append(float(engine.mean(loss, made.loader.samples)))
                engine.step()
                if engine.global_steps >= steps:
                    break
    return losses, events


@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
@pytest.mark.parametrize("said", CLOCKS)
@pytest.mark.parametrize(
    ("pace", "ranks", "answer"),
    [
        pytest.param(2.0, 4, {"data": 4, "shares": [7, 3, 7, 7]}, id="fewer samples"),
        pytest.param(40.0, 4, {"data": 3}, id="let go", marks=pytest.mark.full),
        pytest.param(4.0, 2, {"data": 2}, id="an idle member takes its place"),
    ],
)
def test_a_slow_member_is_answered(pool: RankPool, pace: float, ranks: int, answer: dict[str, Any], said: bool) -> None:
    """With a quarter of the speed and one other, an idle member is worth more than other shares."""
    found = pool.run(slowed, pace=pace, from_step=6, steps=24, ranks=ranks, said=said, seconds=120, slow_steps=9)
    losses, events = found[0]
    assert events and events[0].cause == "balance" and 6 < events[0].step <= 6 + 9 + 5
    layout = {name: size for name, size in events[0].target.layout.items() if name in ("data", "shares")}
    assert layout == answer
    has_stayed = "shares" in answer
    assert (1 in events[0].target.members) == has_stayed and (events[0].bytes_sent == 0) == has_stayed
    plain = pool.once(slowed, pace=1.0, from_step=0, steps=24, ranks=4, said=True, seconds=120, slow_ratio=None)[0]
    assert plain[1] == [] and jobs.furthest(losses, plain[0]) <= 1e-6


@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
def test_samples_come_back_to_a_member_that_is_well_again(pool: RankPool) -> None:
    given = {"pace": 2.0, "from_step": 6, "until": 30, "steps": 44, "ranks": 4, "said": True, "slow_steps": 9}
    losses, events = pool.run(slowed, seconds=120, **given)[0]
    assert [event.target.layout.get("shares") for event in events] == [[7, 3, 7, 7], None]
    assert 6 < events[0].step <= 6 + 9 + 5 and 30 < events[1].step <= 30 + 9
    assert len(losses) == 44 and all(event.cause == "balance" for event in events)


@pytest.mark.full
@pytest.mark.not_on_device("there are cores of their own")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need a core each")
def test_a_busy_neighbor_is_answered_while_it_is_there() -> None:
    """Nothing in the ranks is slow: other processes have the core of one for most of the time."""
    given = {"begin": 5.0, "end": 25.0, "stop": 35.0, "neighbors": 2, "balance": {"mode": "act", "slow_steps": 9}}
    note = launch("slow_ranks.py", 2, 300, **given)[0][0]
    first, *_, last = [shares for _, shares, _ in note["moves"]]
    more, fewer = json.loads(first)
    assert more > fewer and last == "None"
    assert "of the slow-down is removed" in note["advice"]


class Slowing(nn.Module):
    """A layer that takes longer while its member is slow."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.matrix, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seconds = self.seconds * PACE[0] * len(hidden)
        burn(seconds)
        made: torch.Tensor = Burn.apply(self.matrix(hidden), 2 * seconds, [])
        return made


def slowed_pipeline(pace: float, acts: bool) -> tuple[list[float], list[Any]]:
    """Rank 0, of two pipelines of two stages, becomes slow."""

    def each(engine: Any) -> None:
        PACE[0] = pace if engine.rank == 0 and engine.global_steps >= 6 else 1.0

    given = settings(layout(2, 2, 1, (0, 1, 2)), train_batch_size=24)
    layers = [LayerSpec(Slowing, 0.001) for _ in range(2)]
    model = PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss())
    try:
        return trained(acting(given, slow_steps=9) if acts else given, model, 22, each)
    finally:
        PACE[0] = 1.0


@pytest.mark.full
@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
def test_the_pipeline_of_a_slow_member_runs_fewer_micro_batches(pool: RankPool) -> None:
    """Two of eight, in the time in which the other one runs six; no layer could be given away."""
    losses, events = pool.run(slowed_pipeline, pace=3.0, acts=True, seconds=120)[0]
    assert events[0].cause == "balance" and 6 < events[0].step <= 6 + 9 + 5
    assert tuple(events[0].target.layout["shares"]) == (6, 18) and events[0].bytes_sent == 0
    plain = pool.run(slowed_pipeline, pace=1.0, acts=False, seconds=120)[0]
    assert plain[1] == [] and jobs.furthest(losses, plain[0]) <= 1e-6


def widened() -> list[Any]:
    given = acting(settings(layout(2, 2, 1, (0, 3, 6)), train_batch_size=24), shape="any")
    return trained(given, burning((0.002,) * 6), 16)[1]


@pytest.mark.full
@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
def test_other_shapes_of_the_same_members(pool: RankPool) -> None:
    """Without a pipeline nobody waits for a neighbour."""
    events = pool.run(widened, seconds=120)[0]
    assert events[0].cause == "balance"
    assert (events[0].target.layout["pipe"], events[0].target.layout["data"]) == (1, 4)
