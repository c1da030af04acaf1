"""Groups that go on from world to world where members come and go, on real ranks, and those that must not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as td
from torch._C._distributed_c10d import Store

from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus, ManagedProcessGroup
from ds_dynatrain.adapters.groups.traffic import Said, joined, unfit
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import LaunchWorld, WorldSpec, build_world, drop, install, launch_store
from ds_dynatrain.elastic.abort import WorldSockets
from ds_dynatrain.errors import WorldChanged
from ds_dynatrain.space import Layout
from tests.adapters.test_worlds import SECONDS, _used, check_gone, used
from tests.engine.pool import RankPool

GRID = Layout(zero_stage=1, tensor=2, data=2)
EVERYONE, FIRST_PAIR, OTHER_PLACES = (0, 1, 2, 3), (0, 1), (2, 3, 0, 1)
CHANGES = 20


@dataclass
class Member:
    """One member of a job, with what `engine/elastic_membership` does for it. members: who trains at present."""

    store: Store
    launch: LaunchWorld
    members: tuple[int, ...] = ()
    world: World | None = None
    sockets: WorldSockets = field(default_factory=WorldSockets)
    coming: WorldSockets = field(default_factory=WorldSockets)
    threads: list[threading.Thread] = field(default_factory=list)

    @staticmethod
    def here() -> Member:
        """While the launch group is installed."""
        return Member(launch_store(), LaunchWorld.current())

    @property
    def number(self) -> int:
        return self.launch.member

    def agreed(self, *gone: int) -> list[str]:
        """The groups that are not handed on, as all hear it from those that are not gone."""
        every: list[Any] = [None] * self.launch.size
        said: Said = {} if self.world is None or self.number in gone else self.world.says()
        td.all_gather_object(every, said, group=self.launch.group)
        return unfit(reduce(joined, every))

    def build(self, generation: int, layout: Layout, members: tuple[int, ...], anew: list[str], *gone: int) -> World:
        """The next world, over sockets of its own and of the groups that stay. gone: members that have died."""
        self.coming = WorldSockets()
        spec = WorldSpec(generation, self.number, members, [one for one in self.members if one not in gone], layout)
        with self.coming.building() as note:
            return build_world(self.store, spec, SECONDS, GroupStatus(), self.world, anew, note)

    def enter(self, world: World) -> None:
        """Train in it, or leave with it, and let go of the one before."""
        before, self.members = self.world, world.members
        if world.rank is None:
            self.launch.install()
            self.world = None
            self.threads.append(drop(world))
        else:
            install(world)
            self.world = world
            self.threads.append(world.retire_transfer())
        self.coming.take_over(self.sockets)
        self.sockets = self.coming
        if before is not None:
            self.threads.append(drop(before))

    def used(self) -> tuple[int, int, int]:
        """What is used where all stand."""
        td.barrier(group=self.launch.group)
        return _used()

    def lose(self, *gone: int) -> frozenset[str]:
        """These have died: what has to be shut down is, and the names of the groups that stay open."""
        assert self.world is not None
        there = [one for one in self.world.members if one not in gone]
        stay = self.world.lose(self.sockets.groups, there)
        self.sockets.abort(resting=stay)
        return stay

    def leave(self, before: tuple[int, int, int]) -> None:
        """Nothing is left."""
        self.launch.install()
        if self.world is not None:
            self.threads.append(drop(self.world))
        self.world = None
        td.barrier()
        check_gone(self.threads, before)


def total(group: td.ProcessGroup, value: float = 1.0) -> float:
    """The sum over a group."""
    mine = torch.full((3,), value)
    td.all_reduce(mine, group=group)
    return float(mine[0])


def name(world: World, kind: str) -> str:
    return str(world.group(kind).group_name)


def changes(generation: int) -> None:
    """The second pair comes and goes, then the pairs change places in turn, then a stage alone changes."""
    member, before = Member.here(), used()
    member.enter(member.build(generation, GRID, EVERYONE, []))
    most = (0, 0, 0)
    for number in range(1, CHANGES + 1):
        change(member, generation + number, number)
        while member.threads:
            member.threads.pop().join()
        if number <= 2:
            most = max(most, member.used())
        check_gone([], most)
        td.barrier(group=member.launch.group)
    member.leave(before)


def change(member: Member, generation: int, number: int) -> None:
    """One of them. No name of a group is left, which would keep it."""
    now, was = member.world, member.members
    kind = ("comes and goes", "places", "stage")[min(number // 8, 2)]
    members = {"comes and goes": (FIRST_PAIR, EVERYONE), "places": (OTHER_PLACES, EVERYONE), "stage": (was, was)}[kind]
    anew = member.agreed(members[number % 2 == 0])
    layout = GRID.replace(zero_stage=number % 3, data=len(members[number % 2 == 0]) // 2)
    made = member.build(generation, layout, members[number % 2 == 0], anew)
    assert anew == []
    if now is not None and made.rank is not None:
        assert made.group("tensor") is now.group("tensor")
        assert (made.default is now.default) == (kind == "stage")
    member.enter(made)
    assert now is None or (now.status is not None and now.status.is_closed)
    if made.rank is not None:
        assert total(made.group("tensor")) == 2 and total(made.default) == len(made.members)
        assert total(made.data) == layout.data


@pytest.mark.full
def test_twenty_changes_leave_nothing_behind(pool: RankPool) -> None:
    pool.run(changes, generation=1000)


def given_up(generation: int) -> None:
    """A switch is rolled back after the next world was in place: its groups are those of the old one again."""
    member, before = Member.here(), used()
    member.enter(member.build(generation, GRID, EVERYONE, []))
    old = member.world
    assert old is not None
    new = member.build(generation + 1, GRID, EVERYONE, [])
    install(new)
    install(old)
    member.threads.append(drop(new))
    assert new.status is not None and new.status.is_closed
    assert total(old.group("tensor")) == 2 and total(old.default) == 4
    member.leave(before)


def test_a_group_goes_back_with_a_switch(pool: RankPool) -> None:
    pool.run(given_up, generation=1100)


def begun(member: Member, gate: Callable[[], None], is_begun: bool) -> tuple[frozenset[str], bool]:
    """Member 3 dies: the groups that stay open, and whether rank 0 was woken. is_begun: it waits for rank 1."""
    world, woken = member.world, list[bool]()
    assert world is not None

    def wait() -> None:
        try:
            total(world.group("tensor"))
        except RuntimeError as error:  # whose frames hold the group
            woken.append(isinstance(error, WorldChanged))

    thread = threading.Thread(target=wait)
    if is_begun and member.number == 0:
        thread.start()
        while not world.group("tensor").traffic._under_way:  # type: ignore[attr-defined]
            time.sleep(0.001)
    gate()
    stay = member.lose(3) if member.number != 3 else frozenset[str]()
    if thread.ident is not None:
        thread.join(SECONDS)
        assert not thread.is_alive(), "who waits in a world that is lost is woken"
    return stay, any(woken)


def death(generation: int, is_begun: bool) -> tuple[bool, bool, bool]:
    """Of member 3; 0 and 1 train on. Whether their pair was left open, and taken over; whether rank 0 was woken."""
    member, before = Member.here(), used()
    member.enter(member.build(generation, GRID, EVERYONE, []))
    old = member.world
    assert old is not None
    for _ in range(3):
        assert total(old.group("tensor")) == 2 and total(old.data) == 2
    stay, is_woken = begun(member, lambda: td.barrier(group=member.launch.group), is_begun)
    if member.number != 3:
        with pytest.raises(WorldChanged):
            total(old.group("tensor"))
    pair, is_open = old.group("tensor"), name(old, "tensor") in stay
    assert not stay & {name(old, "default")} and isinstance(pair, ManagedProcessGroup)
    anew = member.agreed(3)
    is_taken = False
    if member.number in FIRST_PAIR:
        made = member.build(generation + 1, GRID.replace(data=1), FIRST_PAIR, anew, 2, 3)
        is_taken = made.group("tensor") is pair
        member.enter(made)
        for value in (1.0, 2.0):  # a message of the old world's would be taken for one of these
            assert total(made.group("tensor"), value) == 2 * value and total(made.default, value) == 2 * value
    td.barrier(group=member.launch.group)
    del old, pair
    member.leave(before)
    return is_open, is_taken, is_woken


def test_a_group_in_which_nothing_is_under_way_outlives_a_death(pool: RankPool) -> None:
    found = pool.run(death, generation=1200, is_begun=False)
    assert found == [(True, True, False), (True, True, False), (False, False, False), (False, False, False)]


def test_a_group_in_which_somebody_waits_is_built_anew(pool: RankPool) -> None:
    """Rank 1 left its side open, and hears from what all say that rank 0 has shut its own."""
    found = pool.run(death, generation=1300, is_begun=True)
    assert found == [(False, False, True), (True, False, False), (False, False, False), (False, False, False)]


def half_done(generation: int) -> list[bool]:
    """A broadcast in a pair that its source has begun, and waits for in no line: the other one has not come to it."""
    member, before = Member.here(), used()
    member.enter(member.build(generation, GRID, EVERYONE, []))
    old = member.world
    assert old is not None
    pair, mine = old.group("tensor"), torch.full((3,), 7.0)
    work = td.broadcast(mine, 0, group=pair, async_op=True) if member.number == 0 else None
    td.barrier(group=member.launch.group)
    rests = [pair.traffic.is_at_rest] if isinstance(pair, ManagedProcessGroup) else []
    if member.number != 3:
        member.lose(3)
    anew = member.agreed(3)
    if member.number in FIRST_PAIR:
        made = member.build(generation + 1, GRID.replace(data=1), FIRST_PAIR, anew, 2, 3)
        assert made.group("tensor") is not pair
        member.enter(made)
        told = torch.full((3,), 1.0 + member.number)
        td.broadcast(told, 0, group=made.group("tensor"))
        assert told[0] == 1
    td.barrier(group=member.launch.group)
    del old, pair, work
    member.leave(before)
    return rests


def test_a_group_in_which_something_is_under_way_is_built_anew(pool: RankPool) -> None:
    """Nobody waits in it: the broadcast would reach the first one of the next world."""
    assert pool.run(half_done, generation=1400) == [[False], [True], [True], [True]]
