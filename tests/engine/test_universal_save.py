"""`engine.save` and `engine.load` on living ranks: any layout to any other, bit by bit, and what follows."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as td

from ds_dynatrain.adapters.groups.worlds import WorldSpec, build_world, drop
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.engine.checkpoints.restore import restore
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.fallback import extension as fallback
from ds_dynatrain.membership.control import Control
from ds_dynatrain.reshard.core import OpenBatch
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, jobs, oracle
from tests.engine.axis_walks import Subject
from tests.engine.models import Sequences, small_gpt
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
            engine.save(folder)
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
        engine.load(folder)
        return oracle.gather(engine, subject.places), [subject.step(engine, next(batches)) for _ in range(MORE)]
    return None, []


@contextmanager
def record_that_breaks(board: Control) -> Iterator[None]:
    """A board whose store dies before the decision is there."""
    decide, wait = board.decide, board.wait

    def dies(key: str, value: Any) -> Any:
        if key.endswith("record"):
            raise RuntimeError("Broken pipe")
        return decide(key, value)

    def waits(keys: Mapping[int, str], *arguments: Any, **named: Any) -> Any:
        if any(key.endswith("record") for key in keys.values()):
            raise RuntimeError("Broken pipe")
        return wait(keys, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "decide", dies)
        patch.setattr(board, "wait", waits)
        yield


def restoring_case(find: Find, dtype: str, at: Layout, target: Layout, folder: Path, breaks: bool = False) -> Any:
    """As after a failure: in the middle of a step, into a new world of members that worked, and others that did not.

    breaks: there is an attempt before, whose store dies when all is loaded.
    """
    subject = find()
    with axis_walks.started(subject, dtype, at) as made:
        engine, batches = made.engine, iter(made.loader)
        members = tuple(range(4 - target.world_size, 4))
        if not engine.idle:
            subject.step(engine, next(batches))
            batch = next(batches)
            engine.backward(engine(*batch))
        old = engine._parts.world
        mine = engine._parts.control.member
        if mine in members:
            sides = mine, members, members, target, engine._parts.vps.ties(target)
            store, seconds = engine._parts.control.store, engine._parts.control.timeout_seconds
            if breaks:
                world = build_world(store, WorldSpec(8, *sides), seconds)
                world.connect(seconds)
                with record_that_breaks(engine._parts.control), pytest.raises(RuntimeError, match="Broken pipe"):
                    restore(engine._parts, target, members, world, folder, [], lambda tag: tag == "older")
                assert engine.idle and engine.optimizer is engine.basic_optimizer
                engine._parts.control.teardowns.add(drop(world))
            world = build_world(store, WorldSpec(9, *sides), seconds)
            world.connect(seconds)
            damaged = list[str]()
            with pytest.raises(CheckpointDamaged):
                restore(engine._parts, target, members, world, folder, damaged)
            found = restore(engine._parts, target, members, world, folder, damaged)
            assert found.step == engine.global_steps == STEPS and engine.generation == 9
            assert found.path.name == "older", "the latest one is damaged"
        if old is not None:
            engine._parts.control.teardowns.add(drop(old))
        if mine not in members:
            engine._parts.launch.install()
            engine._parts.world = None
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
        pytest.param("module", "d2z1", "d2z1", marks=pytest.mark.full),
        ("module", "d4z0", "d3z3"),
        pytest.param("AutoTP", "d2t2z1", "t4z3", marks=pytest.mark.full),
        pytest.param("PipelineModule", "p2d2z1", "d4z1", marks=pytest.mark.full),
        pytest.param("AutoEP", "d4e2z1", "d2e2z3", marks=pytest.mark.full),
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
        ("module", "d4z1", "d3z1", "bf16 in fp32"),
        ("PipelineModule", "p4z1", "p2d2z1", "bf16"),
        ("deepspeed.moe", "d2e2z1", "d4e4z2", "fp32"),
        ("Ulysses", "s2z3", "d2s2z1", "fp32"),
    ],
)
def test_more_round_trips(pool: RankPool, tmp_path: Path, kind: str, source: str, target: str, dtype: str) -> None:
    round_trip(pool, kind, source, target, tmp_path, dtype)


@pytest.mark.full
@pytest.mark.parametrize("breaks", [False, True], ids=["at once", "after one whose store died"])
@pytest.mark.parametrize(("at", "target"), [("d3z1", "d3z3")])
def test_restore_in_a_new_world(pool: RankPool, tmp_path: Path, at: str, target: str, breaks: bool) -> None:
    same = {"find": SUBJECTS["module"], "dtype": "bf16", "folder": tmp_path}
    saved = pool.run(saving_case, at=layout(at), target=layout(target), **same)
    shutil.copytree(tmp_path / f"step{STEPS}", tmp_path / "older")
    damage(tmp_path / f"step{STEPS}")
    loaded = pool.run(restoring_case, at=layout(at), target=layout(target), breaks=breaks, **same)
    compare(saved, loaded, layout(target))


def damage(path: Path) -> str:
    """Change one bit of a moment in a checkpoint, or put it back; where that is."""
    row = next(row for row in Saved.open(path).manifest if row.kind == "exp_avg" and row.file.startswith("00001"))
    with (path / row.file).open("r+b") as file:
        file.seek(row.offset + row.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(row.offset + row.nbytes // 2)
        file.write(bytes([byte ^ 4]))
    return str(row)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


class Counter:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.values = {"seen": torch.zeros(3), "name": "first"}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


def trouble_case(folder: Path, calm: bool) -> Any:
    """Train; between the steps saves and loads that fail, unless `calm`. The losses, and what was said."""
    said: dict[str, str] = {}

    def fails(name: str, call: Callable[[], Any], kind: type[Exception] = CheckpointError) -> None:
        try:
            call()
        except kind as error:
            said[name] = str(error)

    with jobs.job(jobs.config("fp32", (3, 2)), small_gpt(norm=True, dropout=0.1)) as made:
        engine, record = made.engine, jobs.Record()
        if engine.idle:
            return None
        counter = engine.register_for_checkpointing("counter", Counter())
        batches = iter(made.loader)
        for step in range(6):
            if step == 2:
                counter.values["seen"] += 5
                engine.save(folder, "good")
            if step == 4 and not calm:
                path = folder / "good"
                fails("taken", partial(engine.save, folder, "good"))
                fails("name", partial(engine.save, folder, "../x"))
                fails("file", partial(engine.save, folder / "good" / "manifest.arrow"))
                fails("none", partial(engine.load, folder, "other"))
                fails("differ", partial(engine.save, folder, f"mine{engine.rank}"))
                fails("open", partial(_in_a_window, engine, folder))
                if engine.rank == 0:
                    damage(path)
                fails("damaged", partial(engine.load, folder), CheckpointDamaged)
                if engine.rank == 0:
                    damage(path)
                fails("other model", partial(_with_other_name, engine, folder))
            jobs.one_micro_batch(engine, next(batches), record)
        after = {name: held.clone() for name, held in engine.module.named_buffers()}
        engine.load(folder, "good")
        counter.values["seen"] -= 5
        late = engine.loader(Sequences(), num_workers=0, name="late")
        return record.losses, said, counter.values["seen"].tolist(), after, late.cursor
    return None


def _in_a_window(engine: Any, folder: Path) -> None:
    """As if a loader had dealt a micro-batch."""
    engine._parts.open_batch = OpenBatch(True)
    try:
        engine.save(folder)
    finally:
        engine._parts.open_batch = OpenBatch()


def _with_other_name(engine: Any, folder: Path) -> None:
    """A model whose third tensor has another name."""
    line = engine._parts._space.line
    third = line.tensors[2]
    name = third.name
    object.__setattr__(third, "name", "renamed")
    try:
        engine.load(folder)
    finally:
        object.__setattr__(third, "name", name)


def test_failures_leave_no_trace(pool: RankPool, tmp_path: Path) -> None:
    calm = pool.run(trouble_case, folder=tmp_path / "calm", calm=True)
    found = pool.run(trouble_case, folder=tmp_path / "trouble", calm=False)
    words = {
        "taken": "there is a 'good' in",
        "name": "letters, digits",
        "file": "nothing was saved",
        "none": "no checkpoint",
        "differ": "ask for different things",
        "open": "window is open",
        "damaged": "exp_avg of ",
        "other model": "no such parameter",
    }
    for rank in range(3):
        assert found[rank][0] == calm[rank][0], "the losses of a run without any of it"
        assert found[rank][1].keys() == words.keys()
        for name, expected in words.items():
            assert expected in found[rank][1][name], (name, found[rank][1][name])
        assert found[rank][1] == {**found[0][1]}, "the same on all members"
        assert found[rank][2] == calm[rank][2] == [0.0, 0.0, 0.0]
    left = {each.name for each in (tmp_path / "trouble").iterdir()}
    assert left == {".lock", "latest", "good"}


def drifting_case(sizes: jobs.Sizes, folder: Path) -> Any:
    """One member's copy of a weight is changed: what a save says, and that the next one works."""
    with jobs.job(jobs.config("bf16", sizes)) as made:
        engine = made.engine
        if engine.idle:
            return None
        jobs.train(made, 2)
        weight = engine.module.blocks[1].up.bias
        with torch.no_grad():
            before = weight[3].clone()
            if engine.rank == 1:
                weight[3] += 1
            try:
                engine.save(folder, "drifted")
                said = ""
            except CheckpointError as error:
                said = str(error)
            weight[3] = before
        engine.save(folder, "whole")
        return said
    return None


