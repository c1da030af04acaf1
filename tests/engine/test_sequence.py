"""The sequence axis: live switches, what DeepSpeed itself computes, and what users hold of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as td
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention

import ds_dynatrain
from ds_dynatrain.errors import ConfigError, SwitchRefused
from ds_dynatrain.space import Layout
from tests.adapters.stock import own_groups, stock_engine
from tests.engine import axis_walks, faults, jobs, oracle
from tests.engine.models import Sequences, small_gpt
from tests.engine.pool import RankPool
from tests.engine.ulysses import CLIPPED, Texts, adam, long_gpt, one_step, own_part, sgd
from tests.sets import one_in


def at(stage: int, data: int = 1, sequence: int = 1) -> Layout:
    return Layout(data=data, sequence=sequence, zero_stage=stage)


# ---- walks ----------------------------------------------------------------------------------------------------------


STEPS = 5
SHORT = [at(1, 2), at(1, 1, 2), at(3, 2, 2), at(0, 1, 2), at(2, 2), at(3, 1, 2)]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_walk(pool: RankPool, dtype: str) -> None:
    """With Adam's moments; the table of transitions is walked with SGD, which shows gradients of a wrong size."""
    axis_walks.compare(pool, adam, SHORT, dtype)


def trained(layout: Layout, tokens: bool = False) -> list[float]:
    """Losses of a run that never leaves a layout, the same on all its members."""
    found = []
    with axis_walks.started(sgd(), "fp32", layout) as made:
        for batch in made.loader:
            loss = made.engine(*own_part(made.engine, batch))
            share = loss if tokens else loss / made.engine.sequence
            made.engine.backward(share, tokens=own_part(made.engine, batch)[1].numel() if tokens else None)
            made.engine.step()
            found.append(float(made.engine.mean(loss, made.loader.samples)))
            if made.engine.global_steps == STEPS:
                break
    return found


LAYOUTS = [at(2, 2, 2), at(3), at(0, 1, 2), at(3, 2, 2), at(1, 1, 4), at(3, 1, 2)]


@pytest.mark.parametrize("layout", one_in(3, LAYOUTS), ids=str)
def test_every_layout_computes_the_same(pool: RankPool, layout: Layout) -> None:
    """Also in stage 3, whose gradients DeepSpeed means over sequence ranks, where the other stages add them up."""
    expected = pool.once(trained, layout=at(0))[0]
    found = pool.run(trained, layout=layout)
    assert all(losses in ([], found[0]) for losses in found)
    assert jobs.furthest(found[0], expected) <= 1e-6


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_token_counts_need_no_division(pool: RankPool, stage: int) -> None:
    expected = pool.once(trained, layout=at(0))[0]
    found = pool.run(trained, layout=at(stage, 2, 2), tokens=True)[0]
    assert jobs.furthest(found, expected) <= 1e-6


# ---- DeepSpeed itself -----------------------------------------------------------------------------------------------


def batch_of(step: int, data_rank: int) -> list[torch.Tensor]:
    """Six of the twelve samples of a step, for one of two data ranks."""
    samples = [Texts()[(12 * step + 6 * data_rank + place) % 96] for place in range(6)]
    return [torch.stack(column) for column in zip(*samples, strict=True)]


def stock(stage: int, settings: dict[str, Any]) -> list[float]:
    """Plain DeepSpeed with an mpu: two data ranks of two sequence ranks each."""
    found, settings = [], {**settings, "zero_optimization": {"stage": stage}, "sequence_parallel_size": 2}
    with own_groups():
        parallel_state_sp.initialize_sequence_parallel(2)
        model = long_gpt(parallel_state_sp.get_sequence_parallel_group())
        given = {"model_parameters": list(model.parameters()), "mpu": parallel_state_sp}
        data_rank, place = divmod(td.get_rank(), 2)
        with stock_engine(model, {**settings, "train_micro_batch_size_per_gpu": 6}, **given) as engine:
            for step in range(5):
                parts = [whole.chunk(2, 1)[place] for whole in batch_of(step, data_rank)]
                loss = engine(*parts)
                engine.backward(loss / 2)
                engine.step()
                found.append(float(loss))
    return found


def ours(stage: int, settings: dict[str, Any]) -> list[float]:
    """The same script with the block, no layout in it, and the model's own group of the launch."""
    found, settings = [], {**settings, "zero_optimization": {"stage": stage}, "sequence_parallel_size": 2}
    settings |= {"train_micro_batch_size_per_gpu": 6, "dynatrain": {}}
    with own_groups():
        parallel_state_sp.initialize_sequence_parallel(2)
        model = long_gpt(parallel_state_sp.get_sequence_parallel_group())
        given = {"model_parameters": list(model.parameters()), "mpu": parallel_state_sp}
        engine = ds_dynatrain.initialize(model=model, config=settings, **given)[0]
        try:
            assert engine.layout == at(stage, 2, 2)
            for step in range(5):
                engine.boundary()
                found.append(one_step(engine, batch_of(step, engine.data_rank)))
        finally:
            engine.destroy()
    return found


