"""Whose checkpoint lies at a path: by what is there, or an error that names what was looked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from ds_dynatrain.checkpoint.others.recognize import told_at
from ds_dynatrain.cli.main import app
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from tests.checkpoint.test_damage import whole


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=r"path of one of these: .*mp_rank_00_model_states.pt.*latest"):
            told_at(path)
    (tmp_path / "latest").write_text("../../etc\n")
    with pytest.raises(CheckpointError, match="give the path of one of these"):
        told_at(tmp_path)


def test_theirs_where_ours_is_meant(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("theirs")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mp_rank_00_model_states.pt").write_bytes(b"")
    found = CliRunner().invoke(app, ["checkpoint", "convert", str(tmp_path), str(tmp_path / "x.safetensors")])
    words = " ".join(found.output.split())
    assert found.exit_code == 2 and "first convert another tool's" in words and "--to universal" in words, words


def test_one_of_ours(tmp_path: Path) -> None:
    whole(tmp_path)
    with pytest.raises(CheckpointError, match="is a checkpoint of ds_dynatrain already"):
        told_at(tmp_path)


def test_two_notes_that_disagree(tmp_path: Path) -> None:
    for note, name in (("latest", "one"), ("latest_universal", "other")):
        (tmp_path / note).write_text(name)
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=r"not clear: latest and latest_universal name .*one and .*other"):
        told_at(tmp_path)


@pytest.mark.parametrize("weights", ["model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json"])
def test_weights_beside_the_state_that_latest_names(tmp_path: Path, weights: str) -> None:
    """The checkpoint folder of a stock Trainer: weights for inference, and all of the training below."""
    (tmp_path / "global_step6").mkdir()
    (tmp_path / "global_step6" / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / weights).write_bytes(b"")
    if weights.startswith("model"):
        save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "latest").write_text("global_step6\n")
    with pytest.raises(CheckpointDamaged, match=r"global_step6.*no file of torch.save"):
        told_at(tmp_path)
    (tmp_path / "latest").write_text("global_step7\n")
    with pytest.raises(CheckpointError, match=r"not clear: latest in it names 'global_step7', which is not"):
        told_at(tmp_path)


def test_the_command_leaves_nothing_of_a_failure(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04 and no more")
    command = ["checkpoint", "convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "universal"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 2 and "no file of torch.save, or cut off" in found.output
    assert CliRunner().invoke(app, [*command, "--dtype", "float32"]).exit_code == 2
    assert not (tmp_path / "ours").exists()


@pytest.mark.full
def test_memory_of_each_direction() -> None:
    """The largest tensor of one kind and a constant, in a process for each; the whole is 9 times as much."""
    out = subprocess.run(
        [sys.executable, "tools/bench_convert.py", "--mib", "64", "--tensors", "4"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    rows = re.findall(r"(?:: |; )([^;:]+?) to (\S+) (\d+) MiB, [\d.]+ s", out)
    assert len(rows) == 7 and all("ours" in row for row in rows), out
    for source, target, held in rows:
        assert int(held) <= 64 + 48, (source, target, held)
