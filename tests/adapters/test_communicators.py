"""Communicators of an accelerator that is not there: who makes one, keeps one, ends one, and in which order."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as td
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_dynatrain.adapters.groups import communicators
from ds_dynatrain.adapters.groups.communicators import Communicator, Connections, Endpoint, make_communicator
from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus, ManagedProcessGroup
from ds_dynatrain.adapters.groups.process_groups import (
    GroupOfOne,
    make_fake_group,
    make_group,
    register,
    serve_host,
    unregister,
)
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import WorldSpec, add_groups, build_world, drop, stand_in_world
from ds_dynatrain.errors import DynatrainError
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.session import Session, VoteResult
from ds_dynatrain.reshard.preparation import Outcome, over_all
from ds_dynatrain.reshard.switch import connect as connect_members
from ds_dynatrain.space import Layout
from ds_dynatrain.transfer import GroupTransport

CPU, DEVICE = torch.device("cpu"), torch.device("xpu", 0)
SECONDS = 20.0
NAME = "recorded"


class Accelerator(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed has no types
    """One whose tensors nobody makes here."""

    def device_name(self, device_index: int | None = None) -> str:
        return DEVICE.type

    def current_device(self) -> int:
        return 0

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def communication_backend_name(self) -> str:
        return NAME

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is queued."""


@dataclass
class Log:
    """What was done to back-ends, in order: what, and whose (ranks of its world, by the group's name)."""

    rows: list[tuple[str, str, int]] = field(default_factory=list)
    fails: str = ""
    hangs: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def of(self, what: str) -> list[str]:
        return [name for done, name, _ in self.rows if done == what]


class Recorded:
    """A back-end that sends nothing."""

    supports_splitting = True

    def __init__(self, log: Log, name: str, rank: int, size: int) -> None:
        self.log, self.name, self.rank, self.size = log, name, rank, size
        self.note("made")

    def note(self, what: str) -> None:
        self.log.rows.append((what, self.name, self.rank))

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == DEVICE
        if self.log.fails and self.log.fails in self.name:
            raise RuntimeError("no way there")
        if self.log.hangs and self.log.hangs == f"{self.name}, rank {self.rank}":
            self.log.released.wait()
        self.note("connected")

    def shutdown(self) -> None:
        self.note("shutdown")

    def abort(self) -> None:
        self.note("abort")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_accelerator, "ds_accelerator", Accelerator())
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: False)  # torch here is built without it
    monkeypatch.setattr(td.Backend, "_plugins", dict(td.Backend._plugins))
    for table in ("backend_list", "backend_capability", "backend_type_map", "default_device_backend_map"):
        held: Any = getattr(td.Backend, table)
        monkeypatch.setattr(td.Backend, table, held.copy())


def offer(create: Callable[..., Any], extended: bool = False) -> None:
    td.Backend.register_backend(NAME, create, extended_api=extended, devices=[DEVICE.type])


