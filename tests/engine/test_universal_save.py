"""`save_universal` and `load_universal` on living ranks: any layout to any other, bit by bit, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.adapters.worlds import build_world, drop
from ds_dynatrain.engine.restore import restore
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, jobs, oracle
from tests.engine.axis_walks import Subject
from tests.engine.pool import RankPool
from tests.engine.subjects import SUBJECTS
from tests.engine.transitions import TABLE, accepted, layout, pairs

STEPS, MORE = 3, 3
Find = Callable[[], Subject]


def saving_case(find: Find, dtype: str, at: Layout, target: Layout, folder: Path) -> Any:
    """Train and save; the state, and the losses that follow after a live switch to `target`, if that is another."""
    subject, state, losses = find(), None, list[float]()
    with axis_walks.started(subject, dtype, at) as made:
        engine, batches = made.engine, iter(made.loader)
        if not engine.idle:
            for _ in range(STEPS):
                subject.step(engine, next(batches))
            engine.save_universal(folder)
            state = oracle.gather(engine, subject.places)
            if target != at:
                engine.switch(target, at=engine.global_steps)
        losses += [subject.step(engine, next(batches)) for _ in range(MORE)]
    return state, losses


def loading_case(find: Find, dtype: str, target: Layout, folder: Path) -> Any:
    """Start in another layout, train a step on other data, load; the state, and the losses that follow."""
    subject = find()
    with axis_walks.started(subject, dtype, target) as made:
        engine, batches = made.engine, iter(made.loader)
        if engine.idle:
            return None, []
        subject.step(engine, next(batches))
        engine.load_universal(folder)
        return oracle.gather(engine, subject.places), [subject.step(engine, next(batches)) for _ in range(MORE)]
    return None, []


def restoring_case(find: Find, dtype: str, at: Layout, target: Layout, folder: Path) -> Any:
    """As after a failure: in the middle of a step, into a new world of members that worked, and others that did not."""
    subject = find()
    with axis_walks.started(subject, dtype, at) as made:
        engine, batches = made.engine, iter(made.loader)
        members = tuple(range(4 - target.world_size, 4))
        if not engine.idle:
            subject.step(engine, next(batches))
            batch = next(batches)
            engine.backward(engine(*batch))
        old = engine.world
        mine = engine.control.member
        if mine in members:
            ties, seconds = engine.vps.ties(target), engine.control.timeout_seconds
            world = build_world(engine.control.store, 9, mine, members, members, seconds, target, ties)
            found = restore(engine, target, members, world, folder)
            assert found.step == engine.global_steps == STEPS and engine.generation == 9
        if old is not None:
            engine.control.bury(drop(old))
        if mine not in members:
            engine.launch.install()
            engine.world = None
            return None, []
        state = oracle.gather(engine, subject.places)
        return state, [subject.step(engine, next(batches)) for _ in range(MORE)]
    return None, []


def compare(saved: list[Any], loaded: list[Any], target: Layout) -> None:
    """Every state that was loaded is the one that was saved, and the losses are those after a live switch."""
    state = saved[0][0]
    working = [each for each in loaded if each[0] is not None]
    assert len(working) == target.world_size
    for mine, _ in working:
        assert oracle.differences(state, mine) == [], target
    expected = [losses for _, losses in saved if losses]
    assert sorted(losses for _, losses in working) == sorted(expected), target


def round_trip(pool: RankPool, kind: str, source: str, target: str, folder: Path, dtype: str = "fp32") -> None:
    same = {"find": SUBJECTS[kind], "dtype": dtype, "folder": folder}
    saved = pool.run(saving_case, at=layout(source), target=layout(target), **same, seconds=120)
    loaded = pool.run(loading_case, target=layout(target), **same, seconds=120)
    compare(saved, loaded, layout(target))


@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [
        ("module", "d2z1", "d2z1"),
        ("module", "d4z0", "d3z3"),
        ("AutoTP", "d2t2z1", "t4z3"),
        ("PipelineModule", "p2d2z1", "d4z1"),
        ("AutoEP", "d4e2z1", "d2e2z3"),
    ],
)
def test_round_trip(pool: RankPool, tmp_path: Path, kind: str, source: str, target: str) -> None:
    round_trip(pool, kind, source, target, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "source", "target", "dtype"),
    [
        ("module", "d2z1", "d4z3", "bf16"),
        ("module", "d3z3", "d2z2", "fp16"),
        ("module", "d4z2", "d3z0", "bf16 in fp32"),
        ("PipelineModule", "p4z1", "p2d2z1", "bf16"),
        ("deepspeed.moe", "d2e2z1", "d4e4z2", "fp32"),
        ("Ulysses", "s2z3", "d2s2z1", "fp32"),
    ],
)
def test_more_round_trips(pool: RankPool, tmp_path: Path, kind: str, source: str, target: str, dtype: str) -> None:
    round_trip(pool, kind, source, target, tmp_path, dtype)


@pytest.mark.parametrize(("at", "target"), [("d3z1", "d3z3")])
def test_restore_in_a_new_world(pool: RankPool, tmp_path: Path, at: str, target: str) -> None:
    same = {"find": SUBJECTS["module"], "dtype": "bf16", "folder": tmp_path}
    saved = pool.run(saving_case, at=layout(at), target=layout(target), **same)
    damage(next(iter((tmp_path / f"step{STEPS}").glob("*.float32.arrow"))))
    pool.run(saving_case, at=layout("d2z2"), target=layout(target), **{**same, "folder": tmp_path / "whole"})
    (tmp_path / "whole" / f"step{STEPS}").rename(tmp_path / "older")
    loaded = pool.run(restoring_case, at=layout(at), target=layout(target), **same)
    compare(saved, loaded, layout(target))


def damage(file: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)


# ---- saved by itself ------------------------------------------------------------------------------------------------


def fallback_case(folder: Path) -> Any:
    """Periodic saves, by steps and by time, over a switch."""
    settings = jobs.config("fp32", (2, 1))
    settings["dynatrain"]["fallback"] = {"path": str(folder), "every_steps": 3, "every_seconds": 0.001, "keep": 4}
    record = jobs.run(settings, 8, {4: (4, 3)})
    return record.notes.get("last"), record.losses


def test_fallback_by_itself(pool: RankPool, tmp_path: Path) -> None:
    pool.run(fallback_case, folder=tmp_path)
    tags = sorted(each.name for each in tmp_path.iterdir() if not each.name.startswith("."))
    assert len(tags) == 5 and "latest" in tags
    assert {"step6", (tmp_path / "latest").read_text()} <= set(tags)


# ---- every pair of the table ----------------------------------------------------------------------------------------


def rewriting_case(find: Find, layouts: list[Layout], reference: Path, folder: Path) -> oracle.State | None:
    """The same state, written by every layout."""
    subject, state = find(), None
    for at in layouts:
        with axis_walks.started(subject, "fp32", at) as made:
            if not made.engine.idle:
                made.engine.load_universal(reference)
                made.engine.save_universal(folder, str(at).replace(" ", "_").replace("=", ""))
                state = oracle.gather(made.engine, subject.places)
    return state


def reading_case(find: Find, taken: list[tuple[Layout, Layout]], folder: Path, state: oracle.State) -> int:
    """Every pair: what the first layout wrote, loaded in the second."""
    subject, compared = find(), 0
    for target in sorted({target for _, target in taken}, key=str):
        with axis_walks.started(subject, "fp32", target) as made:
            for source in [source for source, end in taken if end == target] if not made.engine.idle else []:
                made.engine.load_universal(folder, str(source).replace(" ", "_").replace("=", ""))
                found = oracle.gather(made.engine, subject.places)
                assert oracle.differences(state, found) == [], (source, target)
                compared += 1
    return compared


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", TABLE)
def test_every_pair(pool: RankPool, tmp_path: Path, kind: str) -> None:
    rows = TABLE[kind]
    taken = pairs(rows.first + rows.others)
    layouts = [each for each in accepted(rows) if any(each in pair for pair in taken)]
    at = SUBJECTS[kind]().at
    same = {"find": SUBJECTS[kind]}
    pool.run(saving_case, dtype="fp32", at=at, target=at, folder=tmp_path / "first", **same)
    files = {"reference": tmp_path / "first", "folder": tmp_path / "all"}
    state = pool.run(rewriting_case, layouts=layouts, **files, **same, seconds=500)[0]
    compared = pool.run(reading_case, taken=taken, folder=tmp_path / "all", state=state, **same, seconds=600)
    assert compared[0] == len(taken)
