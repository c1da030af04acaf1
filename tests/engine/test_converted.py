"""Checkpoints of other tools, converted to ours by the command and loaded by living ranks, in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_dynatrain.cli.main import app
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, jobs, oracle
from tests.engine.pool import RankPool
from tests.engine.subjects import SUBJECTS
from tests.engine.test_stock_checkpoints import STEPS, Find, saving_case, stock_case
from tests.engine.transitions import layout


def ours(path: Path, out: Path) -> str:
    """Convert to ours, and have the result verified; what is said."""
    found = CliRunner().invoke(app, ["checkpoint", "convert", str(path), str(out), "--to", "universal"])
    assert found.exit_code == 0, found.output
    sound = CliRunner().invoke(app, ["checkpoint", "verify", str(out)])
    assert sound.exit_code == 0, sound.output
    return found.output


def refused(path: Path, out: Path) -> str:
    found = CliRunner().invoke(app, ["checkpoint", "convert", str(path), str(out), "--to", "universal"])
    assert found.exit_code == 2 and not list(out.glob("*step*")), found.output
    return found.output


def loading_case(find: Find, dtype: str, target: Layout, folder: Path) -> Any:
    """Start in a layout, train a step, load."""
    subject = find()
    with axis_walks.started(subject, dtype, target) as made:
        engine = made.engine
        if engine.idle:
            return None
        subject.step(engine, next(iter(made.loader)))
        found = engine.load_universal(folder)
        assert found.step == STEPS
        return oracle.gather(engine, subject.places)
    return None


def saved_and_converted(pool: RankPool, kind: str, source: str, dtype: str, folder: Path) -> oracle.State:
    same = {"find": SUBJECTS[kind], "dtype": dtype}
    at = layout(source)
    saved: oracle.State = pool.run(saving_case, at=at, target=at, folder=folder / "theirs", **same, seconds=120)[0][0]
    ours(folder / "theirs", folder / "ours")
    return saved


def check_loaded(pool: RankPool, kind: str, target: str, dtype: str, folder: Path, state: oracle.State) -> None:
    same = {"find": SUBJECTS[kind], "dtype": dtype, "folder": folder / "ours"}
    loaded = [each for each in pool.run(loading_case, target=layout(target), **same, seconds=120) if each is not None]
    assert len(loaded) == layout(target).world_size
    for found in loaded:
        assert oracle.differences(state, found) == []


@pytest.mark.parametrize(
    ("kind", "source", "target", "dtype"),
    [
        ("module", "d2z1", "d3z3", "bf16"),
        pytest.param("module", "d3z3", "d2z1", "fp32", marks=pytest.mark.full),
        pytest.param("module", "d4z2", "d2z0", "fp16", marks=pytest.mark.full),
        pytest.param("module", "d4z3", "d2z2", "bf16", marks=pytest.mark.full),
        pytest.param("module", "d3z1", "d2z1", "bf16 in fp32", marks=pytest.mark.full),
        pytest.param("PipelineModule", "p2d2z1", "d4z1", "fp32", marks=pytest.mark.full),
    ],
)
def test_from_save_checkpoint(pool: RankPool, tmp_path: Path, kind: str, source: str, target: str, dtype: str) -> None:
    state = saved_and_converted(pool, kind, source, dtype, tmp_path)
    check_loaded(pool, kind, target, dtype, tmp_path, state)


@pytest.mark.full
def test_from_round_robin(pool: RankPool, tmp_path: Path) -> None:
    options = {"round_robin_gradients": True}
    state = pool.run(stock_case, folder=tmp_path / "theirs", options=options)[0]
    ours(tmp_path / "theirs", tmp_path / "ours")
    for found in pool.run(taking_case, sizes=(2, 3), folder=tmp_path / "ours")[:2]:
        assert oracle.differences(state, found) == []


def taking_case(sizes: jobs.Sizes, folder: Path) -> oracle.State | None:
    """What `load_universal` makes of it in a layout."""
    with jobs.job(jobs.config("bf16", sizes)) as made:
        if made.engine.idle:
            return None
        made.engine.load_universal(folder)
        return oracle.gather(made.engine)
    return None


@pytest.mark.full
def test_stage_0_of_several_groups_is_refused(pool: RankPool, tmp_path: Path) -> None:
    same = {"find": SUBJECTS["module"], "dtype": "fp32", "folder": tmp_path / "theirs"}
    pool.run(saving_case, at=layout("d2z0"), target=layout("d2z0"), **same, seconds=120)
    assert "save it with save_universal" in refused(tmp_path / "theirs", tmp_path / "ours")
