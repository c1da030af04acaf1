"""The examples run as their pages say."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.elastic.warm import torchrun

EXAMPLES = Path(__file__).parents[1] / "examples"


def nodes() -> ModuleType:
    """The script that plays nodes through."""
    spec = importlib.util.spec_from_file_location("nodes_of_the_example", EXAMPLES / "elastic" / "nodes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_a_death_costs_is_counted_to_the_next_new_step() -> None:
    """Step 186 is noted by who is left, and undone: steps 180 to 186 are made again, 2 s after the last one before."""
    noted = [(step, 2, 0.1 * step) for step in range(186)]
    noted += [(186, 1, 19.6), *((step, 1, 20.5 + 0.1 * (step - 180)) for step in range(180, 220))]
    rows = [{"step": step, "members": members, "time": time} for step, members, time in noted]
    pause, again = nodes().cost(rows, 180)
    assert again == 7 and pause == pytest.approx(1e3 * (21.2 - 18.5 - 0.2))


def test_a_join_costs_its_pause() -> None:
    rows = [{"step": step, "members": 1 + step // 20, "time": 0.1 * step + (step // 20)} for step in range(40)]
    pause, again = nodes().cost(rows, 15)
    assert again == 0 and pause == pytest.approx(1000)


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
    costs = re.findall(r"│ \d -> \d .*?([\d-]+) ms +│ +(\d+) +│", run.stdout)
    again = [int(steps) for _, steps in costs]
    assert len(costs) == 3 and again[:2] == [0, 0] and again[2] <= 1, run.stdout
    assert sum(again) == len(rows) - len({row["step"] for row in rows}), "what the file says"
    assert 0 < float(costs[2][0]) < 60_000, run.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode != 0 and "is not empty" in again.stderr


def launched(script: str, *arguments: str) -> str:
    """Return what four processes print; they are forked by one that has imported everything."""
    code, printed = torchrun(["--nproc-per-node=4", str(EXAMPLES / "rl" / script), *arguments], 200)
    assert code == 0, printed
    return printed


@pytest.mark.timeout(250)
def test_a_loop_over_parameters_and_send_bring_the_same_weights() -> None:
    printed = launched("openrlhf_like.py", "--layers=1", "--width=32", "--laps=1")
    loop, sent = (re.search(rf"^{name} +(\d+)", printed, re.MULTILINE) for name in ("loop", "send"))
    assert loop and sent and int(loop[1]) > 10 * int(sent[1])
    assert "all equal at the rollout engine" in printed


@pytest.mark.timeout(450)
@pytest.mark.usefixtures("shared_memory")
def test_rollouts_of_a_shared_pool_give_the_rewards_of_one_that_keeps_its_size(tmp_path: Path) -> None:
    for how in ("--keep", "--trainers=1"):
        printed = launched("train.py", how, "--rollouts=4", f"--out={tmp_path}")
    assert "7 switches" in printed and (tmp_path / "rl.png").stat().st_size > 0
    keep, pool = (
        [json.loads(row)["reward"] for row in (tmp_path / name / "rewards.jsonl").read_text().splitlines()]
        for name in ("keep", "pool")
    )
    assert len(keep) == 4 and keep == pool and keep[-1] > keep[0]
    spans = [json.loads(row) for row in (tmp_path / "pool" / "member-3.jsonl").read_text().splitlines()]
    assert sum(span["what"] == "generate" for span in spans) >= 4, "an idle member takes part in every rollout"
