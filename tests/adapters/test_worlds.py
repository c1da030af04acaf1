"""Worlds on real ranks: DeepSpeed's own getters answer for the layout, and nothing is left of a world that is gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from operator import gt
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed as td
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups

from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus
from ds_dynatrain.adapters.groups.process_groups import make_fake_group, register, unregister
from ds_dynatrain.adapters.groups.world import KINDS, World
from ds_dynatrain.adapters.groups.worlds import (
    LaunchWorld,
    WorldSpec,
    build_world,
    drop,
    install,
    launch_store,
    stand_in_world,
)
from ds_dynatrain.space import Layout
from tests.engine.pool import RankPool

SECONDS = 20.0

LINE, PAIRS, STRIDED = [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]
ALONE = [[0], [1], [2], [3]]

Table = dict[str, list[list[int]]]

LAYOUTS: list[tuple[dict[str, int], Table]] = [
    ({"data": 4}, {"zero": LINE, "expert": ALONE, "expert_data": LINE}),
    ({"data": 4, "expert": 2}, {"zero": LINE, "expert": PAIRS, "expert_data": STRIDED}),
    ({"data": 4, "expert": 4}, {"zero": LINE, "expert": LINE, "expert_data": ALONE}),
    (
        {"tensor": 2, "data": 2},
        {"zero": STRIDED, "data": STRIDED, "tensor": PAIRS, "model": PAIRS, "expert": ALONE, "expert_data": STRIDED},
    ),
    (
        {"tensor": 2, "data": 2, "expert": 2},
        {"zero": STRIDED, "data": STRIDED, "tensor": PAIRS, "expert": PAIRS, "expert_data": STRIDED},
    ),
    ({"tensor": 4}, {"zero": ALONE, "data": ALONE, "tensor": LINE, "model": LINE}),
    (
        {"sequence": 2, "data": 2},
        {"zero": LINE, "sequence": PAIRS, "model": ALONE, "expert": ALONE, "expert_data": LINE},
    ),
    ({"sequence": 4}, {"zero": LINE, "sequence": LINE, "model": ALONE}),
    (
        {"pipe": 2, "data": 2},
        {"zero": PAIRS, "data": PAIRS, "pipe": STRIDED, "model": STRIDED, "tensor": ALONE, "sequence": ALONE},
    ),
    (
        {"pipe": 2, "data": 2, "expert": 2},
        {"zero": PAIRS, "pipe": STRIDED, "expert": PAIRS, "expert_data": ALONE},
    ),
    ({"pipe": 4}, {"zero": ALONE, "pipe": LINE, "model": LINE}),
]
"""Sizes, and the groups that DeepSpeed has for them, written down by hand."""


def getters(layout: Layout) -> dict[str, tuple[Callable[[], Any], Callable[[], int], Callable[[], int]]]:
    """(group, rank in it, size of it) as DeepSpeed asks for them, by kind, as far as it can be asked in the layout."""
    name = f"ep_size_{layout.expert}"
    found: dict[str, tuple[Any, Any, Any]] = {
        "zero": (
            groups._get_sequence_data_parallel_group,
            groups._get_sequence_data_parallel_rank,
            groups._get_sequence_data_parallel_world_size,
        ),
        "data": (
            groups._get_data_parallel_group,
            groups._get_data_parallel_rank,
            groups._get_data_parallel_world_size,
        ),
        "expert": (
            lambda: groups._get_expert_parallel_group(name),
            lambda: groups._get_expert_parallel_rank(name),
            lambda: groups._get_expert_parallel_world_size(name),
        ),
        "expert_data": (
            lambda: groups._get_expert_data_parallel_group(name),
            lambda: groups._get_expert_data_parallel_rank(name),
            lambda: groups._get_expert_data_parallel_world_size(name),
        ),
    }
    if layout.pipe * layout.sequence * layout.tensor > 1:
        found |= {
            "tensor": (
                groups.get_tensor_model_parallel_group,
                groups.get_tensor_model_parallel_rank,
                groups.get_tensor_model_parallel_world_size,
            ),
            "sequence": (
                groups._get_sequence_parallel_group,
                groups._get_sequence_parallel_rank,
                groups._get_sequence_parallel_world_size,
            ),
            "model": (
                groups.mpu.get_model_parallel_group,
                groups.mpu.get_model_parallel_rank,
                groups.mpu.get_model_parallel_world_size,
            ),
            "pipe": (
                groups.mpu.get_pipe_parallel_group,
                groups.mpu.get_pipe_parallel_rank,
                groups.mpu.get_pipeline_model_parallel_world_size,
            ),
        }
    return found


def check_getters(layout: Layout, table: Table) -> None:
    rank = td.get_rank()
    assert (rank, td.get_world_size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    found = getters(layout)
    for kind, lists in table.items():
        wanted = next(ranks for ranks in lists if rank in ranks)
        group, place, size = (ask() for ask in found[kind])
        assert (place, size) == (wanted.index(rank), len(wanted)), kind
        assert td.get_process_group_ranks(group) == dist.get_all_ranks_from_group(group) == wanted, kind
        assert [dist.get_global_rank(group, at) for at in range(size)] == wanted, kind
        total = torch.tensor([10**rank])
        dist.all_reduce(total, group=group)
        assert int(total) == sum(10**other for other in wanted), kind
        said = [f"from {rank}"]
        dist.broadcast_object_list(said, src=wanted[-1], group=group)
        assert said == [f"from {wanted[-1]}"], kind
    assert groups._get_model_parallel_world_size() == layout.pipe * layout.tensor
    assert groups._get_data_parallel_world_size() == layout.data
    assert groups._get_data_parallel_group() is groups._get_sequence_data_parallel_group()
    assert groups._get_sequence_parallel_world_size() == layout.sequence
    assert groups._get_sequence_parallel_rank() == layout.coordinate(rank)["sequence"]
    assert groups._get_broadcast_src_rank() == min(next(ranks for ranks in table["zero"] if rank in ranks))
    assert groups._get_max_expert_size() == layout.expert
    assert groups._get_expert_model_parallel_world_size() == 1
    assert parallel_state_sp.get_sequence_parallel_world_size() == layout.sequence
    assert parallel_state_sp.get_sequence_data_parallel_world_size() == layout.sequence * layout.data


def used() -> tuple[int, int, int]:
    """Threads and descriptors of this process, and the groups that torch knows; at a place where all ranks are.

    The launcher's store lives in rank 0, which has a descriptor for each of its clients.
    """
    td.barrier()
    return _used()


def _used() -> tuple[int, int, int]:
    threads = [name for name in _thread_names() if not name.startswith("iou-")]  # the kernel's workers for io_uring
    return len(threads), len(os.listdir("/proc/self/fd")), len(td.distributed_c10d._world.pg_map)


def _thread_names() -> list[str]:
    """Return the names of this process's threads; a thread may end between the listing and the read."""
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            names.append((thread / "comm").read_text().strip())
    return names