@pytest.mark.parametrize("sizes", [(3, 1), pytest.param((4, 0), marks=pytest.mark.full)])
def test_copies_are_compared(pool: RankPool, tmp_path: Path, sizes: jobs.Sizes) -> None:
    found = pool.run(drifting_case, sizes=sizes, folder=tmp_path)[: sizes[0]]
    assert len(set(found)) == 1
    assert "weight" in found[0] and "'blocks.1.up.bias'" in found[0] and "nothing was saved" in found[0], found[0]
    assert {each.name for each in tmp_path.iterdir()} == {".lock", "latest", "whole"}


def background_case(folder: Path, background: bool) -> Any:
    """Train on while a checkpoint is written; the losses, and the state as it was when it was taken."""
    with jobs.job(jobs.config("bf16", (3, 2))) as made:
        engine, record = made.engine, jobs.Record()
        if engine.idle:
            return None
        state = None
        for step, batch in zip(range(6), made.loader, strict=False):
            jobs.one_micro_batch(engine, batch, record)
            if step in (1, 3):
                state = oracle.gather(engine)
                pending = engine.save(folder, background=True) if background else engine.save(folder)
        if background:
            assert pending.wait() == folder / "step4" and pending.done
            pending = engine.save(folder / "latest", background=True)
            with pytest.raises(CheckpointError, match="nothing was saved"):
                pending.wait()
        engine.load(folder)
        assert oracle.differences(state, oracle.gather(engine)) == []
        return record.losses
    return None


