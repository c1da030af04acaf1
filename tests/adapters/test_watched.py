"""Groups that say WorldChanged: what they turn into it, and what they leave as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as td
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus, ManagedProcessGroup, ManagedWork
from ds_dynatrain.adapters.groups.process_groups import make_fake_group, make_group, register, unregister
from ds_dynatrain.adapters.versions.torch_versions import COLLECTIVES
from ds_dynatrain.errors import WorldChanged

GONE = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
WRONG = "ProcessGroupGloo::allgather: invalid tensor size at index 0"
Group = td.ProcessGroup


def ones(count: int = 2) -> torch.Tensor:
    return torch.ones(count)


CALLS: dict[str, Callable[[Group], object]] = {
    "all_gather": lambda group: td.all_gather([ones(), ones()], ones(), group=group),
    "all_gather_coalesced": lambda group: td.all_gather_coalesced([[ones()], [ones()]], [ones()], group=group),
    "all_gather_into_tensor": lambda group: td.all_gather_into_tensor(ones(4), ones(), group=group),
    "all_gather_object": lambda group: td.all_gather_object([None, None], 1, group=group),
    "all_gather_single": lambda group: td.all_gather_single(ones(4), ones(), group=group),
    "all_reduce": lambda group: td.all_reduce(ones(), group=group),
    "all_reduce_coalesced": lambda group: td.all_reduce_coalesced([ones()], group=group),
    "all_to_all": lambda group: td.all_to_all([ones(), ones()], [ones(), ones()], group=group),
    "all_to_all_single": lambda group: td.all_to_all_single(ones(), ones(), group=group),
    "barrier": lambda group: td.barrier(group=group),
    "batch_isend_irecv": lambda group: td.batch_isend_irecv([td.P2POp(td.isend, ones(), 1, group)]),
    "broadcast": lambda group: td.broadcast(ones(), 0, group=group),
    "broadcast_object_list": lambda group: td.broadcast_object_list([1], 0, group=group),
    "gather": lambda group: td.gather(ones(), [ones(), ones()], 0, group=group),
    "gather_into_tensor": lambda group: td.gather_into_tensor(ones(), ones(4), 0, group=group),
    "gather_object": lambda group: td.gather_object(1, [None, None], 0, group=group),
    "gather_single": lambda group: td.gather_single(ones(), ones(4), 0, group=group),
    "irecv": lambda group: td.irecv(ones(), 1, group=group),
    "isend": lambda group: td.isend(ones(), 1, group=group),
    "monitored_barrier": lambda group: td.monitored_barrier(group=group),
    "recv": lambda group: td.recv(ones(), 1, group=group),
    "recv_object_list": lambda group: td.recv_object_list([None], 1, group=group),
    "reduce": lambda group: td.reduce(ones(), 0, group=group),
    "reduce_scatter": lambda group: td.reduce_scatter(ones(), [ones(), ones()], group=group),
    "reduce_scatter_single": lambda group: td.reduce_scatter_single(ones(), ones(4), group=group),
    "reduce_scatter_tensor": lambda group: td.reduce_scatter_tensor(ones(), ones(4), group=group),
    "scatter": lambda group: td.scatter(ones(), [ones(), ones()], 0, group=group),
    "scatter_object_list": lambda group: td.scatter_object_list([None], [1, 2], 0, group=group),
    "send": lambda group: td.send(ones(), 1, group=group),
    "send_object_list": lambda group: td.send_object_list([1], 1, group=group),
}
"""Each of torch.distributed's functions that talks to the other ranks of a group, called by rank 0 of two."""
NO_COLLECTIVE_FUNCTIONS = {
    *("is_available", "is_backend_available", "is_gloo_available", "is_initialized", "is_mpi_available"),
    *("is_nccl_available", "is_torchelastic_launched", "is_ucc_available", "is_xccl_available", "supports_complex"),
    *("get_backend", "get_backend_config", "get_debug_level", "get_default_backend_for_device", "get_global_rank"),
    *("get_group_rank", "get_node_local_rank", "get_pg_count", "get_process_group_ranks", "get_rank"),
    *("get_world_size", "set_debug_level", "set_debug_level_from_env", "breakpoint", "record_comm", "GroupName"),
    *("init_process_group", "init_device_mesh", "destroy_process_group", "register_rendezvous_handler", "rendezvous"),
    *(
        "get_backend_impl",
        "set_timeout",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "split_group",
        "shrink_group",
    ),
}
"""Those that ask, or make and take down groups: they meet, if at all, at a store."""


@pytest.fixture
def status() -> GroupStatus:
    return GroupStatus()


