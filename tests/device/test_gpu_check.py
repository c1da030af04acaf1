"""`tools/gpu_check.py` where there is no card, and its switches on the device without hardware, which counts memory."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.pool import RankPool

TOOLS = Path(__file__).parents[2] / "tools"
MIB = 1 << 20


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("gpu_steps")


def note(name: str, mode: str, **memory: int) -> dict[str, Any]:
    event = {"pause_ms": 12.4, "phases_ms": {"move": 7.6}, "communicators_built": 1, "communicators_kept": 2}
    event |= {"connect_ms": 5.2, "connect_pause_ms": 0.0}
    return {"change": {"name": name, "mode": mode}, "event": event, **memory}


def test_memory_is_held_against_what_was_there_and_what_the_target_adds(steps: Any) -> None:
    """100 MiB were there, 60 of them state; the target keeps 20 of these, and is 50 in all."""
    held = {"before": 100 * MIB, "source": 60 * MIB, "both": 90 * MIB, "bucket": 0}
    inside, outside = (note("2→4", "now", peak=peak * MIB, **held) for peak in (258, 261))
    assert steps.allowed(inside) == (100 + 30 + 64 + 64) * MIB and steps.above(inside) == 0
    assert steps.allowed({**inside, "bucket": 7 * MIB}) == steps.allowed(inside) + 7 * MIB
    others = [note(name, mode, peak=0, **held) for name in steps.CHANGES for mode in ("now", "ahead")]
    found = steps.pauses_of([*others, inside])
    assert found["2→4"] == "12 ms (move 8)" and found["2→4, peak MiB"] == "258, allowed 258"
    assert found["2→4, communicators"] == "1 built, 2 kept, 5 ms, 0 of them in the pause"
    assert found["memory at the peak"] == "within the bound"
    assert steps.pauses_of([*others, inside, outside])["memory at the peak"] == "3 MiB above the bound"


@pytest.mark.full
@pytest.mark.parametrize("way", ["auto", "gloo"])
def test_switches_are_measured(steps: Any, lab_pool: RankPool, way: str) -> None:
    found = steps.pauses("bf16", "tiny", "lab", way)
    assert found["memory at the peak"] == "within the bound"
    assert found["stage 1→3, communicators"].startswith("0 built, ") and "1 built" in found["2→4, communicators"]


@pytest.mark.full
def test_batches_are_measured(steps: Any, lab_built: None) -> None:
    found = steps.batches("tiny", "lab", 1)
    assert found["exit"] == 0 and set(steps_changes()) < set(found), found


def steps_changes() -> Any:
    return importlib.import_module("gpu_batches_ranks").CHANGES


@pytest.mark.full
def test_members_come_go_and_die(steps: Any, lab_built: None) -> None:
    """What a card is tried with, on the device."""
    script = Path(__file__).with_name("elastic_training.py")
    found = importlib.import_module("gpu_elastic").elastic(script, "cpu")
    assert found["exit"] == 0, found
    assert found["wrong"] == "nothing" and found["kill to the next step, s"] > 0, found


def test_what_a_card_has_shown_becomes_a_row(steps: Any) -> None:
    rows = steps.proved({"elastic": {"exit": 0}, "core tensor": {"exit": 1}, "core pipe": {"exit": 0}}, "2.13", "H100")
    assert [row.split('"')[3] for row in rows.splitlines()] == ["pipe", "elastic"]
    assert "--only 'elastic'" in rows and "--only 'core pipe'" in rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_nothing_is_checked(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOLS / "gpu_check.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no accelerator" in done.stdout and not (tmp_path / "out").exists()
