"""What judges the history of a job sees every mistake that it is there for."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from tools.history import mistakes, sums_of_samples

SUMS = [0, *islice(sums_of_samples(), 20)]


def steps(pid: int, generation: int, *numbers: int) -> list[dict[str, Any]]:
    """Right ones, of one process."""
    made = {"pid": pid, "generation": generation, "event": "step"}
    return [{**made, "step": number, "sum": SUMS[number]} for number in numbers]


def test_a_good_history() -> None:
    """Process 2 dies after a step that 1 and 3 have not made, and make again with 4."""
    rows = steps(1, 1, 1, 2) + steps(2, 1, 1, 2, 3) + steps(3, 1, 1, 2) + [{"event": "left", "pid": 5}]
    rows += steps(1, 2, 3, 4) + steps(3, 2, 3, 4) + steps(4, 2, 3, 4)
    assert mistakes(rows) == []


def having(step: int, generation: int, *samples: int) -> dict[str, Any]:
    """A step as `training.py` writes it."""
    parts = [[0.5, list(samples)]]
    return {"pid": 1, "generation": generation, "event": "step", "step": step, "parts": parts}


def test_samples() -> None:
    first = [having(0, 1, 0, 1), having(1, 1, 2, 3)]
    assert mistakes([*first, having(2, 2, 1, 0)], None) == []
    assert mistakes([*first, {**having(1, 2, 3, 2), "pid": 2}], None) == [], (
        "process 1 died, and its step is made again"
    )
    assert "came between" in mistakes([*first, having(2, 2, 1, 1)], None)[0]
    assert "[1, 2] samples" in mistakes([*first, having(2, 2, 1)], None)[0]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (steps(1, 1, 1, 3), "skipped or repeated"),
        (steps(1, 1, 1, 2, 2), "skipped or repeated"),
        (steps(1, 1, 1, 2) + steps(1, 2, 4), "began with"),
        (steps(1, 1, 1, 2, 3) + steps(2, 2, 1, 2), "began with"),
        (steps(1, 1, 1) + steps(1, 2, 2) + steps(2, 2, 1, 2), "began with"),
        ([*steps(1, 1, 1), {**steps(2, 1, 1)[0], "sum": 5}], "has the sums"),
        ([{**steps(1, 1, 1)[0], "sum": 5}], "and not 5"),
        (steps(1, 1, 2), "nobody made step 1"),
    ],
)
def test_mistakes(rows: list[dict[str, Any]], says: str) -> None:
    assert any(says in mistake for mistake in mistakes(rows))