@pytest.mark.full
def test_in_the_background(pool: RankPool, tmp_path: Path) -> None:
    expected = pool.run(background_case, folder=tmp_path / "front", background=False)
    assert pool.run(background_case, folder=tmp_path / "back", background=True) == expected


# ---- saved by itself ------------------------------------------------------------------------------------------------


def fallback_case(folder: Path, background: bool, **when: float) -> Any:
    """Periodic saves over a switch."""
    settings = jobs.config("fp32", (2, 1))
    settings["dynatrain"]["fallback"] = {"path": str(folder), "keep": 4, "background": background, **when}
    record = jobs.run(settings, 11, {4: (4, 3)})
    return record.notes.get("last"), record.losses


@pytest.mark.parametrize(
    ("background", "when", "steps"),
    [
        pytest.param(False, {"every_steps": 3}, (3, 6, 9), marks=pytest.mark.full),
        pytest.param(False, {"every_seconds": 0.001}, (7, 8, 9, 10), marks=pytest.mark.full),
        pytest.param(True, {"every_steps": 3, "every_seconds": 0.001}, (7, 8, 9, 10), marks=pytest.mark.full),
        pytest.param(True, {"every_steps": 4, "every_seconds": 1e6}, (4, 8), marks=pytest.mark.full),
    ],
)
def test_fallback_by_itself(
    pool: RankPool, tmp_path: Path, background: bool, when: dict[str, float], steps: tuple[int, ...]
) -> None:
    pool.run(fallback_case, folder=tmp_path, background=background, **when)
    tags = {each.name for each in tmp_path.iterdir() if not each.name.startswith(".")}
    assert tags - {"latest"} == {f"step{step}" for step in steps}
    assert (tmp_path / "latest").read_text() == f"step{steps[-1]}"


def put_off_case(folder: Path, cause: str) -> None:
    """What would keep one member waiting keeps nobody waiting; it is over after a few steps."""
    settings = jobs.config("fp32", (2, 1))
    settings["dynatrain"]["fallback"] = {"path": str(folder), "keep": 9, "every_steps": 3}
    slow = threading.Event()

    def is_slow() -> bool:
        return td.get_rank() == 1 and not slow.is_set()

    answers, settle = Control.answers, Saver.settle
    patches = {
        "board": patch.object(Control, "answers", lambda self, seconds: not is_slow() and answers(self, seconds)),
        "disk": patch.object(Saver, "settle", lambda self, *seconds: not is_slow() and settle(self, *seconds)),
    }
    with patches[cause], patch.object(fallback, "AGAIN_SECONDS", 0.001):
        jobs.run(settings, 9, {}, each=lambda made: slow.set() if made.engine.global_steps == 5 else None)


@pytest.mark.parametrize("cause", ["board", "disk"])
def test_one_that_would_wait_is_put_off(pool: RankPool, tmp_path: Path, cause: str) -> None:
    pool.run(put_off_case, folder=tmp_path, cause=cause)
    tags = {each.name for each in tmp_path.iterdir() if each.name.startswith("step")}
    assert "step3" not in tags and {"step6"} <= tags


# ---- every pair of the table ----------------------------------------------------------------------------------------


def rewriting_case(find: Find, layouts: list[Layout], reference: Path, folder: Path) -> oracle.State | None:
    """The same state, written by every layout."""
    subject, state = find(), None
    for at in layouts:
        with axis_walks.started(subject, "fp32", at) as made:
            if not made.engine.idle:
                made.engine.load(reference)
                made.engine.save(folder, str(at).replace(" ", "_").replace("=", ""))
                state = oracle.gather(made.engine, subject.places)
    return state


def reading_case(find: Find, taken: list[tuple[Layout, Layout]], folder: Path, state: oracle.State) -> int:
    """Every pair: what the first layout wrote, loaded in the second."""
    subject, compared = find(), 0
    for target in sorted({target for _, target in taken}, key=str):
        with axis_walks.started(subject, "fp32", target) as made:
            for source in [source for source, end in taken if end == target] if not made.engine.idle else []:
                made.engine.load(folder, str(source).replace(" ", "_").replace("=", ""))
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
