"""How good the clocks are that a job finds for members that wait, and how much less they wait.

python tools/bench_clocks.py           # print the table
python tools/bench_clocks.py --write   # and put it into docs/figures

Layers burn processor time: four fifths of it grow as the rank's clock falls (`throttle.py`), in place of cards. Each
case is run twice. One run searches; the other one tries all clocks. The best clock by trial is the lowest at which a
rank computes no longer than the slowest one. Energy is not measured. About two minutes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from figures import keep, machine, table
from launch import launch
from throttle import Throttle

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
BAR = 0.8
"""Of the waiting, at least so much is gone."""
STEPS, LAST = 40, 8
CASES: dict[str, dict[str, Any]] = {
    "2 stages, 2 : 1": {"forward": [0.004] * 3, "layout": {"pipe": 2, "data": 1, "boundaries": [0, 2, 3]}},
    "2 stages, 4 : 3": {"forward": [0.002] * 7, "layout": {"pipe": 2, "data": 1, "boundaries": [0, 4, 7]}},
    "3 stages, 1 : 4 : 2": {"forward": [0.002] * 7, "layout": {"pipe": 3, "data": 1, "boundaries": [0, 1, 5, 7]}},
    "2 data ranks, the last 2 × as slow": {"forward": [0.004], "layout": {"data": 2}, "slow": 2.0},
}
"""By what they are: the work of each stage, and the ranks."""


def windows(notes: dict[int, list[dict[str, Any]]]) -> list[tuple[list[float], list[float]]]:
    """The clocks of all ranks in each window, as shares of the highest, and the seconds for which they computed."""
    steps = zip(*(notes[rank] for rank in sorted(notes)), strict=True)
    return [([each["share"] for each in step], step[0]["busy"]) for step in steps if step[0]["busy"]]


def waiting(busy: list[float]) -> float:
    """Of all ranks but the slowest, as a share of its seconds."""
    return (len(busy) * max(busy) - sum(busy)) / max(busy) / (len(busy) - 1)


def row(name: str, case: dict[str, Any]) -> tuple[list[object], bool]:
    """One line of the table, and whether all bars are met."""
    given = {"slow": 1.0, "keep": [], **case}
    ranks = given["layout"].get("pipe", 1) * given["layout"]["data"]
    searched = launch("clock_ranks.py", ranks, 300, trial=False, steps=STEPS, **given)
    found = windows(searched)
    before, (shares, after) = found[0][1], found[-1]
    slowest = [rank for rank in range(ranks) if shares[rank] == 1.0]
    trials = windows(launch("clock_ranks.py", ranks, 300, trial=True, steps=10**6, **{**given, "keep": slowest}))
    clocks = list(Throttle.clocks)
    chosen, best = [round(share * clocks[-1]) for share in shares], []
    for rank in range(ranks):
        enough = [each[rank] for each, busy in trials if busy[rank] <= max(busy[other] for other in slowest)]
        best.append(clocks[-1] if rank in slowest else round(min(enough) * clocks[-1]))
    off = max(abs(clocks.index(one) - clocks.index(other)) for one, other in zip(chosen, best, strict=True))
    gone = 1 - waiting(after) / waiting(before)
    steps = [median(each["seconds"] for each in searched[0][place]) for place in (slice(1, 3), slice(-LAST, None))]
    cells: list[object] = [name, f"{chosen}".strip("[]"), f"{best}".strip("[]"), off]
    cells += [
        f"{waiting(before):.2f}",
        f"{waiting(after):.2f}",
        f"{gone:.2f}",
        " → ".join(f"{1e3 * each:.0f}" for each in steps),
    ]
    return cells, off <= 1 and gone >= BAR


def main() -> None:
    """Search, try, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/figures")
    asked, begin = parser.parse_args(), time.perf_counter()
    rows, met = zip(*(row(name, case) for name, case in CASES.items()), strict=True)
    head = ["case", "clocks found, of 2000", "best by trial", "notches off", "the others wait", "with clocks"]
    head += ["gone", "step ms"]
    text = (
        f"Measured on: {machine()}. {time.perf_counter() - begin:.0f} s. {sum(met)} of {len(met)} cases are within one "
        f"notch of the best clocks, and at least {BAR} of their waiting is gone.\n\n{table(head, rows)}"
    )
    print(text)
    if asked.write:
        keep(FIGURES, "bench_clocks", text)


if __name__ == "__main__":
    main()