@pytest.fixture
def group(status: GroupStatus) -> Iterator[td.ProcessGroup]:
    """Of this process alone."""
    yield ManagedProcessGroup(make_group(HashStore(), "alone", 0, 1, 5.0)[0], status)


@pytest.fixture
def pair(status: GroupStatus) -> Iterator[td.ProcessGroup]:
    """Of two ranks, of which this process is the first, known to torch.distributed; there is no second."""
    td.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    made, store = make_fake_group("pair", 0, 2)
    managed = ManagedProcessGroup(made, status)
    register(managed, store, (0, 1))
    yield managed
    unregister(managed)
    td.destroy_process_group()


def failing(text: str) -> None:
    raise RuntimeError(text)


def test_a_lost_peer_is_a_change_of_the_world(status: GroupStatus) -> None:
    with pytest.raises(WorldChanged, match="Connection closed") as caught:
        status.call(failing, GONE)
    assert isinstance(caught.value, RuntimeError) and GONE in str(caught.value.__cause__)
    assert type(status.failure) is RuntimeError and GONE in str(status.failure)
    assert status.failure.__traceback__ is None, "its frames hold the groups"


def test_wrong_arguments_stay_what_they_are(status: GroupStatus) -> None:
    with pytest.raises(RuntimeError, match="invalid tensor size") as caught:
        status.call(failing, WRONG)
    assert not isinstance(caught.value, WorldChanged) and status.failure is None


def test_its_collectives_do_what_those_of_the_group_do(group: td.ProcessGroup) -> None:
    ones = torch.ones(3)
    work = group.allreduce([ones])
    work.wait()
    assert work.is_completed() and ones.tolist() == [1, 1, 1]
    group.barrier().wait()
    assert (group.rank(), group.size(), group.name(), group.group_name) == (0, 1, "gloo", "alone")


def test_a_closed_world_takes_no_collective(group: td.ProcessGroup, status: GroupStatus) -> None:
    status.is_closed = True
    with pytest.raises(WorldChanged, match="discarded"):
        group.allreduce([torch.ones(1)])
    status.is_closed = False
    group.allreduce([torch.ones(1)]).wait()


class Broken:
    """A group whose peers are gone."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *_, **__: failing(GONE)


def test_every_function_of_torch_is_called_here_or_known_to_be_no_collective() -> None:
    names = [name for name in dir(td) if not name.startswith("_") and callable(getattr(td, name))]
    functions = {name for name in names if not inspect.isclass(getattr(td, name))}
    assert functions <= CALLS.keys() | NO_COLLECTIVE_FUNCTIONS


@pytest.mark.filterwarnings("ignore:.*will be deprecated:FutureWarning")
@pytest.mark.parametrize("name", [name for name in CALLS if hasattr(td, name)])
def test_each_collective_function_of_torch_sees_that_the_world_is_closed(
    pair: td.ProcessGroup, status: GroupStatus, name: str
) -> None:
    status.is_closed = True
    with pytest.raises(WorldChanged, match="discarded"):
        CALLS[name](pair)


def test_torch_has_these_methods() -> None:
    """Another name in another torch would pass by unseen."""
    assert {"allreduce", "broadcast", "barrier", "_allgather_base", "_reduce_scatter_base"} < set(COLLECTIVES)
    answers = {name for name in vars(ManagedWork) if not name.startswith("_")}
    assert answers >= {"wait", "synchronize", "result", "exception", "get_future", "is_completed", "is_success"}
    assert not [name for name in answers if not hasattr(td.Work, name)]
    left = [name for name in COLLECTIVES if getattr(ManagedProcessGroup, name) is getattr(td.ProcessGroup, name)]
    assert not left


class Deaf(td.Work):
    """A collective of gloo's that does not hear that its connections were shut down."""

    def wait(self, *_: object) -> bool:
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


def test_nobody_waits_for_a_collective_that_has_not_heard_that_its_world_is_lost() -> None:
    status = GroupStatus()
    work = ManagedWork(Deaf(), status, "allreduce")
    status.is_lost = True
    with pytest.raises(WorldChanged, match="gloo has not heard of it"):
        work.wait()
    assert isinstance(status.failure, td.DistError)


class Late(td.Work):
    """A collective that ends between a look that was in vain and the question whether it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self, *_: object) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_right_after_a_look_has_not_failed() -> None:
    status = GroupStatus()
    assert ManagedWork(Late(), status, "allreduce").wait()
    assert status.failure is None


def test_a_message_is_waited_for_in_one_piece() -> None:
    """A look that ends in vain would end its connection, too."""
    status = GroupStatus()
    status.is_lost = True
    with pytest.raises(RuntimeError, match="timed out"):
        ManagedWork(Deaf(), status, "recv").wait()