@pytest.mark.parametrize("stage", [*(pytest.param(each, marks=pytest.mark.full) for each in (0, 1)), 2])
def test_it_is_what_deepspeed_computes(pool: RankPool, stage: int) -> None:
    settings = {"steps_per_print": 10**9, **CLIPPED}
    expected = pool.run(stock, stage=stage, settings=settings)
    found = pool.run(ours, stage=stage, settings=settings)
    for mine, theirs in zip(found, expected, strict=True):
        assert jobs.furthest(mine, theirs) <= 1e-6


# ---- what users hold ------------------------------------------------------------------------------------------------


def layers_of(engine: Any) -> list[DistributedAttention]:
    return [block.spread for block in engine.module.blocks]


def seen(engine: Any) -> tuple[Any, ...]:
    """What the loop, the layers and DeepSpeed's own module say of the axis."""
    sizes = {td.get_world_size(layer.spg) for layer in layers_of(engine)}
    state = (parallel_state_sp.get_sequence_parallel_rank(), parallel_state_sp.get_sequence_parallel_world_size())
    assert all(layer.spg is parallel_state_sp.get_sequence_parallel_group() for layer in layers_of(engine))
    return engine.sequence_rank, engine.sequence, engine.data_rank, state, sizes


def asking() -> list[tuple[Any, ...]]:
    """What each member is told before and after a switch of two data ranks to two sequence ranks, and one on four."""
    found = []
    with axis_walks.started(adam(), "fp32", at(1, 2)) as made:
        for batch in made.loader:
            found.append(seen(made.engine))
            if made.engine.layout == at(1, 1, 2):
                assert made.engine.last_switch.bytes_sent == 0  # a sequence rank holds what a data rank holds
            one_step(made.engine, batch)
            target = {1: at(1, 1, 2), 2: at(1, 2, 2)}.get(made.engine.global_steps)
            if target is None:
                break
            made.engine.switch(target, at=made.engine.global_steps)
    if made.let_go:
        assert made.engine.sequence_rank == -1
    return found


def test_what_a_loop_is_told(pool: RankPool) -> None:
    told = pool.run(asking)
    for member in (0, 1):
        assert told[member][0] == (0, 1, member, (0, 1), {1})
    after = [told[member][1] for member in (0, 1)]
    assert sorted(after) == [(0, 2, 0, (0, 2), {2}), (1, 2, 0, (1, 2), {2})]
    last = sorted(found[-1] for found in told)
    assert last == [(rank, 2, data, (rank, 2), {2}) for rank in (0, 1) for data in (0, 1)]


def failing() -> tuple[Any, ...]:
    """A switch that fails after the rebuild: the layers have their old group again, and train on."""
    with axis_walks.started(adam(), "fp32", at(1, 2, 2)) as made:
        batches = iter(made.loader)
        one_step(made.engine, next(batches))
        before, groups = seen(made.engine), [layer.spg for layer in layers_of(made.engine)]
        with faults.injected(["bit flip"], {}):
            made.engine.switch(at(3, 4), at=made.engine.global_steps)
            batch = next(batches)
        assert made.engine.last_switch.outcome == "rolled_back"
        assert seen(made.engine) == before and [layer.spg for layer in layers_of(made.engine)] == groups
        one_step(made.engine, batch)
    return before


def test_roll_back(pool: RankPool) -> None:
    assert [found[:3] for found in pool.run(failing)] == [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)]


def saving(folder: str) -> oracle.State:
    with axis_walks.started(adam(), "fp32", at(1, 4)) as made:
        for batch in made.loader:
            one_step(made.engine, batch)
            if made.engine.global_steps == 2:
                break
            made.engine.switch(at(1, 2, 2), at=1)
        made.engine.save_checkpoint(folder)
        return oracle.gather(made.engine)


def loading(folder: str) -> oracle.State:
    with axis_walks.started(adam(), "fp32", at(1, 2, 2)) as made:
        path, _ = made.engine.load_checkpoint(folder)
        assert path is not None
        return oracle.gather(made.engine)


@pytest.mark.full
def test_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    saved = pool.run(saving, folder=str(tmp_path))
    for found, expected in zip(pool.run(loading, folder=str(tmp_path)), saved, strict=True):
        assert oracle.differences(found, expected) == []


