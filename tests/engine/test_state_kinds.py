"""A state kind of a test's own, added by one definition: it goes wherever the rest of the state goes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

import ds_dynatrain
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, jobs, oracle, test_from_copies
from tests.engine.axis_walks import Subject
from tests.engine.pool import RankPool
from tests.engine.subjects import SUBJECTS
from tests.engine.test_axis_chains import arrivals
from tests.engine.test_conversions import converted
from tests.engine.test_converted import ours
from tests.engine.transitions import layout

STEPS = 2


class Tired(torch.optim.Optimizer):
    """Descent that slows down: for each element it keeps the way gone, for each parameter the sum of its rates."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for held in group["params"]:
                if held.grad is None:
                    continue
                state = self.state[held]
                if not state:
                    state.update(way=torch.zeros_like(held), rates=0.0)
                state["rates"] += group["lr"]
                state["way"].add_(held.grad.abs(), alpha=group["lr"])
                held.sub_(held.grad * (1 - state["rates"]) / (1 + state["way"]), alpha=group["lr"])


ds_dynatrain.register_optimizer(Tired, moments=("way",), scalars={"rates": 0.0})


def started(subject: Subject, dtype: str, at: Layout) -> Any:
    """A job in a layout, with this optimizer."""
    settings = {**axis_walks.configured(subject, dtype, at), "zero_allow_untested_optimizer": True}
    del settings["optimizer"]

    model = subject.build()
    trained = list(model.parameters()) if subject.groups is None else subject.groups(model)
    if subject.probe is not None:
        trained = split({"params": trained, "name": "all"})  # experts apart
    return jobs.job(settings, model, subject.data(240), groups=False, optimizer=Tired(trained, lr=1e-2))


def kept(engine: Any, subject: Subject) -> oracle.State:
    """The whole state, in which every trained parameter has both kinds, and neither is nothing."""
    state = oracle.gather(engine, subject.places)
    trained = {name for name, kind in state.tensors if kind == "way"}
    assert trained and trained == set(state.steps)
    assert any(state.tensors[name, "way"].any() for name in trained)  # not all: an expert may have had no token
    assert all(scalars["rates"] > 0 for scalars in state.steps.values())
    return state


# ---- switches -------------------------------------------------------------------------------------------------------


def walk_case(kind: str, dtype: str, path: list[Layout]) -> int:
    """Train at each place of a path; returns how many arrivals this rank has compared with what it left."""
    subject, left, compared = SUBJECTS[kind](), None, 0
    with started(subject, dtype, path[0]) as made:
        for number, batch in arrivals(made.engine, made.loader, path):
            arrived = kept(made.engine, subject) if number else None
            if arrived is not None and left is not None and left[0] == number - 1:
                assert oracle.differences(left[1], arrived, counters=False) == []
                compared += 1
            subject.step(made.engine, batch)
            left = number, kept(made.engine, subject)
    return compared


@pytest.mark.parametrize(
    ("kind", "path", "dtype"),
    [
        ("module", "d2z1 > d4z3 > d3z0 > d4z2", "bf16"),
        pytest.param("module", "d2z0 > d4z3 > d1z1 > d2z3", "fp32", marks=pytest.mark.full),
        pytest.param("AutoTP", "d2t2z1 > t4z3 > d4z2", "fp32", marks=pytest.mark.full),
        pytest.param("deepspeed.moe", "d4e2z1 > d4e4z2 > d4z1", "fp32", marks=pytest.mark.full),
        pytest.param("PipelineModule", "p2d2z1 > p4z1 > d4z0", "fp32", marks=pytest.mark.full),
    ],
)
def test_survives_switches_of_every_axis(pool: RankPool, kind: str, path: str, dtype: str) -> None:
    places = [layout(short) for short in path.split(" > ")]
    compared = pool.run(walk_case, kind=kind, dtype=dtype, path=places, seconds=240)
    assert compared[0] == len(list(pairwise(places)))


# ---- a death --------------------------------------------------------------------------------------------------------


def death_case(dtype: str, at: Layout, dead: int) -> Any:
    """What `test_from_copies.case` finds, with this optimizer."""
    with patch.object(axis_walks, "started", started):
        return test_from_copies.case(SUBJECTS["module"], dtype, at, at, dead)


@pytest.mark.parametrize(("dtype", "at"), [("bf16", "d3z3"), pytest.param("fp32", "d4z1", marks=pytest.mark.full)])
def test_survives_a_death_with_copies(pool: RankPool, dtype: str, at: str) -> None:
    ranks = pool.run(death_case, dtype=dtype, at=layout(at), dead=1, seconds=120)
    state, restored = ranks[0][0][0], [after[0] for _, after in ranks if after is not None]
    assert any(kind == "way" for _, kind in state.tensors) and len(restored) == layout(at).world_size
    for mine in restored:
        assert oracle.differences(state, mine) == []


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def saving_case(dtype: str, at: Layout, folder: Path) -> oracle.State | None:
    subject = SUBJECTS["module"]()
    with started(subject, dtype, at) as made:
        if made.engine.idle:
            return None
        for _, batch in zip(range(STEPS), made.loader, strict=False):
            subject.step(made.engine, batch)
        made.engine.save(folder)
        return kept(made.engine, subject)
    return None


def loading_case(dtype: str, at: Layout, folder: Path) -> oracle.State | None:
    subject = SUBJECTS["module"]()
    with started(subject, dtype, at) as made:
        if made.engine.idle:
            return None
        made.engine.load(folder)
        return kept(made.engine, subject)
    return None


@pytest.mark.full
def test_survives_a_checkpoint_and_torchs_format_in_other_layouts(pool: RankPool, tmp_path: Path) -> None:
    state = pool.run(saving_case, dtype="bf16", at=layout("d3z3"), folder=tmp_path / "first", seconds=120)[0]
    for found in pool.run(loading_case, dtype="bf16", at=layout("d2z1"), folder=tmp_path / "first", seconds=120)[:2]:
        assert oracle.differences(state, found) == []
    converted(tmp_path / "first", str(tmp_path / "theirs"), "--to", "dcp")
    assert "left out" not in ours(tmp_path / "theirs", tmp_path / "ours")
    for found in pool.run(loading_case, dtype="bf16", at=layout("d4z2"), folder=tmp_path / "ours", seconds=120):
        assert oracle.differences(state, found, counters=False) == []