def check_gone(threads: list[threading.Thread], before: tuple[int, int, int]) -> None:
    """Nothing more is used than `before`; the system takes a moment to end a thread that Python has joined."""
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + SECONDS
    while any(map(gt, _used(), before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(gt, _used(), before)), (_used(), before, _thread_names())


def visit(path: list[tuple[dict[str, int], Table]], generation: int) -> None:
    """One world after the other, each in place of the one before; then the launch group again, with nothing left."""
    launch, store = LaunchWorld.current(), launch_store()
    everyone = range(launch.size)
    before, world, buried = used(), None, []
    for number, (sizes, table) in enumerate(path):
        layout = Layout(zero_stage=1, **sizes)
        spec = WorldSpec(generation + number, launch.member, everyone, everyone, layout, has_sequence=True)
        following = build_world(store, spec, SECONDS)
        install(following)
        check_getters(layout, table)
        if world is not None:
            buried.append(drop(world))
        check_getters(layout, table)
        world = following
    assert world is not None
    launch.install()
    buried.append(drop(world))
    check_gone(buried, before)
    assert (
        groups._WORLD_GROUP is groups.mpu is groups._TENSOR_MODEL_PARALLEL_GROUP is groups._DATA_PARALLEL_GROUP is None
    )
    assert not groups._EXPERT_PARALLEL_GROUP and not groups._EXPERT_DATA_PARALLEL_GROUP_RANKS
    assert parallel_state_sp._SEQUENCE_PARALLEL_GROUP is parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP is None
    assert (td.get_rank(), td.get_world_size()) == (launch.member, launch.size)


def test_getters_answer_for_each_layout_and_nothing_is_left(pool: RankPool) -> None:
    pool.run(visit, path=LAYOUTS, generation=100)


def go_back(generation: int) -> None:
    """A world that is given up after it was installed: the one before it is spoken of again."""
    launch, store = LaunchWorld.current(), launch_store()
    everyone, before = range(launch.size), used()
    (first, table), (second, _) = LAYOUTS[3], LAYOUTS[6]
    layouts = [Layout(zero_stage=1, **first), Layout(zero_stage=1, **second)]
    old, new = (
        build_world(store, WorldSpec(number, launch.member, everyone, everyone, layout, has_sequence=True), SECONDS)
        for number, layout in enumerate(layouts, generation)
    )
    install(old)
    install(new)
    install(old)
    thread = drop(new)
    check_getters(layouts[0], table)
    launch.install()
    check_gone([thread, drop(old)], before)


def test_a_world_that_was_installed_before_is_there_again(pool: RankPool) -> None:
    pool.run(go_back, generation=200)


def join(generation: int) -> tuple[int | None, list[str]]:
    """Members 0 and 3 become members 3, 1 and 2 on the tensor axis; member 0 has the group for the moves alone."""
    launch, store = LaunchWorld.current(), launch_store()
    spec = WorldSpec(generation, launch.member, (3, 1, 2), (0, 3), Layout(zero_stage=1, tensor=3))
    world = build_world(store, spec, SECONDS)
    assert world.transfer is not None and world.transfer.size() == 4 and world.transfer_members == (0, 1, 2, 3)
    kinds = world.kinds
    if world.rank is not None:
        install(world)
        assert groups.get_tensor_model_parallel_rank() == world.rank
        world.retire_transfer().join()
        launch.install()
    else:
        with pytest.raises(RuntimeError, match="holds no rank"):
            install(world)
        with pytest.raises(RuntimeError, match="no tensor group on this member"):
            print(world.group("tensor"))
    drop(world).join()
    return world.rank, kinds


def test_members_come_and_go(pool: RankPool) -> None:
    found = pool.run(join, generation=300)
    assert [rank for rank, _ in found] == [None, 1, 2, 0]
    assert found[0][1] == ["transfer"]
    assert set(found[1][1]) == {"default", "transfer", *KINDS}


def stand_in() -> None:
    """Under a layout of 24 ranks without any peer."""
    launch, before = LaunchWorld.current(), used()
    layout = Layout(zero_stage=1, pipe=2, data=3, sequence=2, tensor=2, expert=3)
    world: World = stand_in_world(17, layout)
    install(world)
    assert (td.get_rank(), td.get_world_size()) == (17, 24)
    assert world.ranks("data") == (13, 15, 17, 19, 21, 23) and world.ranks("tensor") == (16, 17)
    assert world.ranks("pipe") == (5, 17) and world.ranks("sequence") == (17, 19)
    assert world.ranks("expert") == (15, 16, 17) and world.ranks("expert_data") == (14, 17, 20, 23)
    assert groups._get_sequence_data_parallel_world_size() == 6 and groups._get_model_parallel_world_size() == 4
    launch.install()
    check_gone([drop(world)], before)


def test_stand_in_has_all_groups_and_no_descriptor(pool: RankPool) -> None:
    pool.run(stand_in)


def alone() -> None:
    """Every collective that DeepSpeed uses, in a group of one rank that costs nothing."""
    before = used()
    group, store = make_fake_group("dynatrain_test_alone", 0, 1)
    register(group, store, [td.get_rank()])
    mine = torch.arange(6.0)
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        value = mine.clone()
        dist.all_reduce(value, op=operation, group=group)
        assert torch.equal(value, mine)
    for call in (
        lambda out, value: dist.all_gather_into_tensor(out, value, group=group),
        lambda out, value: dist.reduce_scatter_tensor(out, value, group=group),
        lambda out, value: dist.all_to_all_single(out, value, group=group),
        lambda out, value: dist.all_to_all_single(
            out, value, output_split_sizes=[6], input_split_sizes=[6], group=group
        ),
        lambda out, value: dist.all_gather([out], value, group=group),
        lambda out, value: dist.reduce_scatter(out, [value], group=group),
        lambda out, value: dist.all_to_all([out], [value], group=group),
        lambda out, value: dist.all_gather_into_tensor(out, value, group=group, async_op=True).wait(),
        lambda out, value: dist.allgather_fn(out, value, group=group),
        lambda out, value: dist.gather(value, [out], dst=td.get_rank(), group=group),
        lambda out, value: dist.scatter(out, [value], src=td.get_rank(), group=group),
    ):
        out = torch.full((6,), -1.0)
        call(out, mine)
        assert torch.equal(out, mine)
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"a": 1}, group=group)
    assert objects == [{"a": 1}]
    dist.broadcast(mine, src=td.get_rank(), group=group)
    dist.reduce(mine, dst=td.get_rank(), group=group)
    dist.barrier(group=group)
    assert torch.equal(mine, torch.arange(6.0))
    unregister(group)
    check_gone([], before)


def test_a_group_of_one_does_what_a_real_one_would(pool: RankPool) -> None:
    pool.run(alone)


def late_message(generation: int, is_watched: bool) -> float:
    """Seconds that rank 1 waits for a message of rank 0's, which comes after the time that connecting was given."""
    launch, store = LaunchWorld.current(), launch_store()
    everyone, layout = range(launch.size), Layout(zero_stage=1, data=launch.size)
    status = GroupStatus() if is_watched else None
    world = build_world(store, WorldSpec(generation, launch.member, everyone, everyone, layout), 2.0, status)
    install(world)
    begin, told = time.monotonic(), torch.zeros(1)
    if launch.member == 0:
        time.sleep(2.5)
        td.send(torch.ones(1), 1)
    elif launch.member == 1:
        td.recv(told, 0)
        assert told.item() == 1
    took = time.monotonic() - begin
    td.barrier()
    launch.install()
    drop(world).join()
    return took


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_message_may_come_late(pool: RankPool, is_watched: bool) -> None:
    assert pool.run(late_message, generation=900 + is_watched, is_watched=is_watched)[1] > 2.2
