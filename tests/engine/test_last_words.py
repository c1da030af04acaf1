"""One member raises, and the others only see a closed connection: all end with its error. A launch of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

SCRIPT = """
import torch, ds_dynatrain
data = torch.utils.data.TensorDataset(torch.randn(240, 4), torch.zeros(240, dtype=torch.long))
config = {"train_batch_size": 12, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
config |= {"zero_optimization": {"stage": 1}, "dynatrain": {"layout": {"data": 2}}}
engine, _, loader, _ = ds_dynatrain.initialize(model=torch.nn.Linear(4, 4), config=config, training_data=data)
for inputs, targets in loader:
    if engine.global_steps == 3 and engine.rank == 1:
        raise ValueError("no such column 'x'")
    engine.backward(torch.nn.functional.cross_entropy(engine(inputs), targets))
    engine.step()
"""


def launched(folder: Path, text: str) -> dict[str, list[str]]:
    """The lines of standard error of three ranks, by rank, of a launch that ends with an error."""
    script, logs = folder / "script.py", folder / "logs"
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--redirects=3"]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, f"--log-dir={logs}", str(script)], env=env, capture_output=True, timeout=240)
    assert done.returncode == 1
    return {file.parent.name: file.read_text().splitlines() for file in logs.rglob("stderr.log")}


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_in_a_collective_is_told_before_its_launcher_kills_it(tmp_path: Path, stage: int) -> None:
    text = SCRIPT.replace('"stage": 1', f'"stage": {stage}').replace('{"layout": {"data": 2}}', "{}")
    last = {rank: lines[-1] for rank, lines in launched(tmp_path, text).items()}
    assert len(last) == 3
    assert all("error" in line and "member 1: ValueError: no such column 'x'" in line for line in last.values()), last


@pytest.mark.full
def test_all_ranks_end_with_the_error_that_ended_the_job(tmp_path: Path) -> None:
    last = {rank: lines[-1] for rank, lines in launched(tmp_path, SCRIPT).items()}
    assert len(last) == 3
    assert all("error" in line and "member 1: ValueError: no such column 'x'" in line for line in last.values()), last


@pytest.mark.full
def test_an_idle_rank_says_why_the_others_could_not_start(tmp_path: Path) -> None:
    resume = {"path": str(tmp_path / "kept"), "tag": "none"}
    text = SCRIPT.replace('"layout": {"data": 2}', f'"layout": {{"data": 2}}, "resume": {resume}')
    idle = launched(tmp_path, text)["2"]
    assert "the script of member" in idle[-1] and "ended with an error: member" in idle[-1], idle
    assert "CheckpointError" in idle[-1] and "none" in idle[-1], idle
