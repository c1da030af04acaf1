"""`ds-dynatrain compare` for real: ranks, checkpoints, converters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_dynatrain.comparison.comparison import LaunchError, launch
from ds_dynatrain.comparison.job import ComparedChange, Task, Way
from ds_dynatrain.comparison.results import Comparison, Measure

ROOT = Path(__file__).parents[2]


def compared(out: Path, *arguments: str) -> dict[str, Measure]:
    """What the command has measured, by way."""
    command = [sys.executable, "-m", "ds_dynatrain.cli", "compare", "--size", "tiny", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = Comparison.from_json((out / "compare.json").read_text())
    ((size, change),) = found.cases()
    return found.of(size, change)


def check(each: Measure) -> None:
    """What holds of every way that was done."""
    assert each.is_done, each.reason
    assert each.is_equal
    assert (each.steps_lost, each.samples_lost, each.samples_repeated) == (0, 0, 0)
    assert sorted(each.losses) == list(range(1, 15))
    assert each.peak > 50_000_000
    assert sum(each.phases.values()) == pytest.approx(each.total, abs=0.3)
    assert each.phases["first step"] > 0


@pytest.mark.full
@pytest.mark.usefixtures("shared_memory")
def test_a_live_switch(tmp_path: Path) -> None:
    """To fewer ranks, which take two micro-batches for a step: all its samples count, and all its time."""
    (each,) = compared(tmp_path, "--way", "live", "--change", "data=2,zero_stage=1:data=1,zero_stage=2").values()
    check(each)
    assert each.pause is not None and each.certificate is not None
    assert 0 < each.certificate < each.pause < each.total
    assert each.moved > 0
    assert each.written == 0


@pytest.mark.full
@pytest.mark.timeout(1300)
def test_all_ways(tmp_path: Path) -> None:
    measures = compared(tmp_path, "--change", "data=2,zero_stage=1:data=4,zero_stage=1")
    assert list(measures) == ["live", "live-gloo", "late", "lean", "here", "restart", "deepspeed", "dcp"]
    parameters = measures["live"].parameters
    for name, each in measures.items():
        check(each)
        assert (each.pause is not None) == name.startswith(("live", "late", "lean"))
        assert each.written > 12 * parameters or name.startswith(("live", "late"))
    ours = [measures[name] for name in ("live", "live-gloo", "late", "lean", "here", "restart")]
    assert len({json.dumps(dict(each.losses)) for each in ours}) == 1  # bit-equal, before and after
    assert measures["deepspeed"].phases["convert"] > 0


@pytest.mark.full
@pytest.mark.timeout(1300)
def test_what_deepspeed_cannot_do_says_so(tmp_path: Path) -> None:
    """From stage 1 to 3, and to fewer ranks."""
    change = "data=2,zero_stage=1:data=1,zero_stage=3"
    measures = compared(tmp_path, "--change", change, "--way", "here", "--way", "restart", "--way", "deepspeed")
    check(measures["here"])
    check(measures["restart"])
    assert not measures["deepspeed"].is_done


def task(folder: Path, program: str) -> Task:
    return Task(
        Way("a way", "some way", program),
        "whole",
        "tiny",
        ComparedChange.parse("data=1,zero_stage=1:data=1,zero_stage=1"),
        str(folder),
    )


def test_a_launch_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="not done after 1 s"):
        launch(task(tmp_path, "ours"), tmp_path / "notes", 1.0)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path / "notes") not in running


def test_a_rank_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"No module named 'ds_dynatrain\.comparison\.telepathy'"):
        launch(task(tmp_path, "telepathy"), tmp_path / "notes", 120.0)
