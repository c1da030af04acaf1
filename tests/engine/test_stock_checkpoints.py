"""`load_checkpoint` of DeepSpeed's own checkpoints in other layouts, where DeepSpeed raises: bit by bit."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.report import logger
from ds_dynatrain.space import Layout
from tests.adapters.stock import stock_engine
from tests.engine import axis_walks, jobs, oracle
from tests.engine.axis_walks import Subject
from tests.engine.models import Sequences, decay_groups, small_gpt
from tests.engine.pool import RankPool
from tests.engine.subjects import SUBJECTS
from tests.engine.test_lora import adapted
from tests.engine.transitions import layout
from tools.specimens import members_of

STEPS, MORE = 3, 2
Find = Callable[[], Subject]


def saving_case(find: Find, dtype: str, at: Layout, target: Layout, folder: Path) -> Any:
    """Train and save as DeepSpeed does; the state, the loader's position, and the losses after a live switch."""
    subject, state, position, losses = find(), None, {}, list[float]()
    with axis_walks.started(subject, dtype, at) as made:
        engine, batches = made.engine, iter(made.loader)
        if not engine.idle:
            for _ in range(STEPS):
                subject.step(engine, next(batches))
            engine.save_checkpoint(str(folder), client_state={"mine": {"seen": torch.arange(3), "of": (1, 2)}})
            state, position = oracle.gather(engine, subject.places), made.loader.state_dict()
            if target != at:
                engine.switch(target, at=engine.global_steps)
        losses += [subject.step(engine, next(batches)) for _ in range(MORE)]
    return state, position, losses


def loading_case(find: Find, dtype: str, target: Layout, folder: Path, position: dict[str, Any]) -> Any:
    """Start in another layout, train a step, load; the state, and the losses that follow."""
    subject = find()
    with axis_walks.started(subject, dtype, target) as made:
        engine = made.engine
        if engine.idle:
            return None, []
        subject.step(engine, next(iter(made.loader)))
        path, client_state = engine.load_checkpoint(str(folder))
        assert Path(path) == folder / f"global_step{STEPS}" and client_state["mine"]["of"] == (1, 2)
        assert torch.equal(client_state["mine"]["seen"], torch.arange(3))
        made.loader.load_state_dict(position)
        batches = iter(made.loader)
        return oracle.gather(engine, subject.places), [subject.step(engine, next(batches)) for _ in range(MORE)]
    return None, []


def round_trip(pool: RankPool, kind: str, source: str, target: str, folder: Path, dtype: str) -> None:
    same = {"find": SUBJECTS[kind], "dtype": dtype, "folder": folder, "target": layout(target)}
    saved = pool.run(saving_case, at=layout(source), **same, seconds=120)
    loaded = pool.run(loading_case, position=saved[0][1], **same, seconds=120)
    working = [each for each in loaded if each[0] is not None]
    assert len(working) == layout(target).world_size
    for state, _ in working:
        assert oracle.differences(saved[0][0], state) == []
    assert sorted(losses for _, losses in working) == sorted(losses for *_, losses in saved if losses)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "source", "target", "dtype"),
    [
        ("module", "d2z1", "d3z3", "bf16"),
        ("module", "d3z3", "d4z0", "fp32"),
        ("AutoTP", "d2t2z1", "d2z3", "fp32"),
    ],
)
def test_another_layout(pool: RankPool, tmp_path: Path, kind: str, source: str, target: str, dtype: str) -> None:
    round_trip(pool, kind, source, target, tmp_path, dtype)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "source", "target", "dtype"),
    [
        ("module", "d4z0", "d2z2", "bf16"),
        ("module", "d4z2", "d2z2", "fp16"),
        ("module", "d2z0", "d3z1", "fp32"),
        ("module", "d2z0", "d4z3", "fp16"),
        ("module", "d3z1", "d2z1", "bf16 in fp32"),
        ("module", "d4z3", "d3z3", "bf16"),
        ("AutoTP", "t4z3", "d2t2z1", "fp32"),
        ("AutoTP", "d4z3", "t2z0", "bf16"),
        ("PipelineModule", "p2d2z1", "d4z1", "fp32"),
        ("PipelineModule", "d2z0", "p4z1", "bf16"),
        ("Ulysses", "d2s2z1", "s2z3", "fp32"),
    ],
)
def test_more_layouts(pool: RankPool, tmp_path: Path, kind: str, source: str, target: str, dtype: str) -> None:
    round_trip(pool, kind, source, target, tmp_path, dtype)


