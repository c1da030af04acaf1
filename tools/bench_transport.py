"""Measure transports between members of one machine against a plain copy of the same bytes in one process.

python tools/bench_transport.py                          # seconds
python tools/bench_transport.py --write docs/figures

First one pair of processes is measured, then two pairs at once, which share the cores of a small machine. The time of a
message is that of its receiver, from a barrier to the last byte. Both buffers have been used before. The copies of two
pairs also run at the same time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from figures import keep, machine
from launch import launch

LIMIT_SECONDS = 300
WAYS = ("auto", "gloo")
"""The values of `transport` that are compared with a plain copy; "auto" reads memory."""


def speeds(pairs: int, args: argparse.Namespace) -> dict[tuple[str, int], float]:
    """Return the GB/s over all pairs, keyed by (way, megabytes). Each pair's speed is the median over all launches."""
    seconds: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(args.launches):
        notes = launch("transport_ranks.py", 2 * pairs, LIMIT_SECONDS, megabytes=args.megabytes, repeats=args.repeats)
        for member in notes:
            for line in notes[member] if member % 2 else ():
                seconds.setdefault((line["way"], line["megabytes"], member), []).extend(line["seconds"])
    found: dict[tuple[str, int], float] = {}
    for (way, megabytes, _), times in seconds.items():
        found[way, megabytes] = found.get((way, megabytes), 0.0) + (megabytes << 20) / 1e9 / median(times)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", nargs="+", type=int, default=[16, 256], help="sizes of a message")
    parser.add_argument("--repeats", type=int, default=7, help="messages of a size and launch (default 7)")
    parser.add_argument("--launches", type=int, default=3, help="launches of each number of pairs (default 3)")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    cases = []
    for pairs in (1, 2):
        found = speeds(pairs, args)
        for megabytes in args.megabytes:
            plain = found["copy", megabytes]
            shares = ", ".join(f"{found[way, megabytes] / plain:.2f}" for way in WAYS)
            cases.append(f"{pairs} pair{'s' * (pairs > 1)}, {megabytes} MB {plain:.1f}, {shares}")
    text = f"Measured on: {machine()}. Medians of {args.repeats} messages in each of {args.launches} launches. GB/s of "
    text += f"a plain copy, and ÷ it by reading memory and by gloo: {'; '.join(cases)}."
    print(text)
    if args.write is not None:
        keep(args.write, "bench_transport", text)


if __name__ == "__main__":
    main()
