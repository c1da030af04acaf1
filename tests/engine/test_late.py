"""Late switches: masters and moments move during the first global batch, and the record comes before its step."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import ds_dynatrain
from ds_dynatrain.errors import CheckpointError, SwitchRefused
from ds_dynatrain.reshard.switch import Transaction
from ds_dynatrain.space import Layout
from ds_dynatrain.transfer import ReadyPlan, TransferStats, Transport
from tests.engine import axis_walks, faults, jobs
from tests.engine.models import Sequences, small_gpt
from tests.engine.pool import RankPool
from tests.engine.subjects import language_model
from tests.engine.test_offload import STAGE_0
from tests.engine.test_unused import WithExtra

CHANGES: tuple[jobs.Sizes, ...] = ((4, 1), (3, 2), (2, 3), (4, 3), (3, 0), (2, 2), (4, 0), (2, 1))
"""The layouts of a walk, from (2, 1): every stage grows and shrinks, or changes into another one."""
APART = 2
"""Steps between two switches."""


def settings(dtype: str, start: jobs.Sizes = (2, 1), late: bool = True, **more: Any) -> dict[str, Any]:
    """With a `dynatrain` block that says whether switches are late."""
    made = jobs.config(dtype, start, **more)
    return {**made, "dynatrain": {**made["dynatrain"], "late": late}}


ACCUMULATING = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}
OFFLOADED: dict[str, Any] = {
    "zero_optimization": {"stage": 1, "sub_group_size": 700, "offload_optimizer": {"device": "cpu"}},
}
WITH_ZERO = tuple(sizes for sizes in CHANGES if sizes[1])
"""BF16_Optimizer and the like are not there at stage 0."""
FULL = pytest.mark.full
KINDS = [
    pytest.param("bf16", CHANGES, {}, id="bf16", marks=FULL),
    pytest.param("fp32", CHANGES, ACCUMULATING, id="fp32 in micro-batches", marks=FULL),
    pytest.param("fp32", CHANGES, {}, id="fp32", marks=FULL),
    pytest.param("fp16", CHANGES, ACCUMULATING, id="fp16", marks=FULL),
    pytest.param("bf16 in fp32", WITH_ZERO, ACCUMULATING, id="bf16 in fp32", marks=FULL),
]


def walk_case(dtype: str, changes: tuple[jobs.Sizes, ...], more: dict[str, Any], late: bool) -> dict[str, Any]:
    """Walk over the changes; what this rank saw."""
    schedule = {APART * (number + 1): sizes for number, sizes in enumerate(changes)}
    record, model = jobs.Record(), small_gpt(dropout=0.1, norm=dtype == "fp32" and not more)
    with jobs.job(settings(dtype, late=late, **more), model) as made:
        jobs.train(made, APART * (len(changes) + 2), schedule, record)
        record.notes["calls"] = int(made.engine.module.calls)
        record.notes["scale"] = made.engine._host.scaling_state()
    return {"losses": record.losses, "events": record.events, "notes": record.notes}


@pytest.mark.parametrize(("dtype", "changes", "more"), KINDS)
def test_changes_train_as_without_it(
    pool: RankPool, dtype: str, changes: tuple[jobs.Sizes, ...], more: dict[str, Any]
) -> None:
    compare(pool, dtype, changes, more)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        pytest.param("fp32", CHANGES, marks=STAGE_0),
        pytest.param("bf16", CHANGES, marks=[FULL, STAGE_0]),
        pytest.param("fp32", WITH_ZERO, marks=FULL),
        pytest.param("bf16", WITH_ZERO, marks=FULL),
    ],
)
def test_offloaded(pool: RankPool, dtype: str, changes: tuple[jobs.Sizes, ...]) -> None:
    """Gradients that masters in host memory own are written to in the backward pass."""
    compare(pool, dtype, changes, OFFLOADED)


def compare(pool: RankPool, dtype: str, changes: tuple[jobs.Sizes, ...], more: dict[str, Any]) -> None:
    """The walk with late switches is the one without, bit by bit."""
    same: dict[str, Any] = {"dtype": dtype, "changes": changes, "more": more, "seconds": 180}
    plain, found = (pool.run(walk_case, late=late, **same) for late in (False, True))
    assert [rank["losses"] for rank in found] == [rank["losses"] for rank in plain]
    assert [rank["notes"] for rank in found] == [rank["notes"] for rank in plain]
    events, others = found[0]["events"], plain[0]["events"]
    assert len(events) == len(changes) == len(others)
    for event, other in zip(events, others, strict=True):
        assert event.certificate == other.certificate and event.step == other.step
        assert event.late_ms > 0 == other.late_ms, event.line()


# ---- what goes wrong -------------------------------------------------------------------------------------------------

FIRST_GENERATION, FIRST_AT, EACH = 2, 2, 3
"""Number and step of the first switch, and steps from one to the next."""
WHERE = 1
"""The member on which something goes wrong."""
REASONS = {
    "bit flip": rf"of '[\w.]+' {faults.WRONG}",
    "failing thread": r"member 1: RuntimeError: injected",
    "bit flip in the pause": rf"(weight|master) of '[\w.]+' {faults.WRONG}",
    "corrupted message": rf"of '[\w.]+' {faults.WRONG}",
}


@contextmanager
def injected(names: list[str]) -> Iterator[None]:
    """Inside the block the job's first late switch fails by the first name, its second by the second, and so on."""
    own = Transaction._execute

    def wrapped(self: Transaction, plan: ReadyPlan, transport: Transport, *link: Any) -> TransferStats:
        number = self.proposal.generation - FIRST_GENERATION
        name = names[number] if number < len(names) else ""
        is_late = threading.current_thread().name.startswith("dynatrain-late")
        if name == "failing thread" and is_late and self.control.member == WHERE:
            raise RuntimeError("injected")
        if (
            name == "corrupted message"
            and is_late
            and (plan.phases[0].pulls or any(len(each.sends) for each in plan.plan.rounds))
        ):
            with faults.corrupted(plan, transport):
                return own(self, plan, transport, *link)
        stats = own(self, plan, transport, *link)
        is_due = (name == "bit flip" and is_late) or (name == "bit flip in the pause" and not is_late)
        if is_due and self.target_rank == WHERE:
            moved = [
                (key, held)
                for key, held in self.target.items()
                if (key[0] in self.preparation.late_kinds(self.kinds)) == is_late and held.numel() > 8
            ]
            key, held = max(moved, key=lambda each: each[1].numel())
            assert not is_late or key not in self.preparation.kept
            held.view(torch.uint8)[20] ^= 1
        if name == "slow" and is_late:
            time.sleep(1.0)
        return stats

    with patch.object(Transaction, "_execute", wrapped):
        yield


