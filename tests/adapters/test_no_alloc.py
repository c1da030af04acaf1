"""Building without memory and without messages."""

from __future__ import annotations

import gc
import importlib
from types import SimpleNamespace

import deepspeed.comm.comm as ds_comm
import numpy as np
import pytest
import torch
from torch import nn

from ds_dynatrain.adapters.versions.deepspeed_versions import present
from ds_dynatrain.adapters.zero.no_alloc import LARGE, NoAllocMode, no_alloc, silent_communication

SMALL, BIG = 100, LARGE * 4


def test_large_copies_are_left_out_and_small_ones_done() -> None:
    small, big = torch.zeros(SMALL), torch.zeros(BIG)
    with NoAllocMode():
        small.copy_(torch.ones(SMALL))
        big.copy_(torch.ones(()).expand(BIG))
        small[:5].fill_(3.0)
        big.fill_(7.0)
        torch.ones(BIG)
    assert small.tolist()[:6] == [3.0] * 5 + [1.0]
    assert not big.any()
    big.fill_(7.0)
    assert big.eq(7).all(), "after it all is as before"


def test_zeros_are_zeros() -> None:
    with NoAllocMode():
        made = [
            torch.zeros(BIG),
            torch.zeros(4, BIG // 4, dtype=torch.bfloat16),
            torch.zeros_like(torch.empty(2, BIG)),
            torch.empty(3).new_zeros(BIG),
            torch.zeros(BIG, dtype=torch.int64),
            torch.zeros(SMALL),
        ]
    shapes = [(BIG,), (4, BIG // 4), (2, BIG), (BIG,), (BIG,), (SMALL,)]
    assert [tuple(each.shape) for each in made] == shapes
    types = [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.int64, torch.float32]
    assert [each.dtype for each in made] == types
    assert not any(each.any() for each in made)
    made[0].add_(1)
    assert made[0].eq(1).all(), "and can be written"


def test_clones_casts_and_concatenations_have_shape_and_type_only() -> None:
    with NoAllocMode():
        big = torch.zeros(BIG)
        clone, cast, flat = big.clone(), big.to(torch.bfloat16), torch.cat([big, torch.zeros(SMALL)])
        small = torch.cat([torch.ones(2), torch.ones(3)])
    assert clone.shape == big.shape and clone.data_ptr() != big.data_ptr()
    assert cast.dtype == torch.bfloat16 and cast.shape == big.shape
    assert flat.shape == (BIG + SMALL,) and small.tolist() == [1.0] * 5


def test_memory_is_reserved_and_not_touched() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    numel = 1 << 26
    with NoAllocMode():
        before = resident()
        made = [torch.zeros(numel), torch.zeros(numel).clone()]
        assert resident() - before < numel
    assert sum(each.numel() for each in made) == 2 * numel


def test_collectives_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(broadcast=lambda *_, **__: 1 / 0, get_world_size=lambda group=None: 7)
    monkeypatch.setattr(ds_comm, "cdb", backend)
    with pytest.raises(RuntimeError), silent_communication():
        handle = ds_comm.cdb.broadcast(torch.ones(1), 0)
        handle.wait()
        assert handle.is_completed() and ds_comm.cdb.get_world_size() == 7
        raise RuntimeError
    assert ds_comm.cdb is backend


def test_a_step_does_nothing() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with no_alloc(optimizer):
        optimizer.step()
    assert parameter.tolist() == [1.0, 1.0] and "step" not in optimizer.__dict__
    optimizer.step()
    assert parameter.tolist() == [0.0, 0.0]


def test_a_step_that_a_scheduler_has_wrapped_is_put_back() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrapped = optimizer.step
    with no_alloc(optimizer):
        assert optimizer.step is not wrapped
    assert optimizer.step is wrapped


def test_deepspeed_does_not_collect_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[bool] = []
    collector = importlib.import_module(present().collector)
    monkeypatch.setattr(gc, "collect", lambda *_: collected.append(True))
    with no_alloc(torch.optim.SGD([nn.Parameter(torch.ones(2))])):
        collector.gc.collect()
        assert not collected
    assert collector.gc is gc
    gc.collect()
    assert collected


def test_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ds_comm, "cdb", SimpleNamespace())
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(KeyError), no_alloc(optimizer):
        assert np.prod(torch.zeros(BIG).shape) == BIG
        raise KeyError
    assert torch.ones(BIG).clone().eq(1).all()
