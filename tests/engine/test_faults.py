"""A switch that goes wrong between drain and commit is found out, rolled back on all members, and leaves no trace."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as td

from ds_dynatrain.adapters.versions import deepspeed_versions as versions
from tests.engine import faults, jobs, oracle
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool

NEEDS_ELEMENTS = versions.present().needs_elements
FIRST_AT, APART = 3, 6
"""Steps done at the first switch, and steps from one to the next."""
CHANGES: dict[str, tuple[jobs.Sizes, jobs.Sizes]] = {
    "2 to 4": ((2, 1), (4, 1)),
    "4 to 2": ((4, 1), (2, 1)),
    "stage 1 to 3": ((2, 1), (2, 3)),
    "2 to 3, stage 3 to 0": ((2, 3), (3, 0)),
}


def snapshot(engine: Any) -> dict[str, str]:
    """Hashes of all that training goes on from, gathered by the oracle, and of this rank's random stream."""
    state = oracle.gather(engine)
    found = {str(key): hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()) for key, flat in state.tensors.items()}
    found["rest"] = hashlib.sha256(repr((state.steps, state.groups, state.counters)).encode())
    found["stream"] = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    return {name: digest.hexdigest() for name, digest in found.items()}


def case(dtype: str, change: str, names: list[str], asks: bool) -> dict[str, Any]:
    """Train; ask for a switch again and again, each with its fault, and at the end without one. Or ask for none.

    "diverged replica" comes first: one frozen element differs on rank 1 until the next switch.
    """
    start, target = CHANGES[change]
    at = {FIRST_AT + APART * number: name for number, name in enumerate(names)}
    end = FIRST_AT + APART * len(names)
    compared = {begin + after for begin, name in at.items() for after in (1, APART) if after > 1 or not _diverges(name)}
    result: dict[str, Any] = {"record": jobs.Record(), "events": {}, "snapshots": {}}
    stale: faults.Stale = {}
    schedule = dict.fromkeys([*at, end], target) if asks else {}

    def each(made: jobs.Job) -> None:
        engine, step = made.engine, made.engine.global_steps
        if engine.rank == 1 and at.get(step - APART) == "diverged replica":
            frozen(engine)[3] *= 0.5
        result["events"][step] = engine.last_switch
        if step in compared:
            result["snapshots"][step] = snapshot(engine)
        if engine.rank == 1 and at.get(step) == "diverged replica":
            frozen(engine)[3] *= 2.0
        if at.get(step + 1) == "stale moment" and engine.rank == faults.WHERE:
            held = engine._host.state_buffers()[0]
            stale.update({key: buffer.clone() for key, buffer in held.items() if key[0] == "exp_avg"})

    settings = jobs.config(dtype, start)
    with jobs.job(settings, model=small_gpt(dropout=0.1)) as made, faults.injected(names, stale):
        try:
            faults.train(made, end + 2, schedule, result["record"], each)
        finally:
            result["last"] = made.engine.last_switch
    return result


def _diverges(name: str) -> bool:
    """Whether the replicas differ up to the next fault: then the oracle has no state to compare."""
    return name == "diverged replica"


def frozen(engine: Any) -> torch.Tensor:
    """A weight that no step changes, flat, as this rank holds it."""
    held = engine.module.places
    flat: torch.Tensor = getattr(held, "ds_tensor", held).detach().view(-1)
    return flat


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        ("fp32", "2 to 4"),
        pytest.param("bf16", "2 to 3, stage 3 to 0", marks=pytest.mark.full),
        pytest.param("bf16", "4 to 2", marks=pytest.mark.full),
        pytest.param("fp32", "stage 1 to 3", marks=pytest.mark.full),
    ],
)
def test_ten_faults_are_found_and_leave_no_trace(pool: RankPool, dtype: str, change: str) -> None:
    (start, stage), (target, _) = CHANGES[change]
    names = [name for name in faults.REASONS if name != "diverged replica" or stage < 3]
    names.sort(key=lambda name: name != "diverged replica")
    expected = pool.run(case, dtype=dtype, change=change, names=names, asks=False, seconds=120)
    found = pool.run(case, dtype=dtype, change=change, names=names, asks=True, seconds=120)
    for rank in range(start):
        mine, other = found[rank], expected[rank]
        for number, name in enumerate(names):
            begin = FIRST_AT + APART * number
            event = mine["events"][begin + 1]
            assert event.outcome == "rolled_back" and event.generation == faults.FIRST_GENERATION + number, (
                name,
                event,
            )
            assert re.search(faults.REASONS[name], event.reason), (name, event.reason)
            for step in range(begin, begin + APART):
                assert mine["record"].losses[step] == other["record"].losses[step], (name, rank, step)
                assert mine["record"].rates[step] == other["record"].rates[step], (name, rank, step)
            for step in (begin + 1, begin + APART)[_diverges(name) :]:
                assert mine["snapshots"][step] == other["snapshots"][step], (name, rank, step)
    for rank in range(max(start, target)):
        last = found[rank]["last"]
        assert last.outcome == "committed" and last.generation == faults.FIRST_GENERATION + len(names), last.reason


def empty_case() -> list[str]:
    """Why each stage is refused to a model with a parameter without elements."""
    model = small_gpt()
    model.none = torch.nn.Linear(8, 0)
    with jobs.job(jobs.config(start=(2, 0)), model=model) as made:
        return [made.engine.plan(data=3, zero_stage=stage).refusal for stage in range(4)]


def test_stages_that_need_elements_are_refused_to_a_model_with_an_empty_parameter(pool: RankPool) -> None:
    for refusals in pool.run(empty_case)[:2]:
        for stage, refusal in enumerate(refusals):
            assert bool(refusal) == (stage in NEEDS_ELEMENTS), (stage, refusal)
            assert not refusal or f"none.weight has no elements, and DeepSpeed's stage {stage} cannot" in refusal


def rehearsal_case() -> dict[str, Any]:
    """Member 2, which is idle, cannot build the optimizer of the first switch's layout, and can that of the second."""
    result: dict[str, Any] = {"record": jobs.Record()}
    model = small_gpt()
    if 1 not in NEEDS_ELEMENTS:
        model.none = torch.nn.Linear(8, 0)
    with jobs.job(jobs.config(start=(2, 1)), model=model) as made:
        host, number = made.engine._host, td.get_rank()
        attach, has_failed = host.attach, []

        def failing(*given: Any) -> None:
            attach(*given)
            if not has_failed:
                has_failed.append(True)
                raise RuntimeError("no room in this test\nand more lines")

        if number == 2:
            host.attach = failing

        def each(job: jobs.Job) -> None:
            if job.engine.global_steps == 7:
                result["first"] = job.engine.last_switch

        try:
            faults.train(made, 12, {4: (3, 1), 8: (3, 2)}, result["record"], each)
        finally:
            result["events"], result["last"] = result["record"].events, made.engine.last_switch
    return result


def test_what_an_idle_member_cannot_build_is_no_end(pool: RankPool) -> None:
    """All go on in the layout before, are told why, and the member takes part in the next switch."""
    found = pool.run(rehearsal_case)
    for rank in (0, 1):
        first, last = found[rank]["first"], found[rank]["last"]
        assert first.outcome != "committed" and "member 2 cannot build data=3" in first.reason
        assert "RuntimeError: no room in this test" in first.reason and "more lines" not in first.reason
        assert last.outcome == "committed" and sorted(last.target.members) == [0, 1, 2]
        assert len(found[rank]["record"].losses) == 12
    assert found[2]["last"].outcome == "committed"