@pytest.fixture
def log(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Of back-ends in Python, which torch's groups cannot hold."""
    found = Log()
    offer(lambda options, _: Recorded(found, options.group_id, options.group_rank, options.group_size), extended=True)

    def serve(self: Communicator, group: td.ProcessGroup) -> None:
        group.bound_device_id = self.device
        found.rows.append(("serves", str(group.group_name), group.rank()))

    def renew(self: ManagedProcessGroup, *_: Any) -> None:
        found.rows.append(("serves anew", str(self.group_name), self.rank()))

    monkeypatch.setattr(Communicator, "serve", serve)
    monkeypatch.setattr(ManagedProcessGroup, "renew", renew)
    return found


def each(count: int, call: Callable[[int], Any]) -> list[Any]:
    """What `call` returns for every number below `count`, all at once."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


@dataclass
class Job:
    """Worlds of one job, each built by all its members, each in a thread, as in processes of their own."""

    store: Store = field(default_factory=HashStore)
    generation: int = 0
    status: Callable[[], GroupStatus | None] = lambda: None

    def build(
        self, layout: Layout, members: Sequence[int], before: Sequence[World | None] = (), own: Any = None
    ) -> list[World]:
        """The world of each member, not connected yet. before: theirs."""
        self.generation += 1
        previous = [world.members for world in before if world is not None]
        source = previous[0] if previous else members
        union = sorted({*members, *source})

        def build(place: int) -> World:
            spec = WorldSpec(self.generation, union[place], tuple(members), tuple(source), layout, own=own or {})
            return build_world(self.store, spec, SECONDS, self.status())

        return each(len(union), build)

    def start(self, layout: Layout, **more: Any) -> list[World]:
        worlds = self.build(layout, range(layout.world_size), **more)
        for world in worlds:
            world.connect(SECONDS)
        return worlds


def ended(worlds: Sequence[World]) -> None:
    for world in worlds:
        drop(world).join()


# ---- who makes and keeps ---------------------------------------------------------------------------------------------


def test_one_for_all_groups_of_the_same_members(log: Log) -> None:
    worlds = Job().start(Layout(data=2, zero_stage=1))
    assert log.of("made") == log.of("connected") == ["dynatrain_1_1_default_0"] * 2
    assert set(log.of("serves")) == {f"dynatrain_1_1_{kind}_0" for kind in ("default", "data")}
    assert [list(world.communicators) for world in worlds] == [[("", (0, 1))]] * 2
    ended(worlds)
    assert log.of("shutdown") == ["dynatrain_1_1_default_0"] * 2 and not log.of("abort")


def test_axes_have_their_own(log: Log) -> None:
    worlds = Job().start(Layout(data=2, tensor=2, zero_stage=1))
    between = [[members for _, members in world.communicators] for world in worlds]
    assert between == [
        [(0, 1, 2, 3), (0, 2), (0, 1)],
        [(0, 1, 2, 3), (1, 3), (0, 1)],
        [(0, 1, 2, 3), (0, 2), (2, 3)],
        [(0, 1, 2, 3), (1, 3), (2, 3)],
    ]
    ended(worlds)


def test_groups_of_one_rank_have_none(log: Log) -> None:
    worlds = Job().start(Layout(data=1, zero_stage=3))
    assert not log.rows and isinstance(worlds[0].default, GroupOfOne)
    assert set(worlds[0].default._device_types) == {CPU, torch.device(DEVICE.type)}
    assert worlds[0].transfer is not None and GroupTransport(worlds[0].transfer, (0,))
    ended(worlds)


def test_a_change_of_the_stage_alone_makes_none(log: Log) -> None:
    job = Job()
    old = job.start(Layout(data=2, zero_stage=1))
    new = job.build(Layout(data=2, zero_stage=3), (0, 1), old)
    found = [world.connect(SECONDS, before) for world, before in zip(new, old, strict=True)]
    assert [(each.built, each.kept) for each in found] == [(0, 1)] * 2
    ended(old)
    assert not log.of("shutdown"), "the new world has it"
    ended(new)
    assert log.of("shutdown") == ["dynatrain_1_1_default_0"] * 2


def test_a_roll_back_leaves_the_old_world_what_it_has(log: Log) -> None:
    job = Job()
    old = job.start(Layout(data=4, zero_stage=1))
    new = job.build(Layout(data=2, tensor=2, zero_stage=1), (0, 1, 2, 3), old)
    found = [world.connect(SECONDS, before) for world, before in zip(new, old, strict=True)]
    assert [(each.built, each.kept) for each in found] == [(2, 1)] * 4
    ended(new)
    assert Counter(log.of("shutdown")) == {
        "dynatrain_1_2_data_0": 2,
        "dynatrain_1_2_data_1": 2,
        "dynatrain_1_2_tensor_0": 2,
        "dynatrain_1_2_tensor_2": 2,
    }
    ended(old)
    assert Counter(log.of("shutdown"))["dynatrain_1_1_default_0"] == 4


def test_members_that_leave_end_what_they_had_with_the_others(log: Log) -> None:
    job = Job()
    old = job.start(Layout(data=4, zero_stage=1))
    new = job.build(Layout(data=2, zero_stage=1), (0, 1), old)
    found = [world.connect(SECONDS, before) for world, before in zip(new, old, strict=True)]
    assert [(each.built, each.kept) for each in found] == [(1, 0), (1, 0), (0, 0), (0, 0)]
    ended(old)
    assert [row for row in log.rows if row[0] == "shutdown"] == [
        ("shutdown", "dynatrain_1_1_default_0", rank) for rank in range(4)
    ]
    ended(new)
    assert log.of("shutdown")[4:] == ["dynatrain_1_2_default_0"] * 2


def test_another_order_of_the_members_is_another_one(log: Log) -> None:
    job = Job()
    old = job.start(Layout(data=2, zero_stage=1))
    new = job.build(Layout(data=2, zero_stage=1), (1, 0), old)
    found = [world.connect(SECONDS, before) for world, before in zip(new, old, strict=True)]
    assert [(each.built, each.kept) for each in found] == [(1, 0)] * 2
    ended([*old, *new])


def test_a_group_of_the_users_shares_with_none(log: Log) -> None:
    worlds = Job().start(Layout(data=2, zero_stage=1), own={"own0": (0, 1)})
    assert [list(world.communicators) for world in worlds] == [[("", (0, 1)), ("own0", (0, 1))]] * 2
    ended(worlds)


def test_groups_that_are_added_later(log: Log) -> None:
    job, layout = Job(), Layout(data=2, zero_stage=1)
    worlds = job.start(layout)
    made = len(log.of("made"))

    def add(place: int) -> None:
        world = worlds[place]
        world.register = lambda: None  # type: ignore[method-assign]  # torch.distributed is there once in a process
        add_groups(job.store, world, {"own0": (0, 1)}, SECONDS)

    each(2, add)
    assert log.of("made")[made:] == ["dynatrain_1_1_own0_0"] * 2
    ended(worlds)


def test_where_members_come_and_go_none_is_handed_on(log: Log) -> None:
    """A collective may have failed on one of them, and the others not know it yet."""
    job = Job(status=GroupStatus)
    old = job.start(Layout(data=2, zero_stage=1))
    new = job.build(Layout(data=2, zero_stage=3), (0, 1), old)
    found = [world.connect(SECONDS, before) for world, before in zip(new, old, strict=True)]
    assert [(each.built, each.kept) for each in found] == [(1, 0)] * 2
    for world in old:
        assert world.status is not None
        world.status.failure = RuntimeError("a peer is gone")
    ended(old)
    assert log.of("abort") == ["dynatrain_1_1_default_0"] * 2 and not log.of("shutdown")
    ended(new)
    assert log.of("shutdown") == ["dynatrain_1_2_default_0"] * 2


def test_those_of_one_member_end_in_the_order_in_which_they_were_made(log: Log) -> None:
    worlds = Job().start(Layout(data=2, tensor=2, zero_stage=1))
    ended(worlds[:1])
    assert log.of("shutdown") == [f"dynatrain_1_1_{kind}_0" for kind in ("default", "data", "tensor")]
    ended(worlds[1:])


def test_one_that_cannot_be_connected_is_aborted_and_the_others_shut_down(log: Log) -> None:
    worlds = Job().build(Layout(data=2, tensor=2, zero_stage=1), range(4))
    log.fails = "tensor"
    for world in worlds:
        with pytest.raises(RuntimeError, match="no way there"):
            world.connect(SECONDS)
    assert Counter(log.of("abort")) == {"dynatrain_1_1_tensor_0": 2, "dynatrain_1_1_tensor_2": 2}
    ended(worlds)
    assert Counter(log.of("shutdown")) == {
        "dynatrain_1_1_default_0": 4,
        "dynatrain_1_1_data_0": 2,
        "dynatrain_1_1_data_1": 2,
    }


def test_what_hangs_is_left_to_itself_and_aborted_when_it_is_through(log: Log) -> None:
    worlds = Job().build(Layout(data=2, tensor=2, zero_stage=1), range(4))
    log.hangs, begin = "dynatrain_1_1_tensor_2, rank 1", time.monotonic()

    def connect(place: int) -> str:
        try:
            worlds[place].connect(1.0)
        except RuntimeError as error:
            return str(error)
        return ""

    said = each(4, connect)
    assert said[:3] == ["", "", ""] and time.monotonic() - begin < SECONDS
    assert said[3] == f"{NAME} has not connected ranks [2, 3] of dynatrain_1_1_tensor_2 within 1 s; not done: [3]"
    for world in worlds:
        drop(world, is_broken=True).join()
    assert not log.of("shutdown")
    before = log.of("abort").count("dynatrain_1_1_tensor_2")
    log.released.set()
    end = time.monotonic() + SECONDS
    while log.of("abort").count("dynatrain_1_1_tensor_2") == before and time.monotonic() < end:
        time.sleep(0.01)
    assert Counter(log.of("made")) == Counter(log.of("abort")), "what is made is ended, once"


def test_who_waits_leaves_when_another_one_has_failed(log: Log) -> None:
    worlds = Job().build(Layout(data=2, zero_stage=1), (0, 1))
    log.hangs, begin = "dynatrain_1_1_default_0, rank 0", time.monotonic()

    def stop() -> None:
        raise DynatrainError("member 1 has failed")

    with pytest.raises(DynatrainError, match="member 1 has failed"):
        worlds[0].connect(SECONDS, stop=stop)
    assert time.monotonic() - begin < SECONDS / 2
    log.released.set()
    ended(worlds)


def test_ending_is_left_to_the_thread_that_takes_groups_down(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds, names = Job().start(Layout(data=2, zero_stage=1)), []
    monkeypatch.setattr(Recorded, "shutdown", lambda self: names.append(threading.current_thread().name))
    ended(worlds)
    assert names == ["dynatrain-teardown"] * 2


def test_nothing_on_a_cpu() -> None:
    worlds = Job().start(Layout(data=2, zero_stage=1))
    assert [world.connect(SECONDS) for world in worlds] == [Connections()] * 2
    assert not worlds[0].communicators and worlds[0].default.bound_device_id is None
    ended(worlds)


def test_stand_ins_serve_both(log: Log) -> None:
    world = stand_in_world(1, Layout(data=2, zero_stage=1))
    assert not log.rows and set(world.default._device_types) == {CPU, torch.device(DEVICE.type)}
    drop(world).join()


# ---- for the moves between devices -----------------------------------------------------------------------------------

ALL = ("", (0, 1, 2, 3))


def moving(job: Job, old: list[World], layout: Layout, members: Sequence[int]) -> tuple[list[World], list[Connections]]:
    """The next world of each member, connected for moves; and what that took."""
    new = job.build(layout, members, old)
    for world in new:
        world.moves_by_device = True
    before = {member: world for world in old for member in [world.members[world.rank or 0]]}
    union = sorted({*before, *members})
    return new, each(len(new), lambda place: new[place].connect(SECONDS, before.get(union[place])))


def test_moves_of_a_world_that_grows_go_by_its_own(log: Log) -> None:
    job = Job()
    old = job.start(Layout(data=2, zero_stage=1))
    new, found = moving(job, old, Layout(data=4, zero_stage=1), (0, 1, 2, 3))
    assert [(one.built, one.kept) for one in found] == [(1, 0)] * 4
    assert all(world.moving is world.communicators[ALL] for world in new)
    ended([*old, *new])


def test_moves_among_the_same_members_go_by_what_they_have(log: Log) -> None:
    job = Job()
    old = job.start(Layout(data=4, zero_stage=1))
    new, found = moving(job, old, Layout(data=4, zero_stage=3), (0, 1, 2, 3))
    assert [(one.built, one.kept) for one in found] == [(0, 1)] * 4
    assert all(world.moving is before.communicators[ALL] for world, before in zip(new, old, strict=True))
    for world in new:
        world.retire_transfer().join()
    ended(old)
    assert not log.of("shutdown"), "the new world has it"
    ended(new)
    assert len(log.of("shutdown")) == 4


def test_moves_to_those_who_stay_go_by_that_of_all(log: Log) -> None:
    """Those who leave hold no rank in the next world, and are in it for the moves."""
    job = Job()
    old = job.start(Layout(data=4, zero_stage=1))
    new, found = moving(job, old, Layout(data=2, zero_stage=1), (0, 1))
    assert [(one.built, one.kept) for one in found] == [(1, 1), (1, 1), (0, 1), (0, 1)]
    assert all(world.moving is before.communicators[ALL] for world, before in zip(new, old, strict=True))
    ended(old)
    assert not log.of("shutdown")
    for world in new[:2]:
        world.retire_transfer().join()
    ended(new[2:])
    assert log.of("shutdown") == ["dynatrain_1_1_default_0"] * 4
    ended(new[:2])


def test_moves_between_others_have_one_of_their_own(log: Log) -> None:
    job = Job()
    old = job.start(Layout(data=2, zero_stage=1))
    new, found = moving(job, old, Layout(data=2, zero_stage=1), (1, 2))
    assert [(one.built, one.kept) for one in found] == [(1, 0), (2, 0), (2, 0)]
    assert [world.moving is world.communicators["transfer", (0, 1, 2)] for world in new] == [True] * 3
    for world in new[1:]:
        world.retire_transfer().join()
    ended([*old, new[0]])
    assert log.of("shutdown").count("dynatrain_1_2_transfer_0") == 3
    ended(new[1:])


def test_moves_where_members_come_and_go_share_with_no_world(log: Log) -> None:
    job = Job(status=GroupStatus)
    old = job.start(Layout(data=4, zero_stage=1))
    new, found = moving(job, old, Layout(data=2, zero_stage=1), (0, 1))
    assert [(one.built, one.kept) for one in found] == [(2, 0), (2, 0), (1, 0), (1, 0)]
    for world in new:
        assert world.status is not None and world.moving in world.status.gate.communicators
    ended([*old, *new])


def test_one_that_was_aborted_is_made_anew_for_all_its_groups(log: Log) -> None:
    worlds = Job().start(Layout(data=2, tensor=2, zero_stage=1))
    lost = [world.communicators[ALL] for world in worlds]
    for one in lost:
        communicators.end([one], is_broken=True)
    each(4, lambda place: worlds[place].renew(lost[place], "anew/2", SECONDS))
    assert all(world.communicators[ALL] is not one for world, one in zip(worlds, lost, strict=True))
    assert set(log.of("serves anew")) == {"dynatrain_1_1_default_0"} and len(log.of("serves anew")) == 4
    assert len(log.of("abort")) == 4
    ended(worlds)
    assert len(log.of("shutdown")) == 3 * 4, "of all three, and nothing of those that were aborted"


# ---- in a switch -----------------------------------------------------------------------------------------------------


def meeting(job: Job, world: World, old: World | None, member: int, union: Sequence[int]) -> tuple[Any, Session]:
    """One member's preparation of a switch, as far as it connects, and what all do together."""
    board = Control(job.store, "board", member, SECONDS)
    preparation = SimpleNamespace(world=world, board=board, connections=None)
    return preparation, Session(board, "switch/2", tuple(union), "the switch")


def test_a_switch_connects_when_all_stand(log: Log) -> None:
    job = Job()
    old = job.start(Layout(data=4, zero_stage=1))
    new = job.build(Layout(data=2, zero_stage=1), (0, 1), old)
    made = len(log.of("made"))
    came = threading.Event()

    def connect(place: int) -> dict[str, Any]:
        if place == 3:
            time.sleep(0.2)
            assert len(log.of("made")) == made, "it was made before all have come"
            came.set()
        part, session = meeting(job, new[place], old[place], place, range(4))
        connect_members(part, old[place], session)
        assert came.is_set()
        return Outcome(connections=part.connections or Connections()).measured()

    found = each(4, connect)
    counts = [(one["communicators_built"], one["communicators_kept"]) for one in found]
    assert counts == [(1, 0), (1, 0), (0, 0), (0, 0)] and found[0]["connect_ms"] > 0
    whole = reduce(over_all, found)
    assert (whole["communicators_built"], whole["communicators_kept"]) == (1, 0)
    ended([*old, *new])


def test_nobody_connects_where_one_has_failed(log: Log) -> None:
    job = Job()
    new = job.build(Layout(data=2, zero_stage=1), (0, 1))

    def connect(place: int) -> str:
        part, session = meeting(job, new[place], None, place, (0, 1))
        if place == 1:
            session.decide(VoteResult(False, "no memory"))
            return ""
        with pytest.raises(DynatrainError) as found:
            connect_members(part, None, session)
        return str(found.value)

    assert "no memory" in each(2, connect)[0] and not log.rows
    ended(new)


def test_a_switch_on_a_cpu_asks_nobody() -> None:
    job = Job()
    new = job.build(Layout(data=2, zero_stage=1), (0, 1))
    part, session = meeting(job, new[0], None, 0, (0, 1))
    connect_members(part, None, session)
    assert part.connections is None
    ended(new)


# ---- what torch makes of it ------------------------------------------------------------------------------------------


@pytest.fixture
def default() -> Iterator[None]:
    td.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    td.destroy_process_group()


def over_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A back-end that torch's groups can hold."""
    assert timeout == communicators.default_pg_timeout
    return td.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=SECONDS))


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_group_is_a_pair(accelerator: None, default: None, is_watched: bool) -> None:
    offer(over_gloo)
    job = Job(status=(lambda: GroupStatus()) if is_watched else lambda: None)
    worlds = job.build(Layout(data=2, zero_stage=1), (0, 1))
    each(2, lambda place: worlds[place].connect(SECONDS))
    held = worlds[0].held("default")
    group, store = held.group, held.store
    assert group.bound_device_id == DEVICE and group._get_backend(DEVICE) is not group._get_backend(CPU)
    register(group, store, (0, 1))
    assert [str(worlds[0].group(kind).group_name) for kind in ("default", "data")] == [
        f"dynatrain_1_1_{kind}_0" for kind in ("default", "data")
    ]
    assert td.get_backend(group) == td.get_backend_config(group) == f"cpu:gloo,{DEVICE.type}:{NAME}"
    unregister(group)
    found = [torch.full((2,), float(place + 1)) for place in range(2)]
    each(2, lambda place: worlds[place].default._get_backend(DEVICE).allreduce([found[place]]).wait())
    each(2, lambda place: worlds[place].default.allreduce([found[place]]).wait())
    assert [tensor.tolist() for tensor in found] == [[6.0, 6.0]] * 2
    ended(worlds)


