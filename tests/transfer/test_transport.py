"""Transports in real processes: three, started once, run every case of transport_rank.py over gloo and as neighbors.

The third is killed in the middle of a message.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynatrain.transfer import Neighbors

ROOT = Path(__file__).parents[2]
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each of the three ranks saw, case by case."""
    folder = tmp_path_factory.mktemp("gloo")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.transport_rank", str(rank), str(folder)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, -signal.SIGKILL], errors
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]


every = pytest.mark.parametrize("way", ["gloo", "near"])


@every
@pytest.mark.parametrize("case", ["every_dtype", "split_messages", "switches", "out_of_step"])
def test_all_bytes_arrive(seen: Seen, way: str, case: str) -> None:
    assert [rank[f"{way} {case}"] for rank in seen] == [[], [], []]


def test_processes_of_one_machine_are_neighbors(seen: Seen) -> None:
    for number, rank in enumerate(seen):
        assert rank["near"] == [10 + other for other in range(3) if other != number]


def test_wrong_groups_are_refused(seen: Seen) -> None:
    for few, twice in (case["wrong_groups"] for case in seen):
        assert "a group of 3 ranks needs as many different members, got [10, 11]" in few
        assert "got [10, 11, 11]" in twice


@every
def test_wrong_uses_are_refused(seen: Seen, way: str) -> None:
    for rank, refused in enumerate(case[f"{way} refusals"] for case in seen):
        self_, stranger, shape = refused
        kind = "peer" if way == "gloo" else "neighbor"
        assert f"member {10 + rank} is no {kind}" in self_
        assert f"member 99 is no {kind}" in stranger
        assert "1-D contiguous" in shape


def test_a_message_of_another_length_is_refused(seen: Seen) -> None:
    assert seen[1]["unequal_lengths"] == "member 10 offers 16 bytes where 12 are awaited"


def test_a_wait_is_given_up_when_told(seen: Seen, in_time: Callable[[float, float], None]) -> None:
    """gloo has no call for that: its own wait goes on in a thread."""
    case = seen[0]["given_up"]
    assert (case["error"], case["text"]) == ("TransferError", "nothing will come")
    in_time(case["seconds"], 5.0)


@every
def test_a_silent_member_is_named_within_the_time_out(
    seen: Seen, in_time: Callable[[float, float], None], way: str
) -> None:
    for rank in seen[:2]:
        case = rank[f"{way} silent_member"]
        assert case["error"] == "MemberMissing"
        assert case["members"] == [12]
        assert case["seconds"] > 0.4
        in_time(case["seconds"], 1.4)


@every
def test_a_dead_member_is_named_at_once(seen: Seen, way: str) -> None:
    for rank in seen[:2]:
        case = rank[f"{way} dying_member"]
        assert case["error"] == "TransferError"
        assert "with member 12 failed" in case["text"]
        assert case["seconds"] < 10


def test_a_member_killed_in_the_middle_of_a_message_is_named(seen: Seen) -> None:
    case = seen[0]["half_sent"]
    assert case["error"] == "TransferError"
    assert "with member 12 failed" in case["text"]
    assert case["seconds"] < 10


def test_finding_neighbors_draws_from_no_stream_of_the_training() -> None:
    """It is done in a thread beside it, at a moment that nobody knows."""
    before = torch.get_rng_state()
    Neighbors.meet(0, lambda _, record: {0: record}, 5.0).close()
    assert torch.equal(torch.get_rng_state(), before)
