"""`python -m ds_dynatrain.run`: scripts that stay as they are."""

from __future__ import annotations

import json
import os
import re
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


def torchrun(processes: int, *command: str) -> str:
    """What all printed."""
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def run(folder: Path, config: dict[str, Any], processes: int, *script: str) -> tuple[list[float], str]:
    """What rank 0 logged, and what all printed."""
    file = folder / "ds.json"
    file.write_text(json.dumps({**trainers.CONFIG, "gradient_accumulation_steps": 1, **config}))
    printed = torchrun(processes, "-m", "ds_dynatrain.run", *script, str(file), str(folder))
    return json.loads((folder / "log.json").read_text()), printed


def test_a_script_that_knows_nothing_of_it(tmp_path: Path) -> None:
    """With the block its trainer is elastic, with idle processes too; without one it is stock. A file, and a module."""
    logs = []
    for name, block, script in (
        (
            "ours",
            {"dynatrain": {"layout": {"data": 2}}, "train_batch_size": 6},
            ("-m", "tests.integrations.plain_trainer"),
        ),
        ("stock", {}, (str(SCRIPT),)),
    ):
        folder = tmp_path / name
        folder.mkdir()
        losses, printed = run(folder, block, 3 if name == "ours" else 2, *script)
        assert ("DynatrainEngine" in printed) == (name == "ours")
        logs.append(losses)
    assert logs[0] == pytest.approx(logs[1], rel=2e-5) and len(logs[0]) == 4


def test_nothing_to_run() -> None:
    with pytest.raises(ConfigError, match=r"nothing to run: python -m ds_dynatrain.run SCRIPT"):
        main(["-m"])


@pytest.mark.full
def test_the_example(tmp_path: Path) -> None:
    """Both of its commands."""
    command = ("-m", "tests.integrations.on_cpu", "examples/huggingface/train.py", "--out", str(tmp_path))
    torchrun(4, *command, "--steps", "44")
    assert (tmp_path / "checkpoint-40").is_dir()
    printed = torchrun(3, *command, "--steps", "46", "--resume")
    assert "train_loss" in printed and (tmp_path / "checkpoint-46").is_dir()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "said"),
    [("switching_trainer", "train_loss"), ("switching_loop", "21 texts, data=3 zero_stage=3")],
)
def test_a_script_of_the_page(tmp_path: Path, name: str, said: str) -> None:
    """As it stands there."""
    pages = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("huggingface.md", "accelerate.md")]
    found = re.search(rf"```python\n(# {name}.py\n.*?)```", "".join(pages), re.DOTALL)
    assert found is not None
    script = tmp_path / f"{name}.py"
    script.write_text(found[1].replace('"out"', f'"{tmp_path}"'))
    assert said in torchrun(4, "-m", "tests.integrations.on_cpu", str(script))
