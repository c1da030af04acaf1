"""The check of the order in which ranks begin collectives finds what NCCL might hang at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as td

from tests.device import lab
from tests.device.one_order import check, circle

pytestmark = pytest.mark.on_device


def numbers() -> torch.Tensor:
    return torch.ones(3, device=lab.NAME)


def two_groups() -> tuple[Any, Any]:
    lab.begun()
    return td.new_group(backend=lab.BACKEND), td.new_group(backend=lab.BACKEND)


def test_one_order_of_two_groups() -> None:
    first, second = two_groups()
    for group in (first, second, first):
        td.all_reduce(numbers(), group=group)
    check()


def test_another_order_on_one_rank() -> None:
    """Gloo does it, where nobody waits for the first before beginning the second."""
    groups = two_groups()
    for work in [td.all_reduce(numbers(), group=each, async_op=True) for each in groups[:: 1 if td.get_rank() else -1]]:
        work.wait()
    with pytest.raises(AssertionError, match=r"orders: allreduce of 4 \(\w+\) #1 -> allreduce of 4 \(\w+\) #1"):
        check()


def test_a_round_of_messages() -> None:
    """Each sends to the next one: in a group call, or one after the other."""
    (group, other), rank, held = two_groups(), td.get_rank(), numbers()
    to, back = (rank + 1) % 4, (rank - 1) % 4
    both = [td.P2POp(td.isend, numbers(), to, group), td.P2POp(td.irecv, held, back, group)]
    for work in td.batch_isend_irecv(both):
        work.wait()
    check()
    pending = [td.isend(numbers(), to, group=other), td.irecv(held, back, group=other)]
    for one in pending:
        one.wait()
    with pytest.raises(AssertionError, match=r"0>1 of 4 \(\w+\) #1"):
        check()


def test_orders() -> None:
    assert circle([[["a"], ["b"]], [["a"], ["b"], ["c"]], [["c"]]]) == []
    assert circle([[["a", "b"]], [["b", "a"]]]) == [], "of one group call"
    assert set(circle([[["a"], ["b"]], [["b"], ["c"]], [["c"], ["a"]]])) == {"a", "b", "c"}