def test_a_group_goes_on_over_another_back_end(accelerator: None, default: None) -> None:
    """As after moves that failed: the same group, which others have kept, and another communicator behind it."""
    offer(over_gloo)
    worlds = Job().build(Layout(data=2, zero_stage=1), (0, 1))
    each(2, lambda place: worlds[place].connect(SECONDS))
    groups = [world.default for world in worlds]
    before = [group._get_backend(DEVICE) for group in groups]
    each(2, lambda place: worlds[place].renew(worlds[place].communicators["", (0, 1)], "anew/2", SECONDS))
    assert [world.default for world in worlds] == groups
    assert not any(group._get_backend(DEVICE) is backend for group, backend in zip(groups, before, strict=True))
    for device in (CPU, DEVICE):
        found = [torch.full((2,), float(place + 1)) for place in range(2)]
        each(2, lambda place, on=device, held=found: groups[place]._get_backend(on).allreduce([held[place]]).wait())
        assert [tensor.tolist() for tensor in found] == [[3.0, 3.0]] * 2
    assert str(groups[0].group_name) == "dynatrain_1_1_default_0" and groups[0].bound_device_id == DEVICE
    ended(worlds)


def test_a_group_of_one_of_both_is_known_as_such(accelerator: None, default: None) -> None:
    made = make_fake_group("one", 0, 1)
    register(*made, (0,))
    assert td.get_backend(made[0]) == "fake" and td.get_backend_config(made[0]) == f"cpu:fake,{DEVICE.type}:fake"
    unregister(made[0])