def faulty_case(
    dtype: str, start: jobs.Sizes, target: jobs.Sizes, more: dict[str, Any], names: list[str], asks: bool
) -> dict[str, Any]:
    """Ask for one switch after the other, each of which fails, and for one more; or for none of those that fail."""
    end = FIRST_AT + EACH * len(names)
    schedule = [FIRST_AT + EACH * number for number in range(len(names))] if asks else []
    record, events, asked = jobs.Record(), dict[int, Any](), set[int]()
    config, model = settings(dtype, start, **more), WithExtra(small_gpt(dropout=0.1))
    config["zero_optimization"] = {**config["zero_optimization"], "stage": start[1]}
    with jobs.job(config, model) as made, injected(names):
        engine = made.engine
        while engine.idle or engine.global_steps < end:
            for batch in made.loader:
                step = engine.global_steps
                model.uses_extra = step < FIRST_AT or step % EACH == 0  # some void batches use it, some do not
                jobs.one_micro_batch(engine, batch, record)
                if engine.is_discarded:
                    record.losses.pop(step)
                    assert engine.idle or (engine.layout.data, engine.layout.zero_stage) in (start, target)
                    events[step] = engine.last_switch
                    continue
                if engine.micro_steps % engine.gradient_accumulation_steps():
                    continue
                events.setdefault(engine.global_steps - 1, engine.last_switch)
                if engine.global_steps in schedule and engine.global_steps not in asked:
                    asked.add(engine.global_steps)
                    jobs.ask(engine, target)
                if engine.global_steps >= end:
                    break
        record.notes["calls"] = int(engine.module.inner.calls)
    return {"losses": record.losses, "rates": record.rates, "notes": record.notes, "events": events}


