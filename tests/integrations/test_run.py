"""`python -m ds_dynatrain.run`: scripts that stay as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.run import main
from tests.elastic.warm import torchrun
from tests.integrations import trainers

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "integrations" / "plain_trainer.py"
SECONDS = 240.0


def launched(processes: int, *command: str, is_warm: bool = False) -> str:
    """What all printed, of processes that are new or forked."""
    code, printed = torchrun([f"--nproc-per-node={processes}", *command], SECONDS, is_warm)
    assert code == 0, printed[-3000:]
    return printed


def run(folder: Path, config: dict[str, Any], processes: int, *script: str, is_warm: bool) -> tuple[list[float], str]:
    """What rank 0 logged, and what all printed."""
    file = folder / "ds.json"
    file.write_text(json.dumps({**trainers.CONFIG, "gradient_accumulation_steps": 1, **config}))
    printed = launched(processes, "-m", "ds_dynatrain.run", *script, str(file), str(folder), is_warm=is_warm)
    return json.loads((folder / "log.json").read_text()), printed


@pytest.mark.parametrize("is_warm", [True, pytest.param(False, marks=pytest.mark.full, id="new processes")])
def test_a_script_that_knows_nothing_of_it(tmp_path: Path, is_warm: bool) -> None:
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
        losses, printed = run(folder, block, 3 if name == "ours" else 2, *script, is_warm=is_warm)
        assert ("DynatrainEngine" in printed) == (name == "ours")
        logs.append(losses)
    assert logs[0] == pytest.approx(logs[1], rel=2e-5) and len(logs[0]) == 4


def test_nothing_to_run() -> None:
    with pytest.raises(ConfigError, match=r"no script was given; python -m ds_dynatrain.run SCRIPT"):
        main(["-m"])


@pytest.mark.full
def test_the_example(tmp_path: Path) -> None:
    """Both of its commands."""
    command = ("-m", "tests.integrations.on_cpu", "examples/huggingface/train.py", "--out", str(tmp_path))
    launched(4, *command, "--steps", "44")
    assert (tmp_path / "checkpoint-40").is_dir()
    printed = launched(3, *command, "--steps", "46", "--resume")
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
    assert said in launched(4, "-m", "tests.integrations.on_cpu", str(script))