# ---- written by an engine that is DeepSpeed's own -------------------------------------------------------------------


def stock_case(folder: Path, options: dict[str, Any]) -> oracle.State:
    """DeepSpeed without ds_dynatrain, on all ranks."""
    settings = {key: value for key, value in jobs.config("bf16", (4, 2)).items() if key != "dynatrain"}
    settings["zero_optimization"] = {"stage": 2, **options}
    model = small_gpt()
    with stock_engine(model, settings, model_parameters=decay_groups(model)) as engine:
        data = Sequences()
        for step in range(STEPS):
            rows = [data[12 * step + 3 * engine.global_rank + number] for number in range(3)]
            engine.backward(engine(*(torch.stack(part) for part in zip(*rows, strict=True))))
            engine.step()
        engine.save_checkpoint(str(folder))
        return oracle.gather(engine)


def taking_case(sizes: jobs.Sizes, folder: Path) -> oracle.State | None:
    """What `load_checkpoint` makes of it in a layout."""
    with jobs.job(jobs.config("bf16", sizes)) as made:
        if made.engine.idle:
            return None
        assert made.engine.load_checkpoint(str(folder))[0] is not None
        return oracle.gather(made.engine)
    return None


@pytest.mark.parametrize("options", [{}, pytest.param({"round_robin_gradients": True}, marks=pytest.mark.full)])
def test_written_by_stock_deepspeed(pool: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    state = pool.run(stock_case, folder=tmp_path, options=options)[0]
    for found in pool.run(taking_case, sizes=(2, 3), folder=tmp_path)[:2]:
        assert oracle.differences(state, found) == []


def other_batch_case(sizes: jobs.Sizes, folder: Path) -> list[str]:
    """What both loads say in a job whose global batch is that of three samples on each of its ranks."""
    settings, found = jobs.config("bf16", sizes), list[str]()
    del settings["train_batch_size"]
    settings |= {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    with jobs.job(settings) as made:
        if made.engine.idle:
            return found
        for load in (made.engine.load_checkpoint, made.engine.load):
            try:
                load(str(folder))
            except CheckpointError as error:
                found.append(str(error))
    return found


def test_another_global_batch_is_refused(pool: RankPool, tmp_path: Path) -> None:
    """Stock DeepSpeed goes on, silently, with 9 samples a step in place of 12."""
    pool.run(stock_case, folder=tmp_path, options={})
    for found in pool.run(other_batch_case, sizes=(3, 2), folder=tmp_path)[:3]:
        assert len(found) == 2
        assert all("the global batch is 12 samples there and 9 here" in each for each in found)
        assert all('give "train_batch_size": 12' in each for each in found)


# ---- cut in another way, and parts of it -----------------------------------------------------------------------------


def cut_anew_case(folder: Path, stage: int, block: dict[str, Any], save: bool) -> oracle.State | None:
    """Train and save, or load, with these entries of `zero_optimization`."""
    settings = jobs.config("bf16", (3, stage))
    settings["zero_optimization"].update(block)
    with jobs.job(settings) as made:
        if made.engine.idle:
            return None
        if save:
            jobs.train(made, STEPS)
            made.engine.save_checkpoint(str(folder))
        else:
            assert made.engine.load_checkpoint(str(folder))[0] is not None
        return oracle.gather(made.engine)
    return None


IN_TURN = {"round_robin_gradients": True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "saved", "loaded"),
    [
        pytest.param(2, IN_TURN, {}, marks=pytest.mark.full),
        pytest.param(1, {}, IN_TURN, marks=pytest.mark.full),
        (3, {}, {"sub_group_size": 60}),
    ],
)
def test_cut_in_another_way(pool: RankPool, tmp_path: Path, stage: int, saved: Any, loaded: Any) -> None:
    """In the same layout; DeepSpeed permutes the weights without a word, or fails."""
    state = pool.run(cut_anew_case, folder=tmp_path, stage=stage, block=saved, save=True)[0]
    for found in pool.run(cut_anew_case, folder=tmp_path, stage=stage, block=loaded, save=False)[:3]:
        assert oracle.differences(state, found) == []


def scheduled_case(folder: Path, sizes: jobs.Sizes, save: bool) -> list[str] | None:
    """Save, or load all but the schedule; what is said of weights alone."""
    settings, said = jobs.config("bf16", sizes), list[str]()
    settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 50}}
    with jobs.job(settings) as made:
        engine = made.engine
        if engine.idle:
            return None
        if save:
            jobs.train(made, STEPS)
            engine.save_checkpoint(str(folder))
            return said
        for part in ({"load_module_only": True}, {"load_optimizer_states": False}):
            with pytest.raises(CheckpointError) as caught:
                engine.load_checkpoint(str(folder), **part)
            said.append(str(caught.value))
        before = engine.lr_scheduler.last_batch_iteration
        engine.load_checkpoint(str(folder), load_lr_scheduler_states=False)
        assert engine.global_steps == STEPS and engine.lr_scheduler.last_batch_iteration == before
        engine.load_checkpoint(str(folder))
        assert engine.lr_scheduler.last_batch_iteration > before
        return said
    return None


