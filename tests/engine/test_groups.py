"""Groups of the user's own in a job of fixed size: they follow every switch."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as td

import ds_dynatrain
from ds_dynatrain.errors import ConfigError
from tests.engine import faults, jobs
from tests.engine.pool import RankPool

SCHEDULE = {2: (4, 3), 4: (3, 1)}
STEPS = 6


def first_line_case() -> bool:
    return bool(ds_dynatrain.init_distributed())


def test_without_an_elastic_launch_the_first_line_is_deepspeeds(pool: RankPool) -> None:
    assert pool.run(first_line_case) == [False] * 4


def groups_case() -> list[tuple[int, int, float, float, tuple[int, ...]]]:
    """(size of the world, rank, sum over all, sum over the group, the group's ranks) after every step."""
    seen: list[tuple[int, int, float, float, tuple[int, ...]]] = []
    with jobs.job(jobs.config(start=(2, 1))) as made:
        everybody = made.engine.new_group()
        turns = made.engine.new_group(lambda layout, nodes: [range(turn, layout.world_size, 2) for turn in range(2)])
        rest = made.engine.new_group(lambda layout, nodes: [range(1, layout.world_size)])

        def each(job: Any) -> None:
            engine, sums = job.engine, torch.ones(3)
            for number, group in enumerate((everybody.group, turns.group, rest.group)):
                td.all_reduce(sums[number : number + 1], group=group)
            assert (engine.rank == 0) == (rest.group is td.GroupMember.NON_GROUP_MEMBER) == (rest.ranks == ())
            assert sums[2].item() == (1 if engine.rank == 0 else engine.data - 1)
            seen.append((engine.data, engine.rank, sums[0].item(), sums[1].item(), turns.ranks))

        jobs.train(made, STEPS, SCHEDULE, each=each)
        with pytest.raises(ConfigError, match="before"):
            made.engine.new_group()
    return seen


def test_groups_follow_the_world(pool: RankPool) -> None:
    rows = [row for rows in pool.run(groups_case) for row in rows]
    assert {size for size, *_ in rows} == {2, 3, 4}
    for size, rank, everybody, turn, ranks in rows:
        assert everybody == size
        assert ranks == tuple(range(rank % 2, size, 2)) and turn == len(ranks)


def refused_case() -> str:
    """What becomes of a switch to a layout for which there are no groups."""
    with jobs.job(jobs.config(start=(2, 1))) as made:
        made.engine.new_group(lambda layout, nodes: [[0, 1], range(1, layout.world_size)][: layout.data - 1])
        faults.train(made, 5, {2: (3, 1)}, jobs.Record())
        return "" if made.engine.last_switch is None else made.engine.last_switch.reason
    return ""


def test_a_layout_without_such_groups_comes_to_nothing(pool: RankPool) -> None:
    found = pool.run(refused_case)
    assert all("new_group 0" in reason and "stands in two groups" in reason for reason in found[:2]), found


def gloo_threads() -> int:
    """Threads of this process that belong to groups of gloo, whoever holds them."""
    names = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name for name in names)


def threads_case() -> tuple[int, int]:
    """Threads in one layout before and after switches from and to stage 3, while nobody collects garbage."""
    with jobs.job(jobs.config(start=(4, 3))) as made:
        gc.collect()
        gc.disable()
        try:
            jobs.train(made, 3)
            before = gloo_threads()
            jobs.train(made, 9, {4: (4, 1), 6: (4, 3)})
            end = time.monotonic() + 10
            while gloo_threads() > before and time.monotonic() < end:
                time.sleep(0.1)  # taking a group down takes a moment
        finally:
            gc.enable()
        return before, gloo_threads()


def test_groups_of_a_world_go_with_it(pool: RankPool) -> None:
    """Each has threads and descriptors; Python's collector may take hundreds of switches to come to them."""
    for before, after in pool.run(threads_case):
        assert 0 < after <= before
