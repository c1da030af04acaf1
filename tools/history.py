"""What the scripts of a job wrote, judged: nobody skips or repeats a step, and every sum is the right one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, count, groupby
from typing import Any

Row = dict[str, Any]

BATCH, FACTOR, MODULUS = 12, 7919, 1_000_003
"""Of `tests/elastic/summing.py`: sample i is worth FACTOR * i % MODULUS, and each step has BATCH of them."""


def sums_of_samples() -> Iterator[int]:
    """The sum over all samples up to and with each step, from step 1 on."""
    return accumulate(sum(FACTOR * i % MODULUS for i in range(BATCH * step, BATCH * (step + 1))) for step in count())


def mistakes(rows: Iterable[Row], right: Callable[[], Iterator[int]] | None = sums_of_samples) -> list[str]:
    """Everything that is wrong with the steps that the scripts wrote, in words; none if all is well.

    Of one process the steps of a generation follow one on another. Between two generations they go on, unless the
    process was behind the others, or was ahead of all who are still there: then the world's first step is the same for
    all, and the state that it starts from is a right one. All who made a step agree on the sum after it.

    right: the sums that there have to be, step by step; None: it only matters that all agree.
    """
    steps = [row for row in rows if row["event"] == "step"]
    found = [*_gaps(steps), *_disagreements(steps)]
    if right is not None and steps:
        last = max(row["step"] for row in steps)
        truth = dict(zip(range(1, last + 1), right(), strict=False))
        wrong = [row for row in steps if row["sum"] != truth[row["step"]]]
        found += [
            f"step {row['step']} of process {row['pid']} is {row['sum']}, not {truth[row['step']]}" for row in wrong
        ]
    made = {row["step"] for row in steps}
    found += [f"nobody made step {step}" for step in range(1, max(made, default=0)) if step not in made]
    return found


def _gaps(steps: list[Row]) -> Iterator[str]:
    by_process: defaultdict[int, list[Row]] = defaultdict(list)
    for row in steps:
        by_process[row["pid"]].append(row)
    first: defaultdict[int, set[int]] = defaultdict(set)
    for pid, mine in by_process.items():
        for generation, part in groupby(mine, lambda row: int(row["generation"])):
            numbers = [row["step"] for row in part]
            first[generation].add(numbers[0])
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                yield f"process {pid} skipped or repeated a step in generation {generation}: {numbers[:50]}"
    yield from (f"generation {one} began with steps {sorted(each)}" for one, each in first.items() if len(each) > 1)


def _disagreements(steps: list[Row]) -> Iterator[str]:
    sums: defaultdict[int, set[Any]] = defaultdict(set)
    for row in steps:
        sums[row["step"]].add(row["sum"])
    yield from (f"step {step} has the sums {sorted(each)}" for step, each in sums.items() if len(each) > 1)
