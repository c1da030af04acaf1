"""Groups of one rank: every collective writes what goes in to what comes out, and refuses what torch's refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as td
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.nn import functional as differentiable
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_dynatrain.adapters.groups.device import devices
from ds_dynatrain.adapters.groups.managed_process_group import MESSAGES
from ds_dynatrain.adapters.groups.process_groups import KNOWN, GroupOfOne, make_fake_group, register, unregister
from ds_dynatrain.adapters.versions.torch_versions import COLLECTIVES
from tests.adapters.test_watched import CALLS

Group = td.ProcessGroup
DEVICES = [device.type for device in devices()]


@pytest.fixture
def group() -> Iterator[Group]:
    """Known to torch.distributed, beside a default group that tells nothing."""
    td.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    made = make_fake_group("alone", 0, 1)
    assert isinstance(made[0], GroupOfOne)
    register(*made, (1,))
    yield made[0]
    unregister(made[0])
    td.destroy_process_group()


def unwritten(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """An output that nobody has written."""
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)


Call = Callable[[Group, torch.Tensor, torch.Tensor, bool], Any]
"""A collective from the second tensor to the first, of six elements each; returns its handle."""

COPIES: dict[str, Call] = {
    "all_gather": lambda group, out, given, later: td.all_gather([out], given, group, async_op=later),
    "all_gather_coalesced": lambda group, out, given, later: td.all_gather_coalesced([[out]], [given], group, later),
    "all_gather_into_tensor": lambda group, out, given, later: td.all_gather_into_tensor(out, given, group, later),
    "all_gather_single": lambda group, out, given, later: td.all_gather_single(out, given, group, later),
    "all_to_all": lambda group, out, given, later: td.all_to_all([out], [given], group, later),
    "all_to_all_single": lambda group, out, given, later: td.all_to_all_single(out, given, group=group, async_op=later),
    "all_to_all_single, cut": lambda group, out, given, later: td.all_to_all_single(
        out, given, [6], [6], group=group, async_op=later
    ),
    "gather": lambda group, out, given, later: td.gather(given, [out], 1, group, later),
    "gather_into_tensor": lambda group, out, given, later: td.gather_into_tensor(given, out, 1, group, later),
    "gather_single": lambda group, out, given, later: td.gather_single(given, out, 1, group, later),
    "scatter": lambda group, out, given, later: td.scatter(out, [given], 1, group, later),
    "reduce_scatter": lambda group, out, given, later: td.reduce_scatter(out, [given], group=group, async_op=later),
    "reduce_scatter_single": lambda group, out, given, later: td.reduce_scatter_single(
        out, given, group=group, async_op=later
    ),
    "reduce_scatter_tensor": lambda group, out, given, later: td.reduce_scatter_tensor(
        out, given, td.ReduceOp.AVG, group, later
    ),
}
KEPT: dict[str, Call] = {
    "all_reduce": lambda group, held, _, later: td.all_reduce(held, td.ReduceOp.MAX, group, later),
    "all_reduce, mean": lambda group, held, _, later: td.all_reduce(held, td.ReduceOp.AVG, group, later),
    "all_reduce_coalesced": lambda group, held, _, later: td.all_reduce_coalesced([held], group=group, async_op=later),
    "broadcast": lambda group, held, _, later: td.broadcast(held, 1, group, later),
    "reduce": lambda group, held, _, later: td.reduce(held, 1, group=group, async_op=later),
    "barrier": lambda group, *_: td.barrier(group),
}
OBJECTS = {
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("recv_object_list", "send_object_list"),
}
TALKS = {"batch_isend_irecv", "irecv", "isend", "recv", "send"}


def there(calls: dict[str, Call]) -> list[str]:
    """Those that the installed torch has."""
    return [name for name in calls if hasattr(td, name.partition(",")[0])]


def test_every_collective_of_torch_is_called_here() -> None:
    named = {name.partition(",")[0] for name in (*COPIES, *KEPT)}
    assert named | OBJECTS | TALKS | {"monitored_barrier"} == set(CALLS)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", there(COPIES))
def test_what_goes_in_comes_out(group: Group, name: str, later: bool, device: str) -> None:
    given = torch.arange(6.0, device=device)
    out = unwritten(6, like=given)
    work = COPIES[name](group, out, given, later)
    if later:
        work.wait()
        if isinstance(work, td.Work):
            assert work.is_completed() and work.is_success() and work.exception() is None
            assert torch.equal(work.result()[0], given)
        future = work.get_future() if isinstance(work, td.Work) else work
        assert torch.equal(future.value()[0], given)
    assert torch.equal(out, torch.arange(6.0, device=device)) and torch.equal(given, out)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", there(KEPT))
def test_what_is_reduced_or_sent_to_all_stays(group: Group, name: str, later: bool, device: str) -> None:
    held = torch.arange(6.0, device=device)
    work = KEPT[name](group, held, held, later)
    assert work is None or work.wait() is not False
    assert torch.equal(held, torch.arange(6.0, device=device))


def test_objects(group: Group) -> None:
    for call in (td.all_gather_object, lambda out, given, group: td.gather_object(given, out, 1, group)):
        out: list[Any] = [None]
        call(out, {"a": 1}, group)
        assert out == [{"a": 1}]
    out = [None]
    td.scatter_object_list(out, [{"b": 2}], 1, group)
    assert out == [{"b": 2}]
    td.broadcast_object_list(out, 1, group)
    assert out == [{"b": 2}]


def test_several_at_once(group: Group) -> None:
    first, second = torch.arange(3.0), torch.arange(4.0)
    for collective in (td.all_gather_into_tensor, td.reduce_scatter_tensor):
        outs = [unwritten(len(given), like=given) for given in (first, second)]
        with c10d._coalescing_manager(group):
            for out, given in zip(outs, (first, second), strict=True):
                collective(out, given, group=group)
        assert torch.equal(outs[0], first) and torch.equal(outs[1], second)
    out = unwritten(3, like=first)
    with c10d._coalescing_manager(group, device=torch.device("cpu"), async_ops=True) as manager:
        td.all_gather([out], first, group)
    manager.wait()
    assert torch.equal(out, first)


FUNCTIONAL: dict[str, Callable[[torch.Tensor, Group], Any]] = {
    "all_gather_tensor": lambda given, group: functional.all_gather_tensor(given, 0, group),
    "all_gather_tensor_autograd": lambda given, group: functional.all_gather_tensor_autograd(given, 0, group),
    "all_gather_into_tensor_coalesced": lambda given, group: functional.all_gather_into_tensor_coalesced(
        [given], group
    )[0],
    "all_reduce": lambda given, group: functional.all_reduce(given, "avg", group),
    "all_reduce_coalesced": lambda given, group: functional.all_reduce_coalesced([given], "sum", group)[0],
    "all_to_all_single": lambda given, group: functional.all_to_all_single(given, None, None, group),
    "all_to_all_single_autograd": lambda given, group: functional.all_to_all_single_autograd(given, [6], [6], group),
    "broadcast": lambda given, group: functional.broadcast(given, 0, group),
    "reduce_scatter_tensor": lambda given, group: functional.reduce_scatter_tensor(given, "sum", 0, group),
    "reduce_scatter_tensor_coalesced": lambda given, group: functional.reduce_scatter_tensor_coalesced(
        [given], "sum", [0], group
    )[0],
    "reduce_scatter_tensor_autograd": lambda given, group: functional.reduce_scatter_tensor_autograd(
        given, "sum", 0, group
    ),
}
"""The collectives of compiled graphs, which torch's C++ asks of the group."""


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives(group: Group, name: str, device: str) -> None:
    given = torch.arange(6.0, device=device)
    assert torch.equal(functional.wait_tensor(FUNCTIONAL[name](given, group)), given)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda given, group: differentiable.all_gather(given, group)[0],
        lambda given, group: differentiable.all_reduce(given, group=group),
        lambda given, group: differentiable.all_to_all_single(torch.empty_like(given), given, group=group),
        lambda given, group: differentiable.reduce_scatter(torch.empty_like(given), [given], group=group),
        lambda given, group: functional.all_gather_tensor_autograd(given, 0, group),
        lambda given, group: functional.reduce_scatter_tensor_autograd(given, "sum", 0, group),
    ],
)
def test_gradients_go_through_unchanged(group: Group, call: Callable[..., torch.Tensor]) -> None:
    given = torch.arange(6.0, requires_grad=True)
    (call(given, group) * torch.arange(6.0)).sum().backward()
    assert given.grad is not None and torch.equal(given.grad, torch.arange(6.0))


