"""Checkpoints of other tools, converted to ours by the command and loaded by living ranks, in other layouts."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from ds_dynatrain.cli.main import app
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, jobs, oracle
from tests.engine.models import Sequences, small_gpt
from tests.engine.pool import RankPool
from tests.engine.subjects import SUBJECTS
from tests.engine.test_conversions import converted
from tests.engine.test_conversions import saving_case as first_case
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
        found = engine.load(folder)
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


@pytest.mark.full
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


def taking_case(sizes: jobs.Sizes, folder: Path, dtype: str = "bf16") -> oracle.State | None:
    """What `engine.load` makes of it in a layout."""
    with jobs.job(jobs.config(dtype, sizes)) as made:
        if made.engine.idle:
            return None
        made.engine.load(folder)
        return oracle.gather(made.engine)
    return None


# ---- DeepSpeed's universal format -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_to_deepspeeds_universal_and_back(pool: RankPool, tmp_path: Path, dtype: str) -> None:
    state = pool.run(first_case, dtype=dtype, folder=tmp_path / "first")[0]
    converted(tmp_path / "first", str(tmp_path / "theirs"), "--to", "deepspeed-universal")
    ours(tmp_path / "theirs", tmp_path / "ours")
    for found in pool.run(taking_case, sizes=(2, 1), folder=tmp_path / "ours", dtype=dtype)[:2]:
        assert oracle.differences(state, found) == []


@pytest.mark.full
@pytest.mark.parametrize(("source", "target"), [("d2z1", "d3z3"), ("d3z2", "d2z1"), ("d3z3", "d2z1")])
def test_from_deepspeeds_converter(pool: RankPool, tmp_path: Path, source: str, target: str) -> None:
    same = {"find": SUBJECTS["module"], "dtype": "bf16", "folder": tmp_path / "theirs"}
    state = pool.run(saving_case, at=layout(source), target=layout(source), **same, seconds=120)[0][0]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folder, made = tmp_path / "theirs" / f"global_step{STEPS}", tmp_path / "theirs" / "universal"
    subprocess.run([*command, "--input_folder", folder, "--output_folder", made], check=True, capture_output=True)
    assert "latest and latest_universal name" in refused(tmp_path / "theirs", tmp_path / "ours")
    ours(made, tmp_path / "ours")
    check_loaded(pool, "module", target, "bf16", tmp_path, state)


# ---- torch's distributed checkpoints --------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_to_dcp_and_back(pool: RankPool, tmp_path: Path, dtype: str) -> None:
    state = pool.run(first_case, dtype=dtype, folder=tmp_path / "first")[0]
    converted(tmp_path / "first", str(tmp_path / "theirs"), "--to", "dcp")
    assert "left out" not in ours(tmp_path / "theirs", tmp_path / "ours")
    for found in pool.run(taking_case, sizes=(2, 1), folder=tmp_path / "ours", dtype=dtype)[:2]:
        state.counters = {**found.counters, "global_steps": STEPS}
        assert oracle.differences(state, found) == []


def partly_trained() -> tuple[nn.Module, list[dict[str, Any]]]:
    """The small model with frozen parameters, and two groups of the others."""
    model = small_gpt()
    model.places.requires_grad_(False)
    trained = [held for held in model.parameters() if held.requires_grad]
    flat, deep = [held for held in trained if held.ndim < 2], [held for held in trained if held.ndim > 1]
    return model, [{"params": deep, "lr": 2e-3, "weight_decay": 0.1}, {"params": flat, "lr": 5e-4, "weight_decay": 0.0}]


def torch_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def going_on_case(folder: Path) -> tuple[jobs.Record, list[Any]] | None:
    """Load and train three steps: losses, and the batches of this rank."""
    (model, groups), batches, record = partly_trained(), list[Any](), jobs.Record()
    with jobs.job(jobs.config("fp32", (3, 3), gradient_clipping=0.0), model=model, model_parameters=groups) as made:
        if made.engine.idle:
            return None
        assert made.engine.load(folder).step == made.engine.global_steps == STEPS
        for batch in itertools.islice(made.loader, 3):
            batches.append(batch)
            jobs.one_micro_batch(made.engine, batch, record)
        assert [group["lr"] for group in made.engine.basic_optimizer.param_groups] == [2e-3, 5e-4]
        return record, batches
    return None


@pytest.mark.parametrize("is_flat", [True, pytest.param(False, marks=pytest.mark.full)])
def test_training_of_torch_goes_on(pool: RankPool, tmp_path: Path, is_flat: bool) -> None:
    """A DCP as torch writes it: moments, steps, groups with their rates, frozen parameters."""
    model, groups = partly_trained()
    optimizer = torch.optim.AdamW(groups)
    samples = DataLoader(Sequences(), batch_size=12)
    torch_steps(model, optimizer, itertools.islice(samples, STEPS))
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=is_flat))
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert "left out" not in ours(tmp_path / "theirs", tmp_path / "ours")
    found = [each for each in pool.run(going_on_case, folder=tmp_path / "ours") if each is not None]
    whole = [
        [torch.cat(parts) for parts in zip(*each, strict=True)] for each in zip(*[b for _, b in found], strict=True)
    ]
    expected = torch_steps(model, optimizer, whole)
    assert jobs.furthest(jobs.global_losses([record for record, _ in found]), expected) <= 1e-6


# ---- safetensors ----------------------------------------------------------------------------------------------------


def weights_case(dtype: str, folder: Path, steps: int) -> tuple[oracle.State, oracle.State] | None:
    """Train, load weights; the state after that, and after a step more."""
    with jobs.job(jobs.config(dtype, (2, 2))) as made:
        if made.engine.idle:
            return None
        jobs.train(made, steps)
        assert made.engine.load(folder).step == steps, "counters stay as they are"
        loaded = oracle.gather(made.engine)
        jobs.train(made, steps + 1)
        return loaded, oracle.gather(made.engine)
    return None


@pytest.mark.parametrize("steps", [0, pytest.param(2, marks=pytest.mark.full)])
def test_from_safetensors(pool: RankPool, tmp_path: Path, steps: int) -> None:
    """Weights alone, with a buffer among them and a tied one twice: the optimizer begins as new."""
    state = pool.run(first_case, dtype="bf16", folder=tmp_path / "first")[0]
    converted(tmp_path / "first", str(tmp_path / "plain.safetensors"))
    weights = load_file(tmp_path / "plain.safetensors")
    weights["calls"], weights["out.weight"] = torch.tensor(99), weights["words.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    assert f"{tmp_path}/ours/step0" in ours(tmp_path / "model.safetensors", tmp_path / "ours")
    for found in pool.run(weights_case, dtype="bf16", folder=tmp_path / "ours", steps=steps)[:2]:
        assert found is not None
        loaded, later = found
        for (name, kind), held in loaded.tensors.items():
            assert kind in ("weight", "master"), "no moments yet"
            assert torch.equal(held.to(torch.bfloat16), state.tensors[name, "weight"]), (name, kind)
        assert loaded.steps == {} or set().union(*(each.values() for each in loaded.steps.values())) <= {0.0}
        assert {each["step"] for each in later.steps.values()} == {1.0}


def mismatch_case(folder: Path) -> str | None:
    with jobs.job(jobs.config("bf16", (2, 2))) as made:
        if made.engine.idle:
            return None
        with pytest.raises(CheckpointError) as caught:
            made.engine.load(folder)
        jobs.train(made, 1)
        return str(caught.value)
    return None


def test_names_that_do_not_match_are_named(pool: RankPool, tmp_path: Path) -> None:
    weights = {name: held.detach().clone() for name, held in small_gpt().named_parameters()}
    weights["renamed"] = weights.pop("last_norm.bias")
    weights["scale"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors")
    ours(tmp_path / "model.safetensors", tmp_path / "ours")
    said = pool.run(mismatch_case, folder=tmp_path / "ours")
    for expected in ("has 'last_norm.bias' (15,), which is not in it", "'scale' (3,)", "it has 'renamed' (15,)"):
        assert expected in said[0] and said[0] == said[1]


@pytest.mark.full
def test_stage_0_of_several_groups_is_refused(pool: RankPool, tmp_path: Path) -> None:
    same = {"find": SUBJECTS["module"], "dtype": "fp32", "folder": tmp_path / "theirs"}
    pool.run(saving_case, at=layout("d2z0"), target=layout("d2z0"), **same, seconds=120)
    assert "save it with engine.save" in refused(tmp_path / "theirs", tmp_path / "ours")