@pytest.mark.full
def test_parts_in_another_world(pool: RankPool, tmp_path: Path) -> None:
    pool.run(scheduled_case, folder=tmp_path, sizes=(2, 3), save=True)
    for said in pool.run(scheduled_case, folder=tmp_path, sizes=(3, 3), save=False)[:3]:
        assert said is not None and len(said) == 2
        assert all("load_module_only" in words and "another layout" in words for words in said)


# ---- saved without the frozen weights --------------------------------------------------------------------------------


def adapters_case(folder: Path, stage: int) -> oracle.State:
    """DeepSpeed without ds_dynatrain trains adapters on all ranks, and saves them alone, as transformers does."""
    settings = {key: value for key, value in jobs.config("bf16", (4, stage)).items() if key != "dynatrain"}
    model = adapted()
    trained = [held for held in model.parameters() if held.requires_grad]
    with stock_engine(model, settings, model_parameters=trained) as engine:
        data = Sequences()
        for step in range(STEPS):
            rows = [data[12 * step + 3 * engine.global_rank + number] for number in range(3)]
            engine.backward(engine(*(torch.stack(part) for part in zip(*rows, strict=True))))
            engine.step()
        engine.save_checkpoint(str(folder), exclude_frozen_parameters=True)
        return oracle.gather(engine)


def other_base_case(sizes: jobs.Sizes, folder: Path) -> Any:
    """Load adapters beside other frozen weights; what is said without the flag, the state before and after."""
    model = adapted()
    with torch.no_grad():
        for held in model.parameters():
            held.mul_(1 if held.requires_grad else 2)
    trained, frozen = ([held for held in model.parameters() if held.requires_grad is flag] for flag in (True, False))
    with jobs.job(jobs.config("bf16", sizes), model=model, model_parameters=trained) as made:
        if made.engine.idle:
            return None
        before, logged = oracle.gather(made.engine), list[str]()
        with pytest.raises(CheckpointError) as refused:
            made.engine.load_checkpoint(str(folder))
        assert oracle.differences(before, oracle.gather(made.engine)) == []
        with listening(logged):
            assert made.engine.load_checkpoint(str(folder), load_module_strict=False)[0] is not None
        assert [f"without {len(frozen)} frozen" in line for line in logged] == [True] * (made.engine.rank == 0)
        after = oracle.gather(made.engine)
        jobs.train(made, STEPS + 1)
        return str(refused.value), before, after
    return None


