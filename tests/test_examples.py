"""The examples run as their pages say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_nodes_come_go_and_die(tmp_path: Path) -> None:
    out = tmp_path / "elastic"
    command = [sys.executable, str(EXAMPLES / "elastic" / "nodes.py"), "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stdout + run.stderr
    for change in ("2 -> 3", "3 -> 2", "2 -> 1"):
        assert change in run.stdout
    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == set(range(rows[-1]["step"] + 1))
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode != 0 and "is not empty" in again.stderr
