"""Simulate histories of jobs on a virtual network. The decisions on both sides are made by the package's own code.

python tools/simulate.py                      # 20,000 of them
python tools/simulate.py --histories 100000 --write docs/figures
python tools/simulate.py --first 4711 --histories 1   # one again: a seed is one history

Nodes join, leave, die, hang and freeze; connections are cut; the coordinator dies, pauses and is restarted; collectives
and attempts fail. In every second history hosts lose contact to each other, and in every third the script requests
switches. Afterwards all members that live must train within a minute of virtual time, no world may be entered in two
ways, and no member with the only state may be turned away. Otherwise the exit status is 1.

As many histories are of a launch with a fixed size. Its script requests switches, some of which are late or rolled
back, and members are working or idle. All scripts must end, and all members of a switch must be at one step.
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
    """Simulate histories. Return (seed, what went wrong) for those with a fault."""
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
