"""Checkpoints of living ranks in other tools' formats, read by these tools themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from ds_dynatrain.cli.main import app
from tests.adapters.stock import stock_engine
from tests.engine import jobs, oracle
from tests.engine.models import decay_groups, small_gpt
from tests.engine.pool import RankPool

STEPS = 3


def saving_case(dtype: str, folder: Path) -> oracle.State | None:
    with jobs.job(jobs.config(dtype, (3, 3))) as made:
        if made.engine.idle:
            return None
        jobs.train(made, STEPS)
        made.engine.save(folder)
        return oracle.gather(made.engine)
    return None


def universal_case(dtype: str, stage: int, folder: Path) -> tuple[oracle.State, str]:
    """What DeepSpeed's own engine reads, with `load_universal`, in the world of all ranks."""
    settings: dict[str, Any] = {key: value for key, value in jobs.config(dtype).items() if key != "dynatrain"}
    settings["zero_optimization"] = {**settings["zero_optimization"], "stage": stage}
    settings["checkpoint"] = {"load_universal": True}
    model = small_gpt()
    with stock_engine(model, settings, model_parameters=decay_groups(model)) as engine:
        path, _ = engine.load_checkpoint(str(folder))
        return oracle.gather(engine), path


def converted(folder: Path, *options: str) -> str:
    found = CliRunner().invoke(app, ["checkpoint", "convert", str(folder), *options])
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_deepspeed_loads_its_universal_format(pool: RankPool, tmp_path: Path, dtype: str) -> None:
    state = pool.run(saving_case, dtype=dtype, folder=tmp_path / "ours")[0]
    assert f"step{STEPS}" in converted(tmp_path / "ours", str(tmp_path / "theirs"), "--to", "deepspeed-universal")
    for stage in (1, 3) if dtype == "bf16" else (2, 3):
        found, path = pool.run(universal_case, dtype=dtype, stage=stage, folder=tmp_path / "theirs")[0]
        assert path is not None
        trained = {key for key in state.tensors if (key[0], "master") in state.tensors}
        for key in trained:
            assert torch.equal(found.tensors[key], state.tensors[key]), (stage, key)
        assert {key for key in found.tensors if (key[0], "master") in found.tensors} == trained
        assert found.steps == state.steps
        told = state.groups if stage < 3 else state.groups[:1]  # stage 3 gives all groups what the first one has
        assert found.groups[: len(told)] == told
        assert found.counters["global_steps"] == STEPS


def test_torch_loads_its_format(pool: RankPool, tmp_path: Path) -> None:
    state = pool.run(saving_case, dtype="bf16", folder=tmp_path / "ours")[0]
    converted(tmp_path / "ours", str(tmp_path / "theirs"), "--to", "dcp")
    wanted: dict[str, torch.Tensor] = {}
    for name, kind in state.tensors:
        if kind == "master" or (kind == "weight" and (name, "master") not in state.tensors):
            wanted[f"model.{name}"] = state.tensors[name, kind]
        elif kind != "weight":
            wanted[f"optim.state.{name}.{kind}"] = state.tensors[name, kind]
    shapes = {name: held.size for name, held in _metadata(tmp_path / "theirs").items() if hasattr(held, "size")}
    found = {name: torch.zeros(shapes[name], dtype=held.dtype) for name, held in wanted.items()}
    found["optim.state.words.weight.step"] = torch.zeros(())
    dcp.load(found, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for name, held in wanted.items():
        assert torch.equal(found[name].flatten(), held.flatten()), name
    assert found["optim.state.words.weight.step"] == STEPS
    refused = CliRunner().invoke(app, ["checkpoint", "convert", str(tmp_path / "ours"), str(tmp_path), "--to", "dcp"])
    assert refused.exit_code == 2 and "there already" in refused.output


def _metadata(path: Path) -> dict[str, Any]:
    return dict(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
