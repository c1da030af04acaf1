"""docs/balance.md: its script and its command give what they say; and a worked example of the formulas."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.step_time import Link, LinkCosts, step_time
from ds_dynatrain.cli.main import app
from ds_dynatrain.space.layout import Layout
from tests.balance.profiles import layer

ROOT = Path(__file__).parents[2]
USE = """\
from pathlib import Path

from ds_dynatrain.balance.choose import Members, Search, choose
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.space import Layout

profile = Profile.load(Path("profile.json"))
present = Layout(zero_stage=1, pipe=4, boundaries=(0, 3, 6, 9, 12))
for choice in choose(profile, present, Members((1.0,) * 8, memory_bytes=2 * 10**9), Search(count=3)):
    print(choice.layout, choice.time.step_ms)
"""
"""Python that reads the profile that the page's script writes."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCK.findall((ROOT / "docs" / "balance.md").read_text("utf-8")) if name == language]


def run(code: str, folder: Path) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = blocks("python")
    command = next(line for line in blocks("bash")[0].splitlines() if line.startswith("ds-dynatrain"))
    run(script, tmp_path)
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(app, shlex.split(command)[1:])
    assert said.exit_code == 0 and said.stdout == blocks("")[0]
    lines = run(USE, tmp_path).splitlines()
    assert len(lines) == 3 and all("zero_stage" in line and "'total'" in line for line in lines)


def test_the_worked_example() -> None:
    layers = tuple(layer(name, 1.0, 100, optimizer_seconds=0.4, output_bytes=0) for name in "ab")
    measured = Profile(layers=layers, train_batch_size=4, micro_batch_size=1)
    layout = Layout(zero_stage=1, pipe=2, data=2, boundaries=(0, 1, 2))
    found = step_time(measured, layout, Deal.of(measured, layout), links=LinkCosts(Link(1000.0)))
    terms = {
        "compute": 6e3,
        "waiting": 3e3,
        "reduce": 200,
        "optimizer": 200,
        "gather": 100,
        "beside": 0,
        "total": 9.5e3,
    }
    assert found.step_ms == pytest.approx(terms)
