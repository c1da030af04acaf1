"""`for epoch in range(n): for batch in loader:` with a member that comes in epoch 1, under real torchrun."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.cli import checkpoints
from tests.elastic.agents import ROOT, Job
from tests.elastic.kinds import settings
from tests.elastic.runs import gated, open_gate
from tests.elastic.warm import nursery

SCRIPT = ROOT / "tests" / "elastic" / "epochs.py"
EPOCHS = 4
FEW, MANY = 3, 20
"""Steps of an epoch: if all processes are there, and if one has to come meanwhile."""
LIMIT = 180.0


def sizes(steps: int) -> dict[str, str]:
    """What the script is told."""
    return {"EPOCHS": str(EPOCHS), "STEPS": str(steps)}


def check(rows: list[dict[str, Any]], count: int, ends: int) -> None:
    """Each sample of an epoch was used once in it; there were two members from epoch 1 on.

    count: steps of an epoch. ends: scripts that came to their last line.
    """
    steps = [row for row in rows if row["event"] == "step"]
    used = Counter((row["step"] // count, number) for row in steps for number in row["samples"])
    assert used == Counter((epoch, number) for epoch in range(EPOCHS) for number in range(12 * count))
    late = [row for row in steps if row["epoch"] < row["step"] // count]
    assert {row["size"] for row in late} == {2} and min(row["step"] for row in late) // count == 1
    assert sum(row["event"] == "end" for row in rows) == ends


def test_a_process_that_was_idle(tmp_path: Path) -> None:
    """A fixed launch: it is woken in epoch 1, and all processes end with code 0."""
    names = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OUT": str(tmp_path)}
    names |= {"SETTINGS": json.dumps(settings(layout={"data": 1})), "HOW": "wakes", **sizes(FEW)}
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    with (tmp_path / "log").open("w") as log:
        run = nursery().start(command, {**os.environ, **names}, tmp_path, log.fileno())
    try:
        code = run.wait(LIMIT)
    finally:
        run.kill()
    said = (tmp_path / "log").read_text()
    assert code == 0 and "Traceback" not in said, said[-6000:]
    lines = [line for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    check([json.loads(line) for line in lines], FEW, ends=1)


@pytest.mark.full
@pytest.mark.parametrize("how", ["", "saves"])
def test_a_node_that_joins(train: Callable[..., Job], tmp_path: Path, how: str) -> None:
    """An elastic launch: it joins in epoch 1, and both agents and the coordinator end with code 0.

    Where all save after the loop it gets there, too.
    """
    job = train(nodes="1:2", script=SCRIPT, variables={"HOW": how, **sizes(MANY)})
    job.coordinator("coordinator")
    gated(job, "b")
    job.node("a", is_host=0)
    job.wait(lambda: any(row["step"] >= MANY for row in job.rows("step")), "epoch 1")
    open_gate(job, "b")
    assert {name: job.code(name) for name in ("a", "b", "coordinator")} == {"a": 0, "b": 0, "coordinator": 0}, (
        job.logs()
    )
    assert "Traceback" not in job.logs()
    check(job.rows(), MANY, ends=2 if how else 1)
    if how:
        assert not list(checkpoints.damage(checkpoints.found(tmp_path / "saved" / "last")))
