"""Histories of jobs on a virtual network: the decisions are the product's, on both sides.

python tools/simulate.py                      # 20,000 of them
python tools/simulate.py --histories 100000 --write docs/figures
python tools/simulate.py --first 4711 --histories 1   # one again: a seed is one history

Nodes come, leave, die, hang and freeze; connections are cut; the coordinator dies, pauses and is started again;
collectives and attempts fail; in every second history hosts lose each other, too; in every third the script asks for
switches. Afterwards all that live have to train within a minute of virtual time; no world is entered in two ways, and
nobody turned away with the only state. The exit status is 1 if it is not so.

With as many histories of a launch of fixed size: its script asks for switches, some of which are late or rolled back,
members work and idle. All scripts have to come to their ends, and all that switch to stand at one step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import keep, machine

PART = 250


def faults(seeds: range) -> list[tuple[int, str]]:
    """(seed, what went wrong) of those that did."""
    from tests.sim.fixed import launch
    from tests.sim.history import history

    found = []
    for seed in seeds:
        try:
            history(seed, parts=bool(seed % 2), asks=seed % 3 == 0)
            launch(seed)
        except Exception as error:
            found.append((seed, f"{type(error).__name__}: {error}"))
    return found


def parts(first: int, histories: int) -> Iterator[range]:
    for begin in range(first, first + histories, PART):
        yield range(begin, min(begin + PART, first + histories))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", type=Path, help="keep the figures in this page")
    given = parser.parse_args()
    begin = time.monotonic()
    with ProcessPoolExecutor(given.processes) as workers:
        found = [one for some in workers.map(faults, parts(given.first, given.histories)) for one in some]
    seconds = time.monotonic() - begin
    for seed, what in found:
        print(f"seed {seed}: {what}")
    text = (
        f"{given.histories:,} histories, from seed {given.first}: {len(found)} went wrong. {seconds:.0f} s with "
        f"{given.processes} processes, {1e3 * seconds * given.processes / given.histories:.1f} ms of processor time "
        "each at most."
    )
    print(text)
    if given.write:
        keep(given.write, "simulate", f"Measured on: {machine()}. {text}")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