@contextmanager
def listening(lines: list[str]) -> Iterator[None]:
    """Warnings of ours, as they are written."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@pytest.mark.full
@pytest.mark.parametrize("saved", [1, 3])
def test_frozen_weights_that_are_not_in_it_stay(pool: RankPool, tmp_path: Path, saved: int) -> None:
    """Four ranks of stock DeepSpeed, read on two: what is trained is as it was saved, the rest as the script has it."""
    there = pool.run(adapters_case, folder=tmp_path, stage=saved)[0]
    frozen = {name for name, held in adapted().named_parameters() if not held.requires_grad}
    for stage in (1, 2, 3):
        for said, before, found in pool.run(other_base_case, sizes=(2, stage), folder=tmp_path)[:2]:
            assert f"without {len(frozen)} frozen" in said and "load_module_strict=False" in said
            wanted = replace(there, tensors=dict(there.tensors))
            for key in [key for key in there.tensors if key[0] in frozen]:
                wanted.tensors[key] = before.tensors[key]
            assert oracle.differences(there, found) != []
            assert oracle.differences(wanted, found) == []


# ---- what cannot be read --------------------------------------------------------------------------------------------


class Foreign:
    """A class that no list allows."""


def trouble_case(folder: Path, calm: bool) -> Any:
    """Save, spoil what was saved in several ways, load each; what is said, and the losses of the whole run."""
    said, losses = dict[str, str](), list[float]()
    subject = SUBJECTS["module"]()
    with axis_walks.started(subject, "bf16", layout("d3z1")) as made:
        engine, batches = made.engine, iter(made.loader)
        if engine.idle:
            return {}, losses
        losses.append(subject.step(engine, next(batches)))
        if not calm:
            _save_and_spoil(engine, folder)
            for name in ("cut", "flipped", "missing", "foreign", "other-model", "other-groups"):
                try:
                    engine.load(folder, name)
                except CheckpointError as error:
                    said[name] = f"{type(error).__name__}: {error}"
            engine.load(folder, "foreign", trust_pickle=True)
            engine.load(folder, "whole")
        losses += [subject.step(engine, next(batches)) for _ in range(MORE)]
    return said, losses


def _save_and_spoil(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(str(folder), "whole")
    engine.save_checkpoint(str(folder), "foreign", client_state={"mine": Foreign()})
    deepspeed.comm.barrier()
    if engine.rank == 0:
        for name in ("cut", "flipped", "missing", "other-model", "other-groups"):
            shutil.copytree(folder / "whole", folder / name)
        optimizer = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        file = folder / "cut" / optimizer
        file.write_bytes(file.read_bytes()[:-2000])
        _flip(folder / "flipped", optimizer)
        (folder / "missing" / optimizer).unlink()
        for name in ("other-model", "other-groups"):
            file = folder / name / "mp_rank_00_model_states.pt"
            tree = torch.load(file, weights_only=False)
            _change(tree["param_shapes"], name)
            torch.save(tree, file)
    deepspeed.comm.barrier()


def _flip(folder: Path, name: str) -> None:
    """One bit of the largest member of a file."""
    part = max(members_of(folder, (name, None)), key=lambda part: part.end - part.first)
    data = bytearray((folder / name).read_bytes())
    data[(part.first + part.end) // 2] ^= 4
    (folder / name).write_bytes(data)


def _change(shapes: list[dict[str, Any]], how: str) -> None:
    if how == "other-model":
        shapes[0]["renamed"] = shapes[0].pop("words.weight")
    else:
        first, *others = list(shapes[0])
        shapes[0] = {name: shapes[0][name] for name in (*others, first)}


def test_failures_change_nothing(pool: RankPool, tmp_path: Path) -> None:
    calm = pool.run(trouble_case, folder=tmp_path, calm=True)
    found = pool.run(trouble_case, folder=tmp_path, calm=False)
    words = {
        "cut": "CheckpointDamaged",
        "flipped": "CheckpointDamaged: engine.load: {folder}/flipped: ",
        "missing": "data rank 1",
        "foreign": "trust_pickle=True",
        "other-model": "'renamed' (23, 15), and this model has no such trained parameter",
        "other-groups": "build the same groups, in the same order",
    }
    for rank in range(3):
        assert found[rank][1] == calm[rank][1]
        assert found[rank][0].keys() == words.keys()
        for name, expected in words.items():
            assert expected.format(folder=tmp_path) in found[rank][0][name], found[rank][0][name]
            assert found[rank][0][name] == found[0][0][name], "the same on all members"
