"""Measure how much shorter late switches make the pause: the same changes with and without `late`, in one launch.

python tools/bench_late.py                                              # all: 12 launches of one to four minutes
python tools/bench_late.py --sizes 30M --dtypes bf16 --stages 1 --laps 1  # a quick look
python tools/bench_late.py --sizes 125M --dtypes fp32 --stages 3 --write docs/figures  # a piece of the table

Each launch of four ranks makes six changes of the number of ranks in a ring, in alternating laps without and with
`late`. Figures are medians over laps. The pause of a switch is the longest one of any member that trains afterwards.
Results are collected in `--out`, and the whole table is written each time.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from figures import keep, machine, table
from launch import launch

PROCESSES, LIMIT_SECONDS = 4, 900
RING = (("2→4", 4), ("4→3", 3), ("3→4", 4), ("4→2", 2), ("2→3", 3), ("3→2", 2))
"""The changes of one lap, from two ranks back to two."""
BARS = {1: 0.35, 2: 0.35, 3: 0.6}
"""For each stage, the largest ratio of the pause to the pause without `late`."""
HEAD = (
    *("size", "dtype", "stage", "pause ms", "late pause ms", "÷", "best, worst", "bar", "met"),
    *("late MB", "late ms", "step waited ms"),
)
Row = dict[str, Any]


def measure(size: str, dtype: str, stage: int, laps: int, length: int) -> list[Row]:
    """Run one launch, and return a row for each change."""
    walk = [
        {"name": name, "late": late, "target": {"data": data}}
        for _ in range(laps)
        for late in (False, True)
        for name, data in RING
    ]
    start = {"data": 2, "zero_stage": stage}
    wanted: dict[str, Any] = {"size": size, "dtype": dtype, "start": start, "walk": walk, "length": length}
    notes = launch("late_ranks.py", PROCESSES, LIMIT_SECONDS, **wanted)
    switches: defaultdict[int, dict[int, Row]] = defaultdict(dict)
    for member, lines in notes.items():
        for line in lines:
            switches[line["event"]["generation"]][member] = line
    if len(switches) != len(walk):
        raise SystemExit(f"{size} {dtype} stage {stage}: {len(switches)} of {len(walk)} switches took place")
    found = [_of(switches[generation]) for generation in sorted(switches)]
    rows = []
    for name, _ in RING:
        plain, late = ([each for each in found if (each["name"], each["late"]) == (name, way)] for way in (False, True))
        row: Row = {"size": size, "dtype": dtype, "stage": stage, "change": name}
        row |= {"pause_ms": _median(plain, "pause_ms"), "late_pause_ms": _median(late, "pause_ms")}
        row |= {"step_ms": _median(plain, "step_ms"), "late_step_ms": _median(late, "step_ms")}
        row |= {key: _median(late, key) for key in ("late_bytes", "late_ms", "late_wait_ms")}
        rows.append({**row, "ratio": row["late_pause_ms"] / row["pause_ms"]})
    return rows


def _of(records: dict[int, Row]) -> Row:
    """Return the figures of one switch, over the members that train afterwards."""
    one = next(iter(records.values()))
    working = [record for member, record in records.items() if member in one["event"]["target"]["members"]]
    trained = [record for member, record in records.items() if member in one["event"]["source"]["members"]]
    both = [record for record in trained if record in working]  # members that were idle have waited longer
    row = {"name": one["name"], "late": one["late"], "step_ms": max(record["step_ms"] for record in both)}
    keys = ("pause_ms", "late_bytes", "late_ms", "late_wait_ms")
    return row | {key: max(record["event"][key] for record in working) for key in keys}


def _median(rows: list[Row], key: str) -> float:
    return float(median(row[key] for row in rows))


def line(rows: list[Row]) -> list[object]:
    """Return a row of the table: medians over the changes of one size, type and stage."""
    bar, ratios = BARS[rows[0]["stage"]], sorted(row["ratio"] for row in rows)
    return [
        *(rows[0][key] for key in ("size", "dtype", "stage")),
        *(f"{_median(rows, key):.0f}" for key in ("pause_ms", "late_pause_ms")),
        f"{median(ratios):.2f}",
        f"{ratios[0]:.2f}, {ratios[-1]:.2f}",
        f"{bar:.2f}",
        f"{sum(ratio <= bar for ratio in ratios)} of {len(ratios)}",
        f"{_median(rows, 'late_bytes') / 1e6:.0f}",
        *(f"{_median(rows, key):.0f}" for key in ("late_ms", "late_wait_ms")),
    ]


def document(pieces: dict[str, Row], laps: int) -> str:
    """Return the table of all pieces measured so far, with the machines and their loads at that time."""
    found = [piece["machine"].partition(", load ") for piece in pieces.values()]
    places, loads = dict.fromkeys(place for place, _, _ in found), sorted({load for _, _, load in found}, key=float)
    lines = table(HEAD, (line(pieces[name]["rows"]) for name in sorted(pieces)))
    return (
        f"Measured on: {'; '.join(places)}, load {' to '.join(dict.fromkeys((loads[0], loads[-1])))}. Four ranks; "
        f"medians over six changes, {laps} laps without `late` and as many with.\n\n{lines}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["30M", "125M"], help="30M, 125M, tiny")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=["bf16", "fp32"])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3], choices=list(BARS))
    parser.add_argument("--laps", type=int, default=3, help="laps of each way (default 3)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample (default 32), 12 samples a step")
    parser.add_argument("--out", type=Path, default=Path("build/bench_late.json"), help="the figures as JSON")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pieces = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    for size in args.sizes:
        for dtype in args.dtypes:
            for stage in args.stages:
                rows = measure(size, dtype, stage, args.laps, args.length)
                pieces[f"{len(size)} {size} {dtype} {stage}"] = {"rows": rows, "machine": machine()}
                args.out.write_text(json.dumps(pieces, indent=1), encoding="utf-8")
                if args.write is not None:
                    keep(args.write, "bench_late", document(pieces, args.laps))
    print(document(pieces, args.laps))


if __name__ == "__main__":
    main()
