"""`python -m ds_dynatrain.run`: scripts that stay as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.run import main
from tests.integrations import trainers

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "integrations" / "plain_trainer.py"


def run(folder: Path, config: dict[str, Any], processes: int) -> tuple[list[float], str]:
    """Under torchrun: what rank 0 logged, and what all printed."""
    file = folder / "ds.json"
    file.write_text(json.dumps({**trainers.CONFIG, "gradient_accumulation_steps": 1, **config}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    ended = subprocess.run(
        [*torchrun, "-m", "ds_dynatrain.run", str(SCRIPT), str(file), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads((folder / "log.json").read_text()), ended.stdout


def test_a_script_that_knows_nothing_of_it(tmp_path: Path) -> None:
    """With the block its trainer is elastic, with idle processes too; without one it is stock."""
    logs = []
    for name, block in (("ours", {"dynatrain": {"layout": {"data": 2}}, "train_batch_size": 6}), ("stock", {})):
        folder = tmp_path / name
        folder.mkdir()
        losses, printed = run(folder, block, 3 if name == "ours" else 2)
        assert ("DynatrainEngine" in printed) == (name == "ours")
        logs.append(losses)
    assert logs[0] == pytest.approx(logs[1], rel=2e-5) and len(logs[0]) == 4


def test_nothing_to_run() -> None:
    with pytest.raises(ConfigError, match=r"nothing to run: python -m ds_dynatrain.run SCRIPT"):
        main(["-m"])
