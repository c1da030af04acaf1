"""An accelerator's collectives in a world that loses a member: the order of calls, with back-ends that log them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as distributed_c
import torch.distributed as td
from deepspeed.accelerator import real_accelerator
from torch._C._distributed_c10d import Work

from ds_dynatrain.adapters.groups import managed_process_group as gate
from ds_dynatrain.adapters.groups.communicators import Communicator, end, unfinished
from ds_dynatrain.adapters.groups.managed_process_group import (
    Gate,
    GroupStatus,
    ManagedProcessGroup,
    ManagedWork,
    abort,
    is_on_device,
)
from ds_dynatrain.adapters.groups.process_groups import make_fake_group
from ds_dynatrain.adapters.groups.worlds import drop
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.environment import WorkerPlace
from ds_dynatrain.engine import elastic_membership
from ds_dynatrain.engine.elastic_membership import ElasticMembership
from ds_dynatrain.errors import WorldChanged
from ds_dynatrain.space import Layout
from tests.adapters.test_communicators import DEVICE, Job, Log, accelerator, each, log

__all__ = ["accelerator", "log"]
SECONDS = 5.0


class Grouped:
    """A back-end as NCCL's, which begins and ends groups of calls."""

    def __init__(self, rows: list[str], name: str, act: Callable[[], None] = lambda: None) -> None:
        self._rows, self._name, self._act = rows, name, act

    def _group_start(self) -> None:
        self._rows.append("begin")

    def _group_end(self) -> None:
        self._rows.append("end")

    def abort(self) -> None:
        self._rows.append(f"abort {self._name}")
        self._act()

    def shutdown(self) -> None:
        self._rows.append(f"shutdown {self._name}")


def communicator(backend: Any) -> Communicator:
    return Communicator(DEVICE, td.ProcessGroup.BackendType.CUSTOM, backend)


def refuse(reason: str) -> None:
    raise AssertionError(reason)


def torn(gates: list[Gate], give_up: Callable[[str], object] = refuse) -> None:
    thread = abort(gates, give_up)
    assert thread is not None
    thread.join(SECONDS)
    assert not thread.is_alive()


# ---- aborting --------------------------------------------------------------------------------------------------------


def test_all_are_aborted_in_one_group_call_and_once(accelerator: None) -> None:
    rows: list[str] = []
    gates = [Gate(), Gate()]
    for number, each_gate in enumerate((gates[0], gates[1], gates[0])):
        each_gate.take_in(communicator(Grouped(rows, str(number))))
    torn(gates)
    assert rows == ["begin", "abort 2", "abort 1", "abort 0", "end"]
    end(gates[0].communicators, is_broken=True)
    end(gates[1].communicators)
    assert not rows[5:], "none is ended twice"


def test_the_gate_is_torn_before_anything_is_aborted(accelerator: None) -> None:
    seen: list[bool] = []
    made = Gate()
    made.take_in(communicator(Grouped([], "0", lambda: seen.append(made.is_torn))))
    torn([made])
    assert seen == [True]
    with pytest.raises(WorldChanged):
        made.take_in(communicator(Grouped([], "1")))
    assert len(made.communicators) == 2, "whoever tears it may have looked before"


def test_what_the_main_thread_waits_for_is_known() -> None:
    """Of waits inside of each other the outer one; after a collective of the device, a call that does not return."""
    made = Gate()
    assert made.waits(blocked_seconds=9.0) == ("", 0.0)
    with made.waiting("one"), made.waiting("another"):
        what, seconds = made.waits(blocked_seconds=9.0)
    assert what == "one" and 0 <= seconds < 1
    made.begin()
    assert made.waits(blocked_seconds=9.0) == ("a collective of the device", 9.0)
    made.agree(lambda number: None)
    assert made.waits(blocked_seconds=9.0) == ("", 0.0)


def test_another_thread_holds_nobody_up() -> None:
    made, found = Gate(), list[tuple[str, float]]()

    def wait() -> None:
        with made.waiting("a copy that may take long"):
            found.append(made.waits(blocked_seconds=0.0))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(SECONDS)
    assert found == [("", 0.0)]


def test_the_flight_recorder_names_what_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of torch's; without NCCL there is none."""
    entry = {"process_group": ["dynatrain_1_1_data", "undefined"], "profiling_name": "nccl:all_reduce"}
    entry |= {"collective_seq_id": 7, "state": "scheduled"}
    dump = json.dumps({"entries": [entry]}).encode()
    monkeypatch.setattr(distributed_c, "_dump_nccl_trace_json", lambda collectives, active: dump, raising=False)
    assert unfinished() == "nccl:all_reduce 7 of group dynatrain_1_1_data undefined, scheduled"
    monkeypatch.delattr(distributed_c, "_dump_nccl_trace_json")
    assert unfinished() == ""


