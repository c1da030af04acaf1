"""Members that wake and members that idle: what they hold, take over, and run."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as td

import ds_dynatrain
from tests.engine import jobs
from tests.engine.models import Sequences, small_gpt
from tests.engine.pool import RankPool


def holdings(engine: Any, largest: int) -> dict[str, Any]:
    """Bytes of parameters and gradients, entries of the state, tensors above `largest` elements anywhere."""
    parameters = list(engine.module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gc.collect()
    found = [held for held in gc.get_objects() if type(held) in (torch.Tensor, torch.nn.Parameter)]
    return {
        "parameters": sum(parameter.data.untyped_storage().nbytes() for parameter in parameters),
        "gradients": sum(gradient.untyped_storage().nbytes() for gradient in gradients),
        "states": len(engine.basic_optimizer.state),
        "large": [
            in_words(held) for held in found if not held.is_meta and held.untyped_storage().nbytes() > 4 * largest
        ],
        "resident": jobs.resident_bytes(),
    }


def in_words(held: torch.Tensor) -> str:
    """What it is."""
    return f"{tuple(held.shape)} {held.dtype} on {held.device}, a part of {held.untyped_storage().nbytes()} bytes"


def idling_case(start: jobs.Sizes, target: jobs.Sizes, width: int) -> Any:
    """What a member holds while it works and while it is idle; the model is some megabytes."""
    seen: dict[str, Any] = {"calls": 0}
    model = small_gpt(width=width, hidden=4 * width)
    largest = width * width // 2
    numel = sum(parameter.numel() for parameter in model.parameters())
    data = Sequences(60)

    def on_idle(engine: Any) -> None:
        seen["calls"] += 1
        if (seen["calls"] <= 2 and "working" in seen) or seen["calls"] == 1:
            seen["idle"] = holdings(engine, largest)

    with jobs.job(jobs.config(start=start), model=model, data=data, on_idle=on_idle) as made:
        del model

        def note(job: jobs.Job) -> None:
            seen["working"] = holdings(job.engine, largest)

        jobs.train(made, 5, {2: target}, each=note)
    return seen, numel


@pytest.mark.parametrize(
    "start", [pytest.param((4, 0), marks=pytest.mark.full), pytest.param((4, 1), marks=pytest.mark.full), (4, 3)]
)
def test_idle_member_holds_nothing(pool: RankPool, start: jobs.Sizes) -> None:
    """What is large is larger than the table of the digest's kernel, 256 KiB, which stays on a card."""
    seen = pool.run(idling_case, start=start, target=(1, 2), width=400, seconds=120)
    for rank in (1, 2, 3):
        (notes, numel) = seen[rank]
        idle = notes["idle"]
        assert {name: idle[name] for name in ("parameters", "gradients", "states", "large")} == {
            "parameters": 0,
            "gradients": 0,
            "states": 0,
            "large": [],
        }, rank
        state = {0: 12, 1: 4 + 8 // 4, 3: 12 // 4}[start[1]] * numel
        assert notes["working"]["resident"] - idle["resident"] > 0.6 * state, rank
        assert notes["calls"] > 2, "again and again"


@pytest.mark.full
def test_member_that_starts_idle_holds_nothing(pool: RankPool) -> None:
    seen = pool.run(idling_case, start=(2, 3), target=(2, 1), width=160, seconds=120)
    for notes, _ in seen[2:]:
        assert [notes["idle"][name] for name in ("parameters", "gradients", "states", "large")] == [0, 0, 0, []]
        assert "working" not in notes and notes["calls"] > 2


class Average:
    """An exponential average of one number, as a user would carry it."""

    def __init__(self) -> None:
        self.value = torch.zeros(3)
        self.name = "blank"

    def update(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * loss
        self.name = f"after {loss}"

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "name": self.name, "nested": [{"twice": 2 * self.value}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["nested"][0]["twice"], 2 * state["value"])
        self.value, self.name = state["value"].clone(), state["name"]


def listening_case(
    start: jobs.Sizes, schedule: jobs.Schedule, note: str, model: dict[str, Any], steps: int = 8
) -> tuple[list[Any], jobs.Record | None]:
    """`note` names what is written down before and after every switch, with the rank."""
    seen: list[Any] = []
    average = Average()
    torch.manual_seed(100 + td.get_rank())
    with jobs.job(jobs.config(start=start), model=small_gpt(**model)) as made:
        made.engine.register_for_checkpointing("average", average)

        def look(moment: str) -> None:
            step, rank = made.engine.global_steps, made.engine.rank
            seen.append((moment, step, rank, NOTES[note](made, average)))

        def each(job: jobs.Job) -> None:
            average.update(float(job.engine.global_steps + job.engine.rank))
            if job.engine.global_steps in schedule:
                look("before")

        made.engine.on_switch(lambda event: look("after") if not made.engine.idle else None)
        return seen, jobs.train(made, steps, schedule, each=each)
    return seen, None


def _carried(made: jobs.Job, average: Average) -> Any:
    return average.value.tolist(), average.name


def _buffers(made: jobs.Job, average: Average) -> Any:
    return {name: held.tolist() for name, held in made.engine.module.named_buffers()}


def _stream(made: jobs.Job, average: Average) -> Any:
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()


NOTES: dict[str, Callable[[jobs.Job, Average], Any]] = {"carried": _carried, "buffers": _buffers, "stream": _stream}


def by_moment(results: list[Any], key: str) -> dict[tuple[str, int], dict[int, Any]]:
    """(moment, step) -> rank or member (as `key` says) -> what was noted."""
    found: dict[tuple[str, int], dict[int, Any]] = {}
    for member, (notes, _) in enumerate(results):
        for moment, step, rank, value in notes:
            found.setdefault((moment, step), {})[rank if key == "rank" else member] = value
    return found


@pytest.mark.parametrize("note", ["carried", pytest.param("buffers", marks=pytest.mark.full)])
def test_woken_members_take_over_from_rank_0(pool: RankPool, note: str) -> None:
    schedule = {2: (4, 3), 4: (1, 1), 6: (3, 2)}
    seen = by_moment(
        pool.run(listening_case, start=(2, 1), schedule=schedule, note=note, model={"norm": True}), "member"
    )
    assert seen["before", 2][0] != seen["before", 2][1], "each member has its own"
    for step, (fewer, more) in {2: (2, 4), 6: (1, 3)}.items():
        before, after = seen["before", step], seen["after", step]
        assert (len(before), len(after)) == (fewer, more)
        assert after == {member: before.get(member, before[0]) for member in after}, "rank 0 is member 0"


def test_streams_stay_with_their_place(pool: RankPool) -> None:
    schedule = {2: (4, 3), 4: (2, 1), 6: (3, 0)}
    seen = by_moment(
        pool.run(listening_case, start=(2, 1), schedule=schedule, note="stream", model={"dropout": 0.3}), "rank"
    )
    for step in schedule:
        before, after = seen["before", step], seen["after", step]
        assert all(after[rank] == before[rank] for rank in after.keys() & before.keys())
        assert len(set(after.values())) == len(after), "no two places draw the same numbers"


def dropout_case(schedule: jobs.Schedule) -> jobs.Record:
    return jobs.run(jobs.config(), 8, schedule, model=small_gpt(dropout=0.3))


def test_dropout_goes_on_as_if_nothing_had_happened(pool: RankPool) -> None:
    static = jobs.global_losses(pool.run(dropout_case, schedule={}))
    assert jobs.global_losses(pool.run(dropout_case, schedule={2: (2, 2), 5: (2, 1)})) == static
    other = jobs.global_losses(pool.run(dropout_case, schedule={2: (2, 3), 5: (2, 0)}))
    assert other[:3] == static[:3] and jobs.furthest(other, static) <= 1e-6


def normed_case(target: jobs.Sizes) -> Any:
    """What asking for `target` says, with 8 samples and a BatchNorm in the model."""
    settings = jobs.config(train_batch_size=8)
    with jobs.job(settings, model=small_gpt(norm=True)) as made:
        record = jobs.train(made, 2)
        refusal = None
        try:
            jobs.ask(made.engine, target)
        except ds_dynatrain.SwitchRefused as error:
            refusal = error.reason, error.way_out
        return refusal, list(jobs.train(made, 4, record=record).losses)
    return None


def test_batch_norm_is_refused_where_shares_are_unequal(pool: RankPool) -> None:
    first, second, *_ = pool.run(normed_case, target=(3, 1))
    assert first == second
    (reason, way_out), steps = first
    assert "BatchNorm" in reason and "batch_norm" in reason and "data" in way_out
    assert steps == [0, 1, 2, 3], "training went on"


def two_engines_case() -> tuple[str, str, int]:
    with jobs.job(jobs.config()) as made:
        words = ""
        try:
            ds_dynatrain.initialize(model=small_gpt(), config=jobs.config())
        except ds_dynatrain.DynatrainError as error:
            words = str(error)
        kind, steps = type(made.engine).__name__, 0
        jobs.train(made, 3)
        steps = made.engine.global_steps
        return kind, words, steps
    return "idle", words, 0


def test_second_engine_beside_idle_members_is_refused(pool: RankPool) -> None:
    results = pool.run(two_engines_case)
    assert all("leaves 2 of 4 processes idle" in words for _, words, _ in results)
    assert [steps for _, _, steps in results] == [3, 3, 0, 0]


def in_turn_case() -> list[int]:
    """One engine after the other is fine."""
    steps = []
    for sizes in ((2, 3), (4, 2), (1, 1), (3, 3)):
        with jobs.job(jobs.config(start=sizes)) as made:
            jobs.train(made, 2, {1: (4, 1)})
            steps.append(made.engine.global_steps)
    return steps


@pytest.mark.full
def test_engines_in_turn(pool: RankPool) -> None:
    assert pool.run(in_turn_case)[0] == [2, 2, 2, 2]


def forgotten_case(start: jobs.Sizes, schedule: jobs.Schedule) -> bool:
    """Whether the model of a job that is over is gone."""
    model = small_gpt()
    remembered = weakref.ref(model)
    jobs.run(jobs.config(start=start), 5, schedule, model=model)
    del model
    gc.collect()
    return remembered() is None


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param({}, id="no switch", marks=pytest.mark.full),
        pytest.param({2: (4, 3), 3: (2, 1)}, id="through stage 3"),
    ],
)
def test_a_destroyed_engine_lets_its_model_go(pool: RankPool, schedule: jobs.Schedule) -> None:
    assert pool.run(forgotten_case, start=(2, 3), schedule=schedule) == [True] * 4