def coming_in(stage: int) -> list[oracle.State | None]:
    """States after three steps, and after a switch and another one: of a model of `zero.Init` and of its whole twin."""
    found: list[oracle.State | None] = []
    for is_cut in (True, False):
        model = long_gpt()
        if is_cut:
            deepspeed.zero.Init(module=model, config_dict_or_path=jobs.config())
        settings = axis_walks.configured(adam(), "fp32", at(stage, 1, 2))
        with jobs.job(settings, model, Texts(), groups=False) as made:
            for batch in made.loader:
                one_step(made.engine, batch)
                if made.engine.global_steps == 3:
                    found.append(oracle.gather(made.engine))
                    made.engine.switch(at(2, 1, 4), at=3)
                if made.engine.global_steps == 4:
                    found.append(oracle.gather(made.engine))
                    break
    return found


@pytest.mark.full
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_model_of_zero_init(pool: RankPool, stage: int) -> None:
    states = pool.run(coming_in, stage=stage)[0]
    assert len(states) == 4
    for cut, whole in zip(states[:2], states[2:], strict=True):
        assert oracle.differences(cut, whole) == []


def registering(stage: int) -> tuple[oracle.State, oracle.State]:
    """States before and after a part of the model is frozen on sequence ranks, and a step is taken with the rest."""
    with axis_walks.started(adam(), "fp32", at(stage, 2, 2)) as made:
        batches = iter(made.loader)
        one_step(made.engine, next(batches))
        before = oracle.gather(made.engine)
        made.engine.module.blocks[0].requires_grad_(False)
        assert made.engine.update_param_groups()
        after = oracle.gather(made.engine)
        one_step(made.engine, next(batches))
        made.engine.switch(at(1, 4), at=2)
        one_step(made.engine, next(batches))
        assert made.engine.last_switch.outcome == "committed"
    return before, after


@pytest.mark.full
@pytest.mark.parametrize("stage", [*(pytest.param(each, marks=pytest.mark.full) for each in (0, 1)), 3])
def test_registering(pool: RankPool, stage: int) -> None:
    for before, after in pool.run(registering, stage=stage):
        gone = {key for key in before.tensors if key not in after.tensors}
        assert gone and all(name.startswith("blocks.0.") and kind != "weight" for name, kind in gone)
        assert all(torch.equal(before.tensors[key], held) for key, held in after.tensors.items())


# ---- refusals -------------------------------------------------------------------------------------------------------


def refused_at_the_switch() -> str:
    with jobs.job(jobs.config()) as made:
        for _ in made.loader:
            with pytest.raises(SwitchRefused) as caught:
                made.engine.switch(data=1, sequence=2)
            return str(caught.value)
    return ""


def refused_at_the_start() -> str:
    settings = jobs.config()
    settings["dynatrain"]["layout"] = {"data": 2, "sequence": 2}
    with pytest.raises(ConfigError) as caught, jobs.job(settings, model=small_gpt()):
        pass
    return str(caught.value)


@pytest.mark.parametrize("case", [refused_at_the_switch, refused_at_the_start])
def test_a_model_without_such_attention(pool: RankPool, case: Any) -> None:
    said = [words for words in pool.run(case) if words]
    assert said
    for words in said:
        assert "the model has no sequence axis: it has no DistributedAttention layer" in words
        assert "nearest: data=" in words


# ---- without the axis -----------------------------------------------------------------------------------------------


def beside() -> list[tuple[Any, ...]]:
    """What DeepSpeed's module says, and of which group, in a job whose model has no sequence axis, through a switch;
    a script may set the module up for other engines meanwhile, and ends what it has begun.
    """
    found: list[tuple[Any, ...]] = []
    with own_groups():
        with jobs.job(jobs.config(start=(4, 1)), small_gpt(), Sequences()) as made:
            for batch in made.loader:
                jobs.one_micro_batch(made.engine, batch, jobs.Record())
                if made.engine.global_steps == 1:
                    with pytest.raises(AssertionError, match="not initialized"):
                        parallel_state_sp.get_sequence_parallel_group()
                    parallel_state_sp.initialize_sequence_parallel(2)
                    mine = parallel_state_sp.get_sequence_parallel_group()
                    jobs.ask(made.engine, (4, 3))
                if made.engine.global_steps == 2:
                    assert made.engine.last_switch.outcome == "committed"
                    found.append(told(mine))
                    break
        found.append(told(mine))
    return found


def told(mine: Any) -> tuple[Any, ...]:
    is_mine = parallel_state_sp.get_sequence_parallel_group() is mine
    return is_mine, parallel_state_sp.get_sequence_parallel_rank(), parallel_state_sp.get_sequence_parallel_world_size()


def test_a_model_without_the_axis_leaves_deepspeeds_module_alone(pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(beside)):
        assert found == [(True, rank % 2, 2)] * 2
