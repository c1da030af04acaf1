"""Lean safety: a switch through a checkpoint, which never holds both sides, and what is left when it goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.engine.checkpoints import saving
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, faults, jobs, oracle
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool
from tests.engine.subjects import SUBJECTS
from tests.engine.transitions import layout

WALK: dict[int, jobs.Sizes] = {2: (4, 1), 4: (3, 3), 6: (2, 0), 8: (1, 2), 10: (4, 3), 12: (2, 1)}
WHERE = 1
"""The rank that something goes wrong on."""


def settings(dtype: str, safety: str, folder: Path) -> dict[str, Any]:
    made = jobs.config(dtype)
    made["dynatrain"] |= {"safety": safety, "fallback": {"path": str(folder)}}
    return made


def walk_case(dtype: str, safety: str, folder: Path) -> Any:
    """A walk; what was seen on it, and the state at its end."""
    record = jobs.Record()
    with jobs.job(settings(dtype, safety, folder), model=small_gpt(dropout=0.1)) as made:
        jobs.train(made, 14, WALK, record)
        record.notes["state"] = oracle.gather(made.engine)
    return record


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_walk_as_with_a_live_switch(pool: RankPool, tmp_path: Path, dtype: str) -> None:
    expected = pool.run(walk_case, dtype=dtype, safety="rollback", folder=tmp_path / "live", seconds=120)
    found = pool.run(walk_case, dtype=dtype, safety="lean", folder=tmp_path / "lean", seconds=120)
    for mine, other in zip(found, expected, strict=True):
        assert mine.losses == other.losses and mine.rates == other.rates
        assert mine.notes.keys() == other.notes.keys()
        if mine.notes:
            assert not oracle.differences(mine.notes["state"], other.notes["state"])
        assert [event.target for event in mine.events] == [event.target for event in other.events]
        assert [event.certificate for event in mine.events] == [event.certificate for event in other.events]
        assert all(event.bytes_sent == 0 for event in mine.events)
    assert sum(len(rank.events) for rank in found) >= 2 * len(WALK)
    assert (tmp_path / "lean" / "latest").exists() and not (tmp_path / "live").exists()


# ---- other axes -----------------------------------------------------------------------------------------------------


def axis_case(kind: str, path: list[Layout], folder: Path) -> Any:
    """Through the layouts of a path; the last one is where it began. The state there before and after, and losses."""
    subject = SUBJECTS[kind]()
    block = {"safety": "lean", "fallback": {"path": str(folder)}} if folder.name == "lean" else {}
    losses, states = list[float](), list[Any]()
    with axis_walks.started(subject, "fp32", path[0], **block) as made:
        engine, batches = made.engine, iter(made.loader)
        for target in path[1:]:
            losses += [subject.step(engine, next(batches)) for _ in range(2)]
            states.append(oracle.gather(engine, subject.places))
            engine.switch(target, at=engine.global_steps)
        losses.append(subject.step(engine, next(batches)))
        states.append(oracle.gather(engine, subject.places))
    return losses, states


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("AutoTP", "d2t2z1 > t4z3 > d4z2 > d2t2z1"),
        ("AutoEP", "d4e2z1 > d4e4z3 > d4z2 > d4e2z1"),
        ("PipelineModule", "p2d2z1 > p4z1 > d4z0 > p2d2z1"),
        ("deepspeed.moe", "d4e2z1 > d4e4z2 > d4z1 > d4e2z1"),
        ("Ulysses", "d2s2z1 > d4z3 > d2s2z1"),
    ],
)
def test_other_axes(pool: RankPool, tmp_path: Path, kind: str, path: str) -> None:
    layouts = [layout(each) for each in path.split(" > ")]
    found = pool.run(axis_case, kind=kind, path=layouts, folder=tmp_path / "lean", seconds=200)
    expected = pool.run(axis_case, kind=kind, path=layouts, folder=tmp_path / "live", seconds=200)
    for (losses, states), (other_losses, other_states) in zip(found, expected, strict=True):
        assert losses == other_losses
        for mine, other in zip(states, other_states, strict=True):
            assert not oracle.differences(mine, other)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def _fails(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def _flips(fill: Callable[..., None]) -> Callable[..., None]:
    def filled(self: Reader, vps: Any, layout: Any, rank: int, buffers: Any, *more: Any) -> None:
        fill(self, vps, layout, rank, buffers, *more)
        next(iter(buffers.values())).view(-1)[0] += 1.0

    return filled


def _ends(fill: Callable[..., None]) -> Callable[..., None]:
    def filled(self: Reader, *arguments: Any) -> None:
        raise MemoryError("no memory for the target")

    return filled


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "disk full": (lambda: mock.patch.object(saving, "write_shares", _fails), "No space left"),
    "not what was written": (lambda: mock.patch.object(Reader, "is_sound", lambda *_: False), "not what was written"),
    "no memory": (lambda: mock.patch.object(Reader, "fill", once(_ends)), "no memory for the target"),
    "a flipped bit": (lambda: mock.patch.object(Reader, "fill", once(_flips)), "is not what was saved"),
}


def once(changed: Callable[[Callable[..., None]], Callable[..., None]]) -> Callable[..., None]:
    """What is wrong when the target is read, and not when the source is read again."""
    fill, calls = Reader.fill, list[int]()

    def filled(self: Reader, *arguments: Any) -> None:
        calls.append(1)
        (changed(fill) if len(calls) == 1 else fill)(self, *arguments)

    return filled


@contextmanager
def wrong(name: str, member: int) -> Iterator[None]:
    if name and member == WHERE:
        with FAULTS[name][0]():
            yield
    else:
        yield


def fault_case(name: str, target: jobs.Sizes, folder: Path) -> Any:
    """Train; ask for a switch in which something goes wrong; train on, and switch again."""
    record = jobs.Record()
    with jobs.job(settings("fp32", "lean", folder), model=small_gpt(dropout=0.1)) as made:
        engine = made.engine
        with wrong(name, engine._parts.control.member):
            faults.train(made, 5, {3: target} if name else {}, record, lambda made: None)
        record.notes["event"], record.notes["state"] = engine.last_switch, oracle.gather(engine)
        faults.train(made, 8, {6: target}, record, lambda made: None)
        record.notes["after"] = engine.last_switch
    return record


@pytest.mark.parametrize(
    "name", [name if name == "a flipped bit" else pytest.param(name, marks=pytest.mark.full) for name in FAULTS]
)
def test_what_goes_wrong_ends_where_it_began(pool: RankPool, tmp_path: Path, name: str) -> None:
    target = (2, 3)
    expected = pool.run(fault_case, name="", target=target, folder=tmp_path / "none", seconds=120)
    found = pool.run(fault_case, name=name, target=target, folder=tmp_path / "faulty", seconds=120)
    for mine, other in zip(found[:2], expected[:2], strict=True):
        event = mine.notes["event"]
        assert event.outcome == "rolled_back" and FAULTS[name][1] in event.reason, event
        assert mine.losses == other.losses and mine.rates == other.rates
        assert not oracle.differences(mine.notes["state"], other.notes["state"])
        assert mine.notes["after"].outcome == "committed"


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory_case(safety: str, folder: Path) -> Any:
    """A switch of a model of some size: (bytes of state before, after, what the event says, growth of the process)."""
    made_for = settings("fp32", safety, folder)
    made_for["dynatrain"]["memory_budget_bytes"] = 1 << 22
    with jobs.job(made_for, model=small_gpt(width=512, hidden=1024, depth=3)) as made:
        engine = made.engine
        jobs.train(made, 2)
        before = held(engine)
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark so far is forgotten
        begin = resident("VmRSS")
        jobs.ask(engine, (2, 3))
        next(iter(made.loader))
        return before, held(engine), engine.last_switch.peak_memory_bytes, resident("VmHWM") - begin
    return None


def held(engine: Any) -> int:
    return sum(part.numel() * part.element_size() for part in engine._host.state_buffers()[0].values())


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def test_both_sides_are_never_held(pool: RankPool, tmp_path: Path) -> None:
    found = {safety: pool.run(memory_case, safety=safety, folder=tmp_path / safety) for safety in ("rollback", "lean")}
    for rank in range(2):
        before, after, peak, growth = found["lean"][rank]
        assert peak == max(before, after)
        live_before, live_after, live_peak, live_growth = found["rollback"][rank]
        assert (live_before, live_after) == (before, after) and live_peak >= before + after // 2
        assert growth <= live_growth - after // 2, (growth, live_growth, before, after)
