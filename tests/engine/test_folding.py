"""AutoEP's experts over data and tensor ranks: both axes change live, in every stage, together and one at a time."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, jobs, oracle, walks
from tests.engine.axis_walks import Subject
from tests.engine.mixtures import autoep
from tests.engine.pool import RankPool

if importlib.util.find_spec("transformers") is None:
    pytest.skip("AutoEP converts models of transformers'", allow_module_level=True)

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_allow_untested_optimizer": True}


def with_sgd() -> Subject:
    """Steps as long as the clipping makes them."""
    subject = autoep()
    return replace(subject, settings={**subject.settings, **SGD})


def at(data: int, expert: int, tensor: int, stage: int) -> Layout:
    """A layout."""
    return Layout(data=data, expert=expert, tensor=tensor, zero_stage=stage)


PATH = [at(2, 2, 2, 3), at(4, 2, 1, 1), at(2, 2, 2, 1), at(2, 2, 2, 3), at(2, 2, 1, 0), at(2, 2, 2, 2), at(4, 4, 1, 2)]
ACROSS = [
    at(1, 2, 2, 1),
    at(2, 4, 2, 0),
    at(1, 4, 4, 1),
    at(2, 1, 1, 3),
    at(1, 2, 2, 3),
    at(2, 4, 2, 3),
    at(1, 2, 4, 2),
]


@pytest.mark.full
def test_walk(pool: RankPool) -> None:
    """With experts in groups that only tensor ranks can fill; `transitions` has others."""
    axis_walks.compare(pool, autoep, ACROSS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("qwen3", "fp32"), ("mixtral", "bf16"), ("qwen3", "bf16"), ("mixtral", "fp16"), ("mixtral", "bf16 in fp32")],
)
def test_models_and_precisions(pool: RankPool, kind: str, dtype: str) -> None:
    path = [*PATH, *ACROSS]
    if dtype == "bf16 in fp32":
        path = [at(4, 2, 1, 1), at(2, 2, 2, 1), at(1, 2, 2, 1), at(2, 4, 2, 1), at(2, 1, 1, 1)]
    axis_walks.compare(pool, partial(autoep, kind), path, dtype)


@pytest.mark.full
def test_gradients_and_their_norm_are_those_of_one_rank(pool: RankPool) -> None:
    """Also where DeepSpeed itself counts some experts only."""
    layouts = [at(1, 1, 1, 0), *(at(2, 2, 2, stage) for stage in range(4))]
    same: dict[str, Any] = {"find": with_sgd, "dtype": "fp32"}
    state, position, _ = pool.run(axis_walks.reference_case, **same)[0]
    same |= {"state": state, "position": position}
    alone, *others = (walks.continued(pool.run(axis_walks.static_case, layout=each, **same)) for each in layouts)
    assert [jobs.furthest(losses, alone) < 1e-6 for losses in others] == [True] * 4


def refused_and_chained() -> tuple[int, list[str]]:
    """Ask for what cannot be; then switch to and fro: nothing of the modules before stays, and of their groups those
    alone that the present world has taken over."""
    with axis_walks.started(autoep(), "fp32", at(4, 2, 1, 1)) as made:
        engine, batches = made.engine, iter(made.loader)
        batch = next(batches)
        with pytest.raises(SwitchRefused, match=r"nearest: .*data=2 expert=2 tensor=2 zero_stage=1"):
            engine.switch(at(2, 1, 2, 1))
        with pytest.raises(SwitchRefused, match=r"expert=3 does not divide the 4 experts"):
            engine.switch(at(1, 3, 3, 1))
        gone, outcomes = [], []
        engine.on_switch(lambda event: outcomes.append(event.outcome))
        for number in range(6):
            axis_walks.one_step(engine, batch)
            old = engine.module.model.layers[0].mlp
            gone += [weakref.ref(old), weakref.ref(old.experts.w1), weakref.ref(old.ep_group)]
            engine.switch((at(2, 2, 2, 3), at(4, 4, 1, 2), at(2, 4, 2, 0))[number % 3], at=engine.global_steps)
            del old
            batch = next(batches)
        gc.collect()
        world = engine._parts.world
        present = [] if world is None else [world.group(kind) for kind in world.kinds]
        alive = [found for each in gone if (found := each()) is not None]
        return sum(not any(each is group for group in present) for each in alive), outcomes


@pytest.mark.full
def test_nothing_of_the_old_layers_stays(pool: RankPool) -> None:
    for alive, outcomes in pool.run(refused_and_chained, seconds=120):
        assert outcomes == ["committed"] * 6
        assert alive == 0


def saved(folder: str, sides: list[Layout]) -> tuple[oracle.State, oracle.State] | None:
    """The state that a checkpoint was saved of after a switch, and the one that a new engine has loaded."""
    subject = autoep()
    with axis_walks.started(subject, "fp32", sides[0]) as job:
        batches = iter(job.loader)
        for number in range(3):
            batch = next(batches)
            axis_walks.one_step(job.engine, batch)
            if number == 1:
                job.engine.switch(sides[1], at=job.engine.global_steps)
        job.engine.save_checkpoint(folder)
        before = oracle.gather(job.engine, subject.places)
    with axis_walks.started(subject, "fp32", sides[1]) as job:
        assert job.engine.load_checkpoint(folder)[0] is not None
        return before, oracle.gather(job.engine, subject.places)
    return None


@pytest.mark.full
@pytest.mark.parametrize(
    "sides",
    [[at(4, 2, 1, 1), at(2, 2, 2, 1)], [at(2, 4, 2, 3), at(2, 2, 2, 3)]],
)
def test_checkpoints_after_a_switch(pool: RankPool, tmp_path: Path, sides: list[Layout]) -> None:
    for before, after in pool.run(saved, folder=str(tmp_path), sides=sides):
        assert oracle.differences(before, after) == []
