"""Switch a hundred times in one set of processes, and check that nothing grows: memory, threads, descriptors, groups.

python tools/soak.py                              # 100 random switches of a small model, about two minutes
python tools/soak.py --switches 40 --seed 7
python tools/soak.py --write docs/figures

After the first ten switches no figure may grow: not the numbers of threads, file descriptors and registered process
groups, and memory by at most the allowance. Otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from figures import keep, machine
from launch import launch

PROCESSES = 4
LIMIT_SECONDS = 900
WINDOW = 10
ALLOWED_BYTES_PER_SWITCH = 16 * 1024
"""Growth of resident memory that counts as noise of the allocator."""
COUNTS = ("threads", "descriptors", "groups")

Line = dict[str, Any]


def windows(notes: dict[int, list[Line]]) -> list[Line]:
    """Return, for each ten switches, the median pause, and the lowest value of each figure on the worst member.

    The lowest value is used, because a working member holds more than an idle one, and a group that is being shut down
    still counts for a moment.
    """
    last = max(line["switch"] for lines in notes.values() for line in lines)
    rows = []
    for begin in range(1, last + 1, WINDOW):
        inside = [[line for line in lines if begin <= line["switch"] < begin + WINDOW] for lines in notes.values()]
        lines = [line for member in inside for line in member]
        row: Line = {"from": begin, "to": min(begin + WINDOW - 1, last)}
        row["pause_ms"] = median(line["pause_ms"] for line in lines)
        for name in (*COUNTS, "resident"):
            row[name] = max(min(line[name] for line in member) for member in inside if member)
        rows.append(row)
    return rows


def growth(rows: list[Line]) -> list[str]:
    """Return text on what grew after the first ten switches: the last third is compared with the first third."""
    rest = rows[1:]
    third = max(len(rest) // 3, 1)
    found = []
    for name in (*COUNTS, "resident"):
        early, late = (sum(row[name] for row in part) / len(part) for part in (rest[:third], rest[-third:]))
        switches = (len(rest) - third) * WINDOW
        allowed = ALLOWED_BYTES_PER_SWITCH * switches if name == "resident" else 0.0
        if late - early > allowed:
            found.append(f"{name}: {early:.0f} -> {late:.0f}, {(late - early) / max(switches, 1):.1f} a switch")
    return found


def main() -> None:
    """Run the switches, and judge the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    notes = launch("soak_ranks.py", PROCESSES, LIMIT_SECONDS, switches=args.switches, seed=args.seed, dtype=args.dtype)
    rows = windows(notes)
    shown = rows[:: len(rows) // 3 or 1]
    found: dict[str, list[object]] = {"Switches": [f"{row['from']}–{row['to']}" for row in shown]}
    found |= {name: [row[name] for row in shown] for name in COUNTS}
    found["resident MB"] = [f"{row['resident'] / 1e6:.1f}" for row in shown]
    found["pause ms"] = [f"{row['pause_ms']:.0f}" for row in shown]
    text = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in found.items())
    grown = growth(rows)
    verdict = "no growth" if not grown else "**growth** of " + "; ".join(grown)
    text = f"Measured on: {machine()}. {args.switches} switches, seed {args.seed}, {args.dtype}: {verdict}. {text}."
    print(text)
    if args.write is not None:
        keep(args.write, "soak", text)
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