def test_a_launch_without_a_cpu_gets_one(default: None) -> None:
    """As `deepspeed.init_distributed` makes it on CUDA: NCCL, and nothing for the CPU."""
    store = HashStore()

    def serve(rank: int) -> list[float]:
        group = td.ProcessGroup(PrefixStore("launch", store), rank, 2)
        group._register_backend(
            DEVICE, td.ProcessGroup.BackendType.CUSTOM, make_fake_group("x", rank, 2)[0]._get_backend(CPU)
        )
        group._set_group_name(c10d.GroupName("launched"))
        for _ in range(2):  # the second engine of a process finds it there
            serve_host(group, PrefixStore("ours", store), SECONDS)
        assert group.group_name == "launched"
        held = torch.ones(2)
        group.allreduce([held]).wait()
        return list(held.tolist())

    assert each(2, serve) == [[2.0, 2.0]] * 2


def test_a_launch_with_a_cpu_stays_as_it_is() -> None:
    group, _ = make_group(HashStore(), "launch", 0, 1, SECONDS)
    before = group._get_backend(CPU)
    serve_host(group, HashStore(), SECONDS)
    assert group._get_backend(CPU) is before


def test_a_back_end_that_nobody_has_is_an_error(accelerator: None) -> None:
    with pytest.raises(RuntimeError, match=f"communicates by '{NAME}', which torch .* nobody has registered"):
        make_communicator(Endpoint("here", (0, 1), 0, HashStore()), SECONDS)


