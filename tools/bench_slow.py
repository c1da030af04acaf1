"""Measure how much of a slow-down balance removes, while another process takes most of one member's core.

python tools/bench_slow.py

Two ranks train with one core each. The slow-down lasts 10 or 24 scaled minutes, the means that GREYHOUND reports for
slow computation and slow communication. Each is run once with balance and once without. The loss of a run is what it
trains less than it would have at its speed before the slow-down. Takes about six minutes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from figures import machine, table
from launch import launch

MINUTES, MINUTE = (10, 24), 2.5
"""Lengths of the slow-downs in minutes, and the seconds that represent a minute."""
BEFORE, SETTLED, NEIGHBORS = 8.0, 3.0, 3
"""Seconds before a slow-down, how many of them do not count, and the number of other processes on the member's core."""
BALANCE = {"mode": "act", "slow_steps": 9}
BAR = 0.59
"""Fraction of the slow-down that must be removed."""


def run(minutes: int, balance: dict[str, Any]) -> dict[str, Any]:
    """Run one job, and return rank 0's notes."""
    slow = minutes * MINUTE
    given: dict[str, Any] = {"begin": BEFORE, "end": BEFORE + slow, "stop": BEFORE + 1.5 * slow, "neighbors": NEIGHBORS}
    return launch("slow_ranks.py", 2, 300, balance=balance, **given)[0][0]


def step_seconds(note: dict[str, Any], begin: float, end: float) -> float:
    """Return the median seconds of a step between two times."""
    ends = np.array(note["ends"])
    return float(np.median(np.diff(ends[(ends > begin) & (ends < end)])))


def lost(note: dict[str, Any], healthy: float, minutes: int) -> float:
    """Return the seconds lost from the start of the slow-down to the end of the run, including all pauses.

    The steps of each second count by their median, so short disturbances by other processes do not matter.

    healthy: the seconds of a step before the slow-down.
    """
    ends, total = np.array(note["ends"]), 0.0
    for second in np.arange(BEFORE, BEFORE + 1.5 * minutes * MINUTE):
        steps = np.diff(ends)[(ends[1:] >= second) & (ends[1:] < second + 1)]
        total += max(0.0, 1 - healthy / float(np.median(steps))) if len(steps) else 1.0
    return float(total + sum(1e-3 * pause for _, _, pause in note["moves"]))


def row(minutes: int, notes: list[dict[str, Any]]) -> list[object]:
    """Return a row of the table.

    notes: the notes of the run without balance, and of the run with it.

    Each run is compared with its own speed before the slow-down, because other load on the machine changes it.
    """
    end = BEFORE + minutes * MINUTE
    healthy = [step_seconds(note, SETTLED, BEFORE) for note in notes]
    slow = [step_seconds(note, end - 0.4 * minutes * MINUTE, end) for note in notes]
    idle, acted = (lost(note, before, minutes) for note, before in zip(notes, healthy, strict=True))
    removed = 1 - acted / idle
    both = [f"{1e3 * before:.0f} → {1e3 * after:.0f}" for before, after in zip(healthy, slow, strict=True)]
    moves = "; ".join(f"{shares} in {pause:.0f} ms" for _, shares, pause in notes[1]["moves"])
    cells: list[object] = [f"{minutes} min = {minutes * MINUTE:g} s", *both, f"{idle:.1f}", f"{acted:.1f}"]
    return [*cells, f"{removed:.2f}", "pass" if removed >= BAR else "missed", moves]


def main() -> None:
    """Train, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, nargs="*", default=list(MINUTES), help="lengths of the slow-downs")
    asked = parser.parse_args()
    begin = time.perf_counter()
    found = [
        row(minutes, [run(minutes, balance) for balance in ({"mode": "off"}, BALANCE)]) for minutes in asked.minutes
    ]
    head = ["slow-down", "nothing done: step ms", "balance: step ms", "nothing done: lost s", "balance: lost s"]
    head += ["removed", f"bar {BAR}", "moves"]
    text = (
        f"Measured on: {machine()}. Two ranks with a core each; {NEIGHBORS} busy processes on the core of rank 1. "
        f"{time.perf_counter() - begin:.0f} s.\n\n{table(head, found)}"
    )
    print(text)


if __name__ == "__main__":
    main()