@pytest.mark.parametrize(
    ("dtype", "start", "target", "more"),
    [
        ("bf16", (2, 1), (4, 2), {}),
        pytest.param("fp32", (3, 3), (2, 1), ACCUMULATING, marks=FULL),
        pytest.param("fp32", (2, 2), (2, 0), {}, marks=FULL),
        pytest.param("fp16", (4, 1), (2, 3), ACCUMULATING, marks=FULL),
        pytest.param("bf16", (2, 3), (3, 3), ACCUMULATING, marks=FULL),
        pytest.param("fp32", (2, 3), (3, 3), OFFLOADED, marks=FULL),
        pytest.param("fp32", (2, 2), (4, 1), OFFLOADED, marks=FULL),
    ],
)
def test_what_fails_is_dealt_again(
    pool: RankPool, dtype: str, start: jobs.Sizes, target: jobs.Sizes, more: dict[str, Any]
) -> None:
    names = list(REASONS)
    layouts: dict[str, Any] = {"dtype": dtype, "start": start, "target": target}
    same = {**layouts, "more": more, "names": names, "seconds": 120}
    expected = pool.run(faulty_case, asks=False, **same)
    found = pool.run(faulty_case, asks=True, **same)
    for rank in range(start[0]):
        mine, other = found[rank], expected[rank]
        for number, name in enumerate(names):
            event = mine["events"][FIRST_AT + EACH * number]
            assert event.outcome == "rolled_back" and event.generation == FIRST_GENERATION + number, (name, event)
            assert re.search(REASONS[name], event.reason), (name, event.reason)
        assert mine["losses"] == other["losses"] and mine["rates"] == other["rates"]
        assert mine["notes"] == other["notes"]


# ---- the window ------------------------------------------------------------------------------------------------------


def window_case(folder: str) -> dict[str, Any]:
    """In the middle of the first global batch, while bytes are on their way, ask for what has to wait."""
    said: dict[str, Any] = {"loss": []}
    asked = math.inf
    made_settings = settings("fp32", train_micro_batch_size_per_gpu=2)
    with jobs.job(made_settings, small_gpt(dropout=0.1)) as made, injected(["slow"]):
        engine = made.engine
        calls = {
            "switch": lambda: engine.switch(data=4),
            "save": lambda: engine.save(folder),
            "load": lambda: engine.load(folder),
            "save_checkpoint": lambda: engine.save_checkpoint(folder),
            "load_checkpoint": lambda: engine.load_checkpoint(folder),
            "update_param_groups": engine.update_param_groups,
        }
        for batch in made.loader:
            if engine._parts.awaits_late and not said.get("errors"):
                said["errors"] = {name: refusal_of(call) for name, call in calls.items()}
                said["evaluated"] = evaluated(engine, batch)
            loss = engine(*batch)
            engine.backward(loss)
            said["loss"].append(loss.item())
            if engine._parts.awaits_late:
                said["window_ms"] = 1e3 * (time.perf_counter() - asked)
            engine.step()
            if engine.micro_steps % engine.gradient_accumulation_steps():
                continue
            if engine.global_steps == 2 and engine.layout.data == 2:
                asked = time.perf_counter()
                engine.switch(data=3, at=2)
            if engine.global_steps == 3:
                said["event"] = engine.last_switch
            if engine.global_steps == 4:
                break
    return said


def evaluated(engine: Any, batch: Any) -> bool:
    """Whether the module gives one finite loss again and again without training, and goes on training."""
    engine.eval()
    with torch.no_grad():
        losses = [engine(*batch).item() for _ in range(2)]
    engine.train()
    return losses[0] == losses[1] and math.isfinite(losses[0])


