"""A short run of `tools/fuzz_checkpoints.py` from a fixed seed, and what longer ones have found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynatrain.checkpoint import record
from tests.checkpoint.strangers import checkpoint, rewritten
from tests.checkpoint.test_convert import TO
from tests.checkpoint.test_damage import whole
from tests.checkpoint.test_deepspeeds import stage_2

ROOT = Path(__file__).parents[2]


def test_a_few_hundred_mutants() -> None:
    """It says itself what must not be, and ends with code 1 then."""
    command = [sys.executable, "tools/fuzz_checkpoints.py", "--mutants", "300", "--processes", "1", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 mutated checkpoints" in done.stdout and "; faults: none." in done.stdout, done.stdout
    found = re.search(r"bits in values found: (\d+) of (\d+)", done.stdout)
    assert found and found[1] == found[2] != "0", done.stdout


def with_buffers(path: Path, buffers: Any) -> None:
    """What rank 0 says of the module's buffers."""
    rest = {"grad_norm": None, "buffers": buffers, "objects": {}}
    (path / record.rank_file(0)).write_text(json.dumps({"streams": {}, "rest": rest}))
    rewritten(path)


@pytest.mark.parametrize("name", ["a", "mean"])
@pytest.mark.parametrize("held", [{"x": 1}, 3, {"__tensor__": 0, "dtype": "float32", "shape": [0]}])
def test_buffers_that_are_none(tmp_path: Path, name: str, held: Any) -> None:
    """Neither what is no tensor, nor one by the name of a parameter, whose place in a file it would take."""
    path = whole(tmp_path / "ours")
    with_buffers(path, {name: held})
    code, text = checkpoint("convert", path, tmp_path / TO["deepspeed-universal"], "--to", "deepspeed-universal")
    is_tensor = isinstance(held, dict) and "__tensor__" in held
    assert code == (0 if is_tensor and name == "mean" else 2), text
    assert "both 'a'" in text if is_tensor and name == "a" else True


def test_steps_that_are_no_number(tmp_path: Path) -> None:
    assert checkpoint("convert", stage_2(tmp_path / "theirs" / "step"), tmp_path / "ours", "--to", "universal")[0] == 0
    assert checkpoint("convert", tmp_path / "ours", tmp_path / "their", "--to", "deepspeed-universal")[0] == 0
    torch.save(torch.ones(5, 7), tmp_path / "their" / "step3" / "zero" / "a" / "step.pt")
    code, text = checkpoint("convert", tmp_path / "their", tmp_path / "again", "--to", "universal")
    assert code == 2 and "step.pt has a tensor of shape (5, 7) where a number is expected" in text
