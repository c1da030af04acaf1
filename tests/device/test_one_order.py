"""The check of the order in which ranks begin collectives finds what NCCL might hang at."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as td

from tests.device import lab
from tests.device.one_order import check, circle
from tests.device.test_collectives import group_of
from tests.engine.pool import CaseFailed, RankPool

on_ranks = pytest.mark.on_device


def numbers() -> torch.Tensor:
    return torch.ones(3, device=lab.NAME)


@on_ranks
def test_one_order_of_two_groups() -> None:
    with group_of(lab.BACKEND) as first, group_of(lab.BACKEND) as second:
        for group in (first, second, first):
            td.all_reduce(numbers(), group=group)
        check()


def other_order_on_rank_0() -> None:
    """Gloo does it, where nobody waits for the first before beginning the second."""
    with group_of(lab.BACKEND) as first, group_of(lab.BACKEND) as second:
        groups = [first, second] if td.get_rank() else [second, first]
        for work in [td.all_reduce(numbers(), group=each, async_op=True) for each in groups]:
            work.wait()


@on_ranks
def test_another_order_on_one_rank() -> None:
    other_order_on_rank_0()
    with pytest.raises(AssertionError, match=r"orders: allreduce of 4 \(\w+\) #1 -> allreduce of 4 \(\w+\) #1"):
        check()


def test_every_case_is_looked_at(lab_pool: RankPool) -> None:
    with pytest.raises(CaseFailed, match="the ranks begin these in different orders"):
        lab_pool.run(other_order_on_rank_0)


@on_ranks
def test_a_round_of_messages() -> None:
    """Each sends to the next one: in a group call, or one after the other."""
    rank, held = td.get_rank(), numbers()
    to, back = (rank + 1) % 4, (rank - 1) % 4
    with group_of(lab.BACKEND) as group:
        both = [td.P2POp(td.isend, numbers(), to, group), td.P2POp(td.irecv, held, back, group)]
        for work in td.batch_isend_irecv(both):
            work.wait()
        check()
    with group_of(lab.BACKEND) as group:
        for one in [td.isend(numbers(), to, group=group), td.irecv(held, back, group=group)]:
            one.wait()
        with pytest.raises(AssertionError, match=r"0>1 of 4 \(\w+\) #1"):
            check()


def test_orders() -> None:
    assert circle([[["a"], ["b"]], [["a"], ["b"], ["c"]], [["c"]]]) == []
    assert circle([[["a", "b"]], [["b", "a"]]]) == [], "of one group call"
    assert set(circle([[["a"], ["b"]], [["b"], ["c"]], [["c"], ["a"]]])) == {"a", "b", "c"}
