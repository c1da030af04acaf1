"""`tools/gpu_check.py` where there is no card, and its switches on the device without hardware, which counts memory."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import RANKS
from tests.engine import test_members, test_sequence
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


def test_pauses_are_held_against_a_raw_copy(steps: Any) -> None:
    """Of 120 ms 5 are the certificate's and 3 are waited for communicators: 112, where 1.25 times 9 and 100 may be."""
    ahead = note("2→4", "ahead")
    ahead["event"] |= {"pause_ms": 120.0, "connect_pause_ms": 3.0}
    ahead["event"]["phases_ms"] |= {"digest": 2.0, "verify": 3.0}
    assert steps.judged([ahead], {"2→4": 9.0}) == {"2→4, bar": "112 ms, raw 9.0 ms, bar 111 ms: missed"}
    assert steps.judged([ahead], {"2→4": 9.6})["2→4, bar"].endswith("bar 112 ms: met")


def rounding_case(tools: str) -> dict[str, Any]:
    sys.path.insert(0, tools)
    found: dict[str, Any] = importlib.import_module("gpu_speeds").rounding("lab")
    return found


@pytest.mark.full
def test_kernels_are_tried_at_several_places(lab_pool: RankPool) -> None:
    for found in lab_pool.run(rounding_case, tools=str(TOOLS)):
        assert "functions" not in found["bits follow the place of operands in"] and found["bits are the same again"]


@pytest.mark.full
@pytest.mark.parametrize("way", ["auto", "gloo"])
def test_switches_are_measured(steps: Any, lab_pool: RankPool, way: str) -> None:
    found = steps.pauses("bf16", "tiny", "lab", way)
    assert found["memory at the peak"] == "within the bound"
    assert found["stage 1→3, communicators"].startswith("0 built, ") and "1 built" in found["2→4, communicators"]
    for name in steps.CHANGES:
        assert "then" in found[f"{name}, late"] and (f"{name}, bar" in found) == (way == "auto"), found


@pytest.mark.full
def test_what_stays_after_many_switches(steps: Any, lab_pool: RankPool) -> None:
    found = steps.many("tiny", "lab", 3)
    kept = {held for name, held in found.items() if name != "switches"}
    assert found["switches"] == 12 and len(kept) == 1, found


@pytest.mark.full
def test_the_probe_measures_aborts_beside_a_stopped_rank_and_connects_anew(steps: Any, lab_built: None) -> None:
    kept = list[dict[str, Any]]()
    found = steps.probe("lab", 120.0, kept.append)
    assert found["exit"] == 0, found
    assert {f"{name}, s" for name in steps.COLLECTIVES} | {steps.ABORTED, "communicator anew, s"} < found.keys()
    assert len(kept) > 2 and "communicator anew, s" not in kept[0], "what is known is kept before the rest is"


@pytest.mark.full
def test_the_gate_is_measured_beside_a_step(steps: Any, lab_built: None) -> None:
    found = steps.gate("tiny", "lab", batch=1, rounds=1)
    assert found["step, ms"] > 0 and "bar 1 %" in found["the gate"]


@pytest.mark.full
def test_everything_happens_to_an_elastic_job(steps: Any, lab_built: None) -> None:
    """What a card is tried with, on the device, with fewer deaths."""
    kept, script = list[str](), Path(__file__).with_name("elastic_training.py")
    what = importlib.import_module("gpu_events")
    found = what.events(script, "cpu", instants=("forward",), kills=1, note=lambda found: kept.append([*found][-1]))
    assert found["exit"] == 0, found
    assert {"forward: is killed, s", "a switch: the joiner is killed, s", "pause: stands still, s"} < set(kept)