def refusal_of(call: Callable[[], object]) -> str:
    """What it raises, in words."""
    try:
        call()
    except (SwitchRefused, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_has_to_wait_is_refused_by_name(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(window_case, folder=str(tmp_path))
    for rank in found[:3]:
        assert list(rank["errors"]) == [
            "switch",
            "save",
            "load",
            "save_checkpoint",
            "load_checkpoint",
            "update_param_groups",
        ]
        for name, error in rank["errors"].items():
            kind = "SwitchRefused" if name in ("switch", "update_param_groups") else "CheckpointError"
            assert error.startswith(kind) and "masters and moments" in error, (name, error)
        event = rank["event"]
        assert rank["evaluated"]
        assert event.outcome == "committed" and event.late_ms > 1000 and event.late_bytes > 0
    event = found[0]["event"]
    assert event.late_wait_ms > 0 and event.late_wait_ms + found[0]["window_ms"] > event.late_ms
    assert f"late: {event.late_bytes / 1e6:.1f} MB" in event.line()


def ending_case() -> dict[str, Any]:
    """The script ends at the boundary at which a late switch was entered."""
    with jobs.job(settings("bf16", (3, 1)), small_gpt()) as made:
        engine = made.engine
        for batch in made.loader:
            if engine._parts.awaits_late:
                break
            jobs.one_micro_batch(engine, batch, jobs.Record())
            if engine.global_steps == 2:
                jobs.ask(engine, (3, 3))
    return {"event": engine.last_switch, "layout": engine.layout}


def test_a_script_that_ends_in_the_window_goes_back(pool: RankPool) -> None:
    for rank in pool.run(ending_case)[:3]:
        assert rank["event"].outcome == "rolled_back" and "its script has ended" in rank["event"].reason
        assert rank["layout"].zero_stage == 1


# ---- what cannot be --------------------------------------------------------------------------------------------------


def refused_case(config: dict[str, Any], with_loader: bool = True) -> str:
    """What a late switch is refused with."""
    config["dynatrain"]["late"] = True
    engine, *_ = ds_dynatrain.initialize(model=small_gpt(), config=config)
    try:
        if with_loader:
            engine.loader(Sequences(), num_workers=0)
        return refusal_of(lambda: engine.switch(zero_stage=2)) if not engine.idle else ""
    finally:
        engine.destroy()


def test_what_is_refused(pool: RankPool, tmp_path: Path) -> None:
    lean = jobs.config("fp32", (4, 1))
    lean["dynatrain"] |= {"safety": "lean", "fallback": {"path": str(tmp_path)}}
    said = pool.run(refused_case, config=lean)
    assert all("late lean switches" in each for each in said)
    said = pool.run(refused_case, config=jobs.config("fp32", (4, 1)), with_loader=False)
    assert all("late switches without a loader" in each for each in said)


def test_muon_is_refused(pool: RankPool) -> None:
    muon = {"type": "Muon", "params": {"lr": 1e-3, "torch_adam": True}}
    said = pool.run(refused_case, config=jobs.config("fp32", (4, 1), optimizer=muon))
    assert all("late switches with Muon" in each for each in said)


def axes_case() -> str:
    """A late switch from a layout with another axis than data."""
    subject = language_model("llama of 4 kv")
    with axis_walks.started(subject, "fp32", Layout(data=2, tensor=2, zero_stage=1)) as made:
        return refusal_of(lambda: made.engine.switch(Layout(data=4, zero_stage=1), late=True))


def test_other_axes_are_refused(pool: RankPool) -> None:
    assert all("a late switch of data=2 tensor=2" in each for each in pool.run(axes_case))


def two_engines_case() -> str:
    """A late switch beside another engine."""
    made = []
    for _ in range(2):
        engine, *_ = ds_dynatrain.initialize(model=small_gpt(), config=jobs.config("fp32", (4, 1)))
        engine.loader(Sequences(), num_workers=0)
        made.append(engine)
    said = refusal_of(lambda: made[0].switch(zero_stage=2, late=True))
    for engine in made:
        engine.destroy()
    return said


def test_beside_another_engine(pool: RankPool) -> None:
    assert all("late switches beside another engine" in each for each in pool.run(two_engines_case))
