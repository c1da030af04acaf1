"""Judgement of the lines that the scripts of a job wrote: no step may be skipped or repeated, and every sum must be
right.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, count, groupby
from typing import Any

Row = dict[str, Any]
Losses = dict[int, float]
Samples = dict[int, list[int]]

BATCH, FACTOR, MODULUS = 12, 7919, 1_000_003
"""As in `tests/elastic/summing.py`: sample i has the value FACTOR * i % MODULUS, and each step has BATCH samples."""


def sums_of_samples() -> Iterator[int]:
    """Yield the sum over all samples up to and including each step, from step 1 on."""
    return accumulate(sum(FACTOR * i % MODULUS for i in range(BATCH * step, BATCH * (step + 1))) for step in count())


def mistakes(
    rows: Iterable[Row], right: Callable[[], Iterator[int]] | None = sums_of_samples, event: str = "step"
) -> list[str]:
    """Return everything that is wrong with the steps that the scripts wrote, as text; [] if all is well.

    Within a generation, the steps of a process are consecutive. All members begin a generation with the same step,
    right after the end of the previous one. One step may be made again if only members that died had made it. All
    members that made a step agree on the sum after it, if they wrote one. If they wrote their samples (`parts`, as
    `tests/elastic/training.py` does), all steps have equally many, and no sample is repeated before all others were
    used. Such a job may go back to a checkpoint, and what was made after it does not count.

    right: function that yields the expected sum of each step; None to check only that members agree.
    event: the name of a step's lines, for scripts with several engines.
    """
    steps = [row for row in rows if row["event"] == event]
    found = [*_gaps(steps), *_disagreements(steps), *_samples(steps)]
    if right is not None and steps:
        last = max(row["step"] for row in steps)
        truth = dict(zip(range(1, last + 1), right(), strict=False))
        wrong = {(row["step"], row["sum"]) for row in steps if row["sum"] != truth[row["step"]]}
        found += [f"the sum after step {step} is {truth[step]}, and not {said}" for step, said in sorted(wrong)]
    made = {row["step"] for row in steps}
    found += [f"nobody made step {step}" for step in range(1, max(made, default=0)) if step not in made]
    return found


def history(rows: list[dict[str, Any]]) -> tuple[Losses, Samples]:
    """Return two maps from the number of a step: its mean loss over all samples, and its samples.

    If a step was made again in a later generation, the later one counts.
    """
    last: dict[int, int] = {}
    for row in rows:
        last[row["step"]] = max(row["generation"], last.get(row["step"], 0))
    rows = [row for row in rows if row["generation"] == last[row["step"]]]
    losses: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    samples: defaultdict[int, list[int]] = defaultdict(list)
    for row in rows:
        for loss, numbers in row["parts"]:
            losses[row["step"]].append((loss, len(numbers)))
            samples[row["step"]] += numbers
    means = {
        step: math.fsum(loss * count for loss, count in parts) / sum(count for _, count in parts)
        for step, parts in losses.items()
    }
    return means, {step: sorted(numbers) for step, numbers in samples.items()}


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
    done, rewinds = 0, any("parts" in row for row in steps)
    for generation in sorted(first):
        if len(first[generation]) > 1 or not (0 if rewinds else done) <= min(first[generation]) <= done + 1:
            yield f"generation {generation} began with steps {sorted(first[generation])}, after step {done}"
        done = max(done, *(row["step"] for row in steps if row["generation"] == generation))


def _disagreements(steps: list[Row]) -> Iterator[str]:
    sums: defaultdict[int, set[Any]] = defaultdict(set)
    for row in steps:
        if "sum" in row:
            sums[row["step"]].add(row["sum"])
    yield from (f"step {step} has the sums {sorted(each)}" for step, each in sums.items() if len(each) > 1)


def _samples(steps: list[Row]) -> Iterator[str]:
    newest: defaultdict[int, int] = defaultdict(int)  # a step that only dead members have made does not count
    for row in steps:
        newest[row["step"]] = max(newest[row["step"]], row["generation"])
    samples: defaultdict[int, list[int]] = defaultdict(list)
    for row in steps:
        if row["generation"] == newest[row["step"]]:
            samples[row["step"]] += [number for _, numbers in row.get("parts", ()) for number in numbers]
    sizes = {len(each) for each in samples.values()}
    if len(sizes) > 1:
        yield f"steps have {sorted(sizes)} samples"
    times = Counter(number for each in samples.values() for number in each)
    if times and max(times.values()) > min(times.values()) + 1:
        yield f"samples came between {min(times.values())} and {max(times.values())} times"