def test_without_communicators_there_is_nothing_to_abort() -> None:
    made = Gate()
    assert abort([made], refuse) is None and made.is_torn


def test_a_device_that_does_not_come_back_ends_the_process(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "ABORT_SECONDS", 0.05)
    said, ended = list[str](), threading.Event()
    made = Gate()
    made.take_in(communicator(Grouped([], "0", lambda: ended.wait() and None)))
    thread = abort([made], lambda reason: (said.append(reason), ended.set()))
    assert thread is not None
    thread.join(SECONDS)
    assert said == ["it does not come back within 0.05 s of a death"]


def test_a_device_that_takes_nothing_any_more_ends_the_process(
    accelerator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("an illegal access\nand where")

    monkeypatch.setattr(gate, "synchronize", fails)
    said = list[str]()
    made = Gate()
    made.take_in(communicator(Grouped([], "0")))
    torn([made], said.append)
    assert said == ["an illegal access"]


def test_a_world_that_is_lost_is_aborted_where_it_is_dropped(log: Log) -> None:
    """A collective with its members, which a shutdown is, would wait for the dead one."""
    worlds = Job(status=GroupStatus).start(Layout(data=2, zero_stage=1))
    worlds[0].status.is_lost = True  # type: ignore[union-attr]
    torn([worlds[1].status.gate])  # type: ignore[union-attr]
    for world in worlds:
        drop(world).join()
    assert log.of("abort") == ["dynatrain_1_1_default_0"] * 2 and not log.of("shutdown")


def test_a_loss_while_members_connect(log: Log) -> None:
    """Whoever heard of it before has looked at the gate, and seen nothing to abort."""
    worlds = Job(status=GroupStatus).build(Layout(data=2, zero_stage=1), range(2))
    for world in worlds:
        assert world.status is not None and abort([world.status.gate], refuse) is None

    def connect(place: int) -> None:
        with pytest.raises(WorldChanged):
            worlds[place].connect(SECONDS)

    each(2, connect)
    for world in worlds:
        drop(world).join()
    assert log.of("abort") == ["dynatrain_1_1_default_0"] * 2 and not log.of("shutdown")


def member() -> ElasticMembership:
    """One that asks nobody."""
    return ElasticMembership(WorkerPlace("a", 0, 1, Address("127.0.0.1", 1)), DynatrainConfig())


def test_a_loss_aborts_the_worlds_of_all_engines_at_once(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of a late switch, of which one is the engine's."""
    rows, worlds = list[str](), list[Any]()
    for number in range(3):
        status = GroupStatus()
        status.gate.take_in(communicator(Grouped(rows, str(number))))
        worlds.append(SimpleNamespace(status=status))
    engines = [
        SimpleNamespace(world=worlds[0], late_worlds=(), is_switching=True),
        SimpleNamespace(world=worlds[1], late_worlds=(worlds[1], worlds[2]), is_switching=False),
    ]
    monkeypatch.setattr(elastic_membership, "PROCESS", SimpleNamespace(engines=engines))
    made: Any = member()
    with worlds[0].status.gate.agreeing:
        made.lose()
        assert all(world.status.gate.is_torn for world in worlds) and not rows
        assert [world.status.is_lost for world in worlds] == [True, True, False]
    made._abort.join(SECONDS)
    assert rows == ["begin", "abort 2", "abort 1", "abort 0", "end"]


def test_a_failure_aborts_a_world_in_which_an_engine_is_being_made(accelerator: None) -> None:
    rows = list[str]()
    made: Any = member()
    status = made.new_status()
    status.gate.take_in(communicator(Grouped(rows, "0")))
    made.abandon()
    made._abort.join(SECONDS)
    assert rows == ["begin", "abort 0", "end"]


def test_the_thread_that_aborts_is_on_their_device(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the thread which hears of a death is the first one of the machine, whatever the member computes on."""
    other, seen = torch.device(DEVICE.type, 3), list[int]()
    monkeypatch.setattr(real_accelerator.ds_accelerator, "set_device", seen.append)
    made = Gate()
    made.take_in(Communicator(other, td.ProcessGroup.BackendType.CUSTOM, Grouped([], "0")))  # type: ignore[arg-type]
    torn([made])
    assert seen == [3]


def test_the_next_call_of_an_engine_knows_of_it(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script has of a collective of its own may be anything. On a CPU the next collective says so."""
    status = GroupStatus()
    engines = [SimpleNamespace(world=SimpleNamespace(status=status)), SimpleNamespace(world=None)]
    monkeypatch.setattr(elastic_membership, "PROCESS", SimpleNamespace(engines=engines))
    found = member()
    status.gate.tear()
    found.check_losses()
    status.gate.communicators.append(communicator(Grouped([], "0")))
    with pytest.raises(WorldChanged, match="communicators were aborted"):
        found.check_losses()


# ---- agreeing --------------------------------------------------------------------------------------------------------


class Rounds:
    """In which ranks meet, each of which may fail."""

    def __init__(self, fails_at: int = -1) -> None:
        self.made, self._fails_at = 0, fails_at

    def __call__(self, number: int) -> None:
        assert number == self.made
        self.made += 1
        if self.made == self._fails_at:
            raise WorldChanged("a peer is gone")


def test_the_host_waits_for_the_device_then_for_all_twice(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made, rounds, at = Gate(), Rounds(), list[int]()
    monkeypatch.setattr(gate, "synchronize", lambda: at.append(rounds.made))
    made.agree(rounds)
    assert at == [0] and rounds.made == 2


@pytest.mark.parametrize("fails_at", [1, 2])
def test_nobody_counts_what_not_all_have(accelerator: None, fails_at: int) -> None:
    made = Gate()
    made.begin()
    made.end_step()
    with pytest.raises(WorldChanged):
        made.agree(Rounds(fails_at))
    assert made.is_in_doubt


def test_who_has_aborted_says_nothing(accelerator: None) -> None:
    """What the device has given it meanwhile may be anything: the collective has ended as if it were well."""
    made, rounds = Gate(), Rounds()
    made.tear()
    with pytest.raises(WorldChanged, match="communicators were aborted"):
        made.agree(rounds)
    assert not rounds.made


def test_nothing_is_aborted_while_the_others_are_waited_for(accelerator: None) -> None:
    rows, made = list[str](), Gate()
    made.take_in(communicator(Grouped(rows, "0")))
    with made.agreeing:
        thread = abort([made], refuse)
        assert thread is not None
        thread.join(0.2)
        assert made.is_torn and not rows
    thread.join(SECONDS)
    assert rows == ["begin", "abort 0", "end"]


def test_a_step_without_collectives_is_beyond_doubt(accelerator: None) -> None:
    made = Gate()
    made.begin()
    made.agree(Rounds())
    made.end_step()
    assert not made.is_in_doubt
    made.begin()
    made.end_step()
    assert made.is_in_doubt, "it has used what an abort may have left"
    made.agree(Rounds())
    assert not made.is_in_doubt


# ---- collectives -----------------------------------------------------------------------------------------------------


class Begun(Work):
    """A collective that a stream waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[Any, ...]] = []

    def wait(self, *limits: Any) -> bool:
        self.waits.append(limits)
        return True

    def is_completed(self) -> bool:
        return True


class OnDevice:
    """A tensor there."""

    device = DEVICE


@pytest.fixture
def status() -> GroupStatus:
    return GroupStatus()


def group(status: GroupStatus, work: Work) -> ManagedProcessGroup:
    made = ManagedProcessGroup(make_fake_group("pair", 0, 2)[0], status)
    made._group = SimpleNamespace(allreduce=lambda *_: work, _end_coalescing=lambda *_: work)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("call", ["allreduce", "_end_coalescing"])
def test_an_aborted_collective_is_a_change_of_the_world(status: GroupStatus, call: str) -> None:
    begun = Begun()
    given: Any = [OnDevice()] if call == "allreduce" else DEVICE
    work = getattr(group(status, begun), call)(given)
    assert isinstance(work, ManagedWork)
    work.wait()
    assert begun.waits == [()], "a wait with a limit would make the host wait, and NCCL abort"
    status.gate.tear()
    with pytest.raises(WorldChanged, match="communicators were aborted"):
        work.wait()


def test_one_on_the_host_is_none_of_its_business(status: GroupStatus) -> None:
    begun = Begun()
    work = group(status, begun).allreduce([torch.ones(1)])
    status.gate.tear()
    work.wait()
    status.gate.end_step()
    assert len(begun.waits[0]) == 1 and not status.gate.is_in_doubt


def test_where_a_collective_is_done() -> None:
    host, there = torch.ones(1), OnDevice()
    barrier: Any = SimpleNamespace(device=DEVICE)
    for arguments in ([there], [[there]], [[[there]], [there]], [[], there], ["sum", there], [barrier], [DEVICE]):
        assert is_on_device(arguments), arguments
    for arguments in ([host], [[host], [host]], [], [SimpleNamespace(device=None)], [host.device], [host, there]):
        assert not is_on_device(arguments), arguments