@pytest.fixture(scope="module")
def staged_pool(lab_built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Ranks that talk as those do that share a card."""
    ranks = RankPool(RANKS, tmp_path_factory.mktemp("staged"), accelerator="cpu", module="tests.device.staged_process")
    yield ranks
    ranks.stop()


@pytest.mark.full
def test_what_ranks_of_one_card_send_is_not_written_to(staged_pool: RankPool) -> None:
    """Else stage 3 would go on with each rank's own gradients."""
    test_members.test_dropout_goes_on_as_if_nothing_had_happened(staged_pool)
    for layout in test_sequence.LAYOUTS:
        test_sequence.test_every_layout_computes_the_same(staged_pool, layout)


def test_pauses_stay_where_raw_copies_fail(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = [note(name, "ahead") for name in steps.CHANGES]

    def launched(script: str, *given: Any, **named: Any) -> dict[int, Any]:
        if script == "gpu_moves_ranks.py":
            raise SystemExit("no room for them")
        return {0: notes}

    monkeypatch.setattr(steps, "launch", launched)
    found = steps.pauses("bf16", modes=("ahead",))
    assert found["raw copies"] == "no room for them" and set(steps.CHANGES) < set(found)


@pytest.mark.full
@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_moves_are_measured_beside_raw_copies(steps: Any, lab_built: None, way: str) -> None:
    found = steps.moves(way, size="tiny", device="lab", repeats=1)
    assert found["exit"] == 0 and set(steps.CHANGES) < set(found), found


@pytest.mark.full
def test_members_come_go_and_die(steps: Any, lab_built: None) -> None:
    """What a card is tried with, on the device."""
    script = Path(__file__).with_name("elastic_training.py")
    found = importlib.import_module("gpu_elastic").elastic(script, "cpu")
    assert found["exit"] == 0, found
    assert found["wrong"] == "nothing" and found["kill to the next step, s"] > 0, found


def test_what_a_card_has_shown_becomes_a_row(steps: Any) -> None:
    found = {"elastic": {"exit": 0}, "core tensor": {"exit": 1}, "core pipe": {"exit": 0}}
    rows = steps.proved(found, "2.13", "H100", "2.28.9")
    assert [row.split('"')[3] for row in rows.splitlines()] == ["pipe", "elastic"]
    assert "--only 'elastic'" in rows and "--only 'core pipe'" in rows


def test_what_a_card_has_shown_with_nccl_counts_before_what_was_staged(steps: Any) -> None:
    passed = ("core stages nccl", "core pipe", "core pipe nccl", "elastic nccl")
    found = {step: {"exit": 0} for step in passed}
    rows = steps.proved({**found, "batches nccl": {"exit": 1}}, "2.11", "H200", "2.28.9").splitlines()
    assert [row.split('"')[3] for row in rows] == ["groups", "stages", "pipe", "elastic"]
    for row in rows:
        assert '"4 ranks on 1 × H200, NCCL 2.28.9 over sockets"' in row and '--only nccl"' in row


@pytest.fixture
def check(steps: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`gpu_check` on a card that is called H200; steps are not run, but noted in `ran`, and `answers` says what they
    find."""
    made = importlib.import_module("gpu_check")
    monkeypatch.setenv("RANKS", "4")
    monkeypatch.setattr(steps, "versions", lambda: ("2.11", "H200", "2.28.9"))
    made.ran, made.answers = list[str](), dict[str, Any]()

    def run(name: str, out: Path, seconds: float) -> dict[str, Any]:
        made.ran.append(name)
        return {"exit": 0, **made.answers.get(name, {})}

    monkeypatch.setattr(made, "run", run)
    return made


def test_the_cheapest_steps_with_nccl_come_first(steps: Any, check: Any, tmp_path: Path) -> None:
    order = list(check.chosen(["nccl"]))
    assert order[:5] == [
        "nccl probe",
        "core stages nccl",
        "core members nccl",
        "elastic nccl",
        "batches nccl",
    ]
    assert {f"core {part} nccl" for part in steps.CORE} < set(order) < set(steps.STEPS)
    check.check(check.chosen(["nccl"]), tmp_path, time.monotonic() + 3600)
    assert check.ran == order and "over sockets" in (tmp_path / "gpu_check.md").read_text()


def test_where_the_probe_fails_nothing_with_nccl_is_run(check: Any, tmp_path: Path) -> None:
    check.answers["nccl probe"] = {"exit": 1}
    check.check(check.chosen(["nccl"]), tmp_path, time.monotonic() + 3600)
    assert check.ran == ["nccl probe", "gate", "digest bar", "pauses late", "many"]
    assert "core pipe nccl | – | error: left out: the probe failed" in (tmp_path / "gpu_check.md").read_text()


@pytest.mark.parametrize(("seconds", "ranks"), [(1.9, 4), (2.1, 2)])
def test_slow_collectives_leave_two_ranks(steps: Any, check: Any, tmp_path: Path, seconds: float, ranks: int) -> None:
    check.answers["nccl probe"] = {"slowest collective, s": seconds}
    check.check(check.chosen(["nccl probe"]), tmp_path, time.monotonic() + 3600)
    assert steps.ranks() == ranks
    assert ranks == 4 or steps.core("pipe", "nccl") == steps.faulty_batches() == {"left out": steps.LEFT_OUT}


def test_a_step_that_does_not_fit_is_left_out(check: Any, tmp_path: Path) -> None:
    check.check({"elastic nccl": 170.0, "batches nccl": 50.0}, tmp_path, time.monotonic() + 80)
    assert check.ran == ["batches nccl"]
    assert (
        "elastic nccl | – | error: left out: it may take 170 s, and 80 s are left"
        in (tmp_path / "gpu_check.md").read_text()
    )


def test_a_dry_run_says_what_would_run(steps: Any) -> None:
    command = [sys.executable, str(TOOLS / "gpu_check.py"), "--only", "nccl", "--dry-run"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 2 + len(steps.GROUPS["nccl"]) and said[2].startswith("| nccl probe | 40 | ")
    assert any("pytest tests/gpu/core -k 'sequence_parallel'" in line for line in said)


ASKING = """
import os
from tests.gpu.staging import chosen_backend
assert chosen_backend() == "nccl"
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, os.environ["NCCL_HOSTID"].encode())
    os._exit(0)
os.wait()
print(os.environ["NCCL_HOSTID"], os.read(reader, 999).decode(), os.environ["NCCL_SOCKET_IFNAME"])
"""


def test_each_process_is_a_host_to_nccl() -> None:
    names = {**os.environ, "COLLECTIVES": "nccl", "PYTHONPATH": str(TOOLS.parent)}
    done = subprocess.run([sys.executable, "-c", ASKING], capture_output=True, text=True, check=True, env=names)
    mine, forked, interface = done.stdout.split()
    assert mine != forked and mine.rpartition("-")[0] == forked.rpartition("-")[0] and interface == "lo"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_nothing_is_checked(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOLS / "gpu_check.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no accelerator" in done.stdout and not (tmp_path / "out").exists()


HANGING = """
import subprocess, sys, time
print("it began", flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
time.sleep(60)
"""


def test_a_step_that_hangs_leaves_its_words_and_no_process(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, script = importlib.import_module("gpu_check"), tmp_path / "hanging.py"
    script.write_text(HANGING)
    monkeypatch.setattr(steps, "__file__", str(script))
    found = check.run("nccl", tmp_path, 1.5)
    assert "not done in 2 s" in found["error"] and "it began" in found["error"]
    left, end = importlib.import_module("processes").with_variable, time.monotonic() + 10
    while left(check.MARK, f"{os.getpid()} nccl"):  # killed, and not gone at once
        assert time.monotonic() < end
        time.sleep(0.05)
