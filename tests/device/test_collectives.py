"""Collectives of the device: the numbers of gloo on the host, when the stream that asked has waited for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as td

from tests.device import lab

pytestmark = pytest.mark.on_device

Begun = tuple[list[torch.Tensor], Any]
"""What a collective fills, and its work."""
Put = Callable[[torch.Tensor], torch.Tensor]
"""Puts numbers on the device, or leaves them on the host."""


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + td.get_rank()))


def broadcast(put: Put, group: Any) -> Begun:
    held = put(numbers(5))
    return [held], td.broadcast(held, src=2, group=group, async_op=True)


def all_reduce(put: Put, group: Any) -> Begun:
    held = put(numbers(5))
    return [held], td.all_reduce(held, group=group, async_op=True)


def largest(put: Put, group: Any) -> Begun:
    held = put(numbers(5))
    return [held], td.all_reduce(held, op=td.ReduceOp.MAX, group=group, async_op=True)


def reduce(put: Put, group: Any) -> Begun:
    held = put(numbers(5))
    return [held] if td.get_rank() == 1 else [], td.reduce(held, dst=1, group=group, async_op=True)


def all_gather(put: Put, group: Any) -> Begun:
    held = [put(torch.zeros(3)) for _ in range(4)]
    return held, td.all_gather(held, put(numbers(3)), group=group, async_op=True)


def all_gather_into_tensor(put: Put, group: Any) -> Begun:
    held = put(torch.zeros(12))
    return [held], td.all_gather_into_tensor(held, put(numbers(3)), group=group, async_op=True)


def gather(put: Put, group: Any) -> Begun:
    held = [put(torch.zeros(3)) for _ in range(4)] if td.get_rank() == 1 else None
    return held or [], td.gather(put(numbers(3)), held, dst=1, group=group, async_op=True)


def scatter(put: Put, group: Any) -> Begun:
    held = put(torch.zeros(3))
    parts = [put(numbers(3, seed)) for seed in range(4)] if td.get_rank() == 1 else None
    return [held], td.scatter(held, parts, src=1, group=group, async_op=True)


def reduce_scatter(put: Put, group: Any) -> Begun:
    held = put(torch.zeros(3))
    parts = [put(numbers(3, seed)) for seed in range(4)]
    return [held], td.reduce_scatter(held, parts, group=group, async_op=True)


def reduce_scatter_tensor(put: Put, group: Any) -> Begun:
    held = put(torch.zeros(3))
    return [held], td.reduce_scatter_tensor(held, put(numbers(12)), group=group, async_op=True)


def all_to_all_single(put: Put, group: Any) -> Begun:
    held = put(torch.zeros(8))
    return [held], td.all_to_all_single(held, put(numbers(8)), group=group, async_op=True)


def ring(put: Put, group: Any) -> Begun:
    rank, held = td.get_rank(), put(torch.zeros(3))
    sends = td.P2POp(td.isend, put(numbers(3)), (rank + 1) % 4, group)
    receives = td.P2POp(td.irecv, held, (rank - 1) % 4, group)
    return [held], td.batch_isend_irecv([sends, receives])


def coalesced(put: Put, group: Any) -> Begun:
    held = [put(torch.zeros(4 * count)) for count in (1, 3)]
    device = None if held[0].is_cpu else held[0].device
    with td.distributed_c10d._coalescing_manager(group, device, async_ops=True) as manager:
        for one, count in zip(held, (1, 3), strict=True):
            td.all_gather_into_tensor(one, put(numbers(count)), group=group)
    return held, manager


COLLECTIVES: dict[str, Callable[[Put, Any], Begun]] = {
    function.__name__: function
    for function in (
        *(broadcast, all_reduce, largest, reduce, all_gather, all_gather_into_tensor, gather, scatter),
        *(reduce_scatter, reduce_scatter_tensor, all_to_all_single, ring, coalesced),
    )
}


@contextmanager
def group_of(backend: str) -> Iterator[Any]:
    """A group of all ranks."""
    group = td.new_group(backend=backend)
    try:
        yield group
    finally:
        td.destroy_process_group(group)


def on_device(values: torch.Tensor) -> torch.Tensor:
    made = values.to(lab.NAME)
    lab.synchronize()
    return made


def wait(work: Any) -> None:
    for one in work if isinstance(work, list) else [work]:
        one.wait()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_numbers_are_those_of_gloo(name: str) -> None:
    with group_of(f"cpu:gloo,{lab.NAME}:{lab.BACKEND}") as group:
        sides = []
        for put in (torch.clone, on_device):
            results, work = COLLECTIVES[name](put, group)
            wait(work)
            sides.append([result.cpu() for result in results])
        assert all(torch.equal(one, other) for one, other in zip(*sides, strict=True))


def test_means() -> None:
    """Which NCCL has, and gloo has not."""
    held, counts = on_device(torch.full((3,), float(td.get_rank()))), on_device(torch.tensor([td.get_rank()]))
    parts, part = on_device(torch.arange(4.0) * td.get_rank()), on_device(torch.zeros(1))
    for each in (held, counts):
        td.all_reduce(each, op=td.ReduceOp.AVG)
    td.reduce_scatter_tensor(part, parts, op=td.ReduceOp.AVG)
    assert (held.tolist(), counts.tolist(), part.tolist()) == ([1.5] * 3, [1], [1.5 * td.get_rank()])


def test_what_it_cannot_do_is_an_error_and_no_wait() -> None:
    held = on_device(torch.ones(3))
    with pytest.raises(RuntimeError, match="BAND"):
        td.all_reduce(held, op=td.ReduceOp.BAND)
        held.tolist()


def test_results_are_not_there_until_the_stream_waits() -> None:
    held = on_device(torch.ones(3))
    work = td.all_reduce(held, async_op=True)
    assert held.tolist() == [1, 1, 1]
    work.wait()
    assert held.tolist() == [4, 4, 4]


def test_wait_makes_one_stream_wait() -> None:
    held, stream = on_device(torch.ones(3)), lab.Stream()
    with lab.stream(stream):
        td.all_reduce(held)
    assert held.tolist() == [1, 1, 1]
    lab.current_stream().wait_stream(stream)
    assert held.tolist() == [4, 4, 4]


def test_objects_and_barriers() -> None:
    said: list[Any] = [None] * 4
    td.all_gather_object(said, {"rank": td.get_rank()})
    assert said == [{"rank": rank} for rank in range(4)]
    td.barrier()
    assert lab.waiting() == 0


def test_a_tensor_of_the_host_is_refused() -> None:
    with group_of(lab.BACKEND) as group:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            td.all_reduce(torch.ones(1), group=group)