def test_those_of_torch_s_own_get_their_options(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ProcessGroupNCCL: time-out, global ranks and name; connected at once."""
    seen: list[Any] = []

    class ProcessGroupNCCL(Recorded):
        class Options:
            """Attributes are set on it."""

        def __init__(self, store: Store, rank: int, size: int, options: Any) -> None:
            super().__init__(Log(), options.group_name, rank, size)
            seen.append((rank, size, vars(options)))

        def eager_connect_single_device(self, device: torch.device) -> None:
            seen.append(device)

    monkeypatch.setattr(communicators.c10d, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    monkeypatch.setattr(Accelerator, "communication_backend_name", lambda self: "nccl")
    made = make_communicator(Endpoint("here", (4, 6), 1, HashStore()), SECONDS)
    options = {"_timeout": communicators.default_pg_timeout, "global_ranks_in_group": [4, 6], "group_name": "here"}
    assert seen == [(1, 2, options), DEVICE]
    assert made.kind == td.ProcessGroup.BackendType.NCCL and made.device == DEVICE


def test_the_version_is_that_of_the_library_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the one torch was built with, unless it has it inside."""

    def tell(into: Any) -> None:
        into._obj.value = 23102

    def refuse(name: str, mode: int) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(communicators.ctypes, "CDLL", lambda name, mode: SimpleNamespace(ncclGetVersion=tell))
    assert communicators.nccl_version() == (2, 31, 2)
    monkeypatch.setattr(communicators.ctypes, "CDLL", refuse)
    assert communicators.nccl_version() == (2, 28, 9)
