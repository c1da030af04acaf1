"""Groups whose members stay in their order are the same ones in the next world, on real ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as td
from torch._C._distributed_c10d import Store

from ds_dynatrain.adapters.groups.process_groups import is_known
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import LaunchWorld, WorldSpec, build_world, drop, install, launch_store
from ds_dynatrain.space import Layout
from tests.adapters.test_worlds import (
    ALONE,
    LINE,
    PAIRS,
    SECONDS,
    STRIDED,
    Table,
    check_getters,
    check_gone,
    used,
)
from tests.engine.pool import RankPool

MIXED: Table = {"zero": STRIDED, "data": STRIDED, "tensor": PAIRS, "model": PAIRS, "expert": ALONE}
EVERYONE = (0, 1, 2, 3)
HALVES_CHANGED = (2, 3, 0, 1)
"""The tensor ranks of a model keep their places in it, the models change theirs."""


@dataclass(frozen=True)
class Builder:
    """Of one member, which has one store for all its worlds, as in a job."""

    store: Store
    member: int

    @staticmethod
    def here() -> Builder:
        """While the launch group is installed."""
        return Builder(launch_store(), LaunchWorld.current().member)

    def __call__(
        self, generation: int, layout: Layout, members: tuple[int, ...], present: World | None = None, **more: Any
    ) -> World:
        """A world of all four members. present: the one that hands its groups on."""
        spec = WorldSpec(generation, self.member, members, EVERYONE, layout, has_sequence=True, **more)
        return build_world(self.store, spec, SECONDS, present=present)


def taken(world: World, before: World) -> set[str]:
    """Kinds of which it has the group that the world before has."""
    return {kind for kind in world.kinds if kind in before.kinds and world.group(kind) is before.group(kind)}


def stages(generation: int) -> None:
    """Twenty changes of the stage: one group is built for each, which carries the moves alone."""
    launch, build, before = LaunchWorld.current(), Builder.here(), used()
    own = {"own0": EVERYONE}
    world = build(generation, Layout(zero_stage=1, tensor=2, data=2), EVERYONE, own=own)
    install(world)
    trained = used()
    for number in range(1, 21):
        layout = Layout(zero_stage=number % 4, tensor=2, data=2)
        following = build(generation + number, layout, EVERYONE, world, own=own)
        kinds = {kind for kind in world.kinds if len(world.ranks(kind)) > 1}
        assert {"default", "data", "tensor", "model", "own0"} <= kinds <= taken(following, world)
        assert following.transfer is following.group("transfer"), "training's own groups are no way for the moves"
        check_getters(world.layout, MIXED)
        install(following)
        assert td.group.WORLD is world.default is following.default
        threads = [drop(world), following.retire_transfer()]
        world = following
        check_getters(layout, MIXED)
        check_gone(threads, trained)
    launch.install()
    check_gone([drop(world)], before)


@pytest.mark.full
def test_a_change_of_the_stage_builds_no_group_that_trains(pool: RankPool) -> None:
    pool.run(stages, generation=500)


def other_places(generation: int) -> None:
    """The groups of the tensor axis stay, for other ranks; also when that world is given up."""
    launch, build, before, layout = (
        LaunchWorld.current(),
        Builder.here(),
        used(),
        Layout(zero_stage=1, tensor=2, data=2),
    )
    old = build(generation, layout, EVERYONE)
    install(old)
    trained = used()
    new = build(generation + 1, layout, HALVES_CHANGED, old)
    shared = {kind for kind in taken(new, old) if len(old.ranks(kind)) > 1}
    assert shared == {"tensor", "model"}
    assert new.transfer is new.default, "which was made for this world"
    install(new)
    check_getters(layout, MIXED)
    assert new.ranks("tensor") == tuple(HALVES_CHANGED.index(old.members[rank]) for rank in old.ranks("tensor"))
    install(old)
    check_gone([drop(new)], trained)
    check_getters(layout, MIXED)
    again = build(generation + 2, layout, HALVES_CHANGED, old)
    install(again)
    threads = [drop(old)]
    assert is_known(again.group("tensor")) and is_known(again.default)
    check_getters(layout, MIXED)
    launch.install()
    check_gone([*threads, drop(again)], before)


def test_a_group_stays_for_members_with_other_ranks(pool: RankPool) -> None:
    pool.run(other_places, generation=600)


def other_axes(generation: int) -> None:
    """From tensor to pipe, over the same data groups; then four data ranks, of which none was a group before."""
    launch, build, before = LaunchWorld.current(), Builder.here(), used()
    paths: list[dict[str, int]] = [{"tensor": 2, "data": 2}, {"sequence": 2, "data": 2}, {"data": 4}]
    first, second, third = (Layout(zero_stage=1, **sizes) for sizes in paths)
    old = build(generation, first, EVERYONE)
    install(old)
    new = build(generation + 1, second, EVERYONE, old)
    assert {kind for kind in taken(new, old) if len(old.ranks(kind)) > 1} == {"default", "data_only"}
    install(new)
    buried = [drop(old), new.retire_transfer()]
    check_getters(second, {"zero": LINE, "sequence": PAIRS, "model": ALONE})
    last = build(generation + 2, third, EVERYONE, new)
    assert {"default", "data"} <= taken(last, new)
    install(last)
    buried += [drop(new), last.retire_transfer()]
    check_getters(third, {"zero": LINE})
    launch.install()
    check_gone([*buried, drop(last)], before)


def test_groups_stay_while_other_axes_change(pool: RankPool) -> None:
    pool.run(other_axes, generation=700)


def not_through(generation: int) -> None:
    """A world that cannot be built whole holds nothing of the present one."""
    launch, build, before, layout = LaunchWorld.current(), Builder.here(), used(), Layout(zero_stage=1, data=4)
    world = build(generation, layout, EVERYONE)
    install(world)
    with pytest.raises(IndexError):
        build(generation + 1, layout, EVERYONE, world, own={"own0": (*EVERYONE, 4)})
    assert all(world.held(kind).users == 1 for kind in world.kinds)
    launch.install()
    check_gone([drop(world)], before)


def test_a_world_that_cannot_be_built_leaves_the_present_one_whole(pool: RankPool) -> None:
    pool.run(not_through, generation=800)