def test_autograd_sees_nothing_of_a_copy(group: Group) -> None:
    """As with torch's groups: an output may be a view of several, and an input require a gradient."""
    whole, given = torch.zeros(12), torch.arange(6.0, requires_grad=True)
    td.all_gather_into_tensor(whole.split(6)[1], given, group)
    assert not whole.requires_grad and whole[6:].tolist() == given.tolist()
    leaf = torch.zeros(6, requires_grad=True)
    td.all_gather_into_tensor(leaf, given, group)
    assert torch.equal(leaf, given) and leaf.grad_fn is None


def test_another_shape_of_as_many_elements(group: Group) -> None:
    given = torch.arange(6.0)
    out = unwritten(3, 4, like=given)[:, :2]  # not contiguous
    td.all_gather_into_tensor(out, given, group)
    assert torch.equal(out.reshape(-1), given)


WRONG: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor, Group], Any], str]] = {
    "size": (lambda out, given, group: td.all_gather_into_tensor(out[:5], given, group), r"shape \(5,\)"),
    "size of parts": (lambda out, given, group: td.reduce_scatter_tensor(out[:3], given, group=group), r"\(3,\)"),
    "size in a list": (lambda out, given, group: td.all_gather([out[:5]], given, group), r"shape \(5,\)"),
    "size of a gathered": (lambda out, given, group: td.gather(given, [out[:5]], 1, group), r"shape \(5,\)"),
    "size of a scattered": (lambda out, given, group: td.scatter(out[:5], [given], 1, group), r"shape \(5,\)"),
    "size of an exchanged": (lambda out, given, group: td.all_to_all([out[:5]], [given], group), r"shape \(5,\)"),
    "count": (lambda out, given, group: td.all_gather([out, out], given, group), "1 input tensors for 2 output"),
    "count of inputs": (lambda out, given, group: td.reduce_scatter(out, [given] * 2, group=group), "2 input tensors"),
    "count of exchanged": (lambda out, given, group: td.all_to_all([out], [given] * 2, group), "2 input tensors"),
    "count of both": (lambda out, given, group: td.all_to_all([out] * 2, [given] * 2, group), "2 input tensors"),
    "count of lists": (
        lambda out, given, group: td.all_gather_coalesced([[out]] * 2, [given], group),
        "1 input tensors for 2 output",
    ),
    "rows": (lambda out, given, group: td.all_to_all_single(out, given, [3, 3], [6], group), r"\[3, 3\] for 6 rows"),
    "type": (lambda out, given, group: group._allgather_base(out.double(), given), "float64"),
    "root": (lambda out, given, group: td.broadcast(out, group=group, group_src=1), "invalid root rank 1"),
    "operation": (
        lambda out, given, group: td.all_reduce(out, td._make_nccl_premul_sum(2.0), group),
        "PREMUL_SUM",
    ),
    "send": (lambda out, given, group: group.send([given], 0, 0), "no other rank"),
    "recv": (lambda out, given, group: td.recv(out, group=group, group_src=0), "no other rank"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_before_anything_is_written(group: Group, name: str) -> None:
    call, words = WRONG[name]
    out = torch.full((6,), -1.0)
    with pytest.raises(RuntimeError, match=words):
        call(out, torch.arange(6.0), group)
    assert out.tolist() == [-1.0] * 6


def test_what_is_not_known_here_is_no_success(group: Group) -> None:
    """A collective of a newer torch, or one that C++ asks of the back-end, says so."""
    assert not set(COLLECTIVES) - KNOWN - {*MESSAGES} - {"use_pg_for_symm_mem_rendezvous", "new_window"}
    backend = group._get_backend(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="error_on_collective"):
        backend.allreduce([torch.ones(1)])


def test_a_monitored_barrier(group: Group) -> None:
    group.monitored_barrier()
    with suppress(ValueError):  # what older versions of torch say for all but gloo
        td.monitored_barrier(group)


def test_who_it_is(group: Group) -> None:
    assert (group.rank(), group.size(), td.get_rank(group), td.get_world_size(group)) == (0, 1, 0, 1)
    assert group.group_name == "alone" and td.get_process_group_ranks(group) == [1] and td.get_backend(group) == "fake"
