"""Values as JSON and tensors, random streams, and the checks that need only arithmetic."""

from __future__ import annotations

import collections
import decimal
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from torch import nn

from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes
from ds_dynatrain.errors import ConfigError, SwitchRefused, TransferError
from ds_dynatrain.reshard import feasible, streams
from ds_dynatrain.reshard.encoding import blank_tensors, decode, encode, fingerprint
from ds_dynatrain.space import Layout


def through_the_wire(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    record = json.loads(json.dumps(encode(value, tensors)))
    blank = blank_tensors(record)
    assert [(each.dtype, each.shape) for each in blank] == [(each.dtype, each.shape) for each in tensors]
    for there, here in zip(blank, tensors, strict=True):
        there.copy_(here)
    return decode(record, blank)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -7,
        1e-320,
        0.1,
        "ä\n",
        [],
        {},
        (),
        [1, [2, (3, {"a": None})]],
        {"a": {"b": (1, 2)}},
        {1: "one", "two": 2, (3, 4): [5]},
        {"__tensor__": 0, "plain": 1},
        {"__items__": [[1, 2]]},
        b"\x00\xff",
        10**40,
    ],
)
def test_plain_values_come_back_equal(value: Any) -> None:
    found = through_the_wire(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
def test_tensors_come_back_with_type_and_shape(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (2, 3)):
        tensor = torch.ones(shape, dtype=dtype)
        found = through_the_wire({"x": [tensor]})["x"][0]
        assert found.dtype == dtype and found.shape == tensor.shape and torch.equal(found, tensor)


def test_not_contiguous_and_shared_tensors() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(through_the_wire([tensor, tensor])[1], tensor)


@pytest.mark.parametrize("value", [np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2], np.zeros((0, 2)), np.array(3.5)])
def test_arrays(value: Any) -> None:
    found = through_the_wire(value)
    assert isinstance(found, np.ndarray) and found.dtype == value.dtype and np.array_equal(found, value)


@pytest.mark.parametrize("value", [np.float32(0.1), np.int64(5), np.bool_(True), np.float64(2.5)])
def test_numpy_numbers(value: Any) -> None:
    found = through_the_wire(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
def test_special_floats(value: float) -> None:
    assert str(through_the_wire(value)) == str(value)


class Hostile:
    """Would run code if it were pickled."""

    def __reduce__(self) -> Any:
        raise AssertionError("pickled")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [Hostile()]}, r"a\[0\] is a Hostile"),
        ({"ema": {"decay": decimal.Decimal(1)}}, r"ema\.decay is a Decimal"),
        ({1: {2, 3}}, r"\[1\] is a set"),
        (1 + 2j, "value is a complex"),
        (lambda: None, "value is a function"),
        (collections.deque([1]), "value is a deque"),
    ],
)
def test_other_types_are_refused_by_path_and_name(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        encode(value, [])


class Number(int):
    """A subclass: would come back as something else."""


def test_a_subclass_of_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="Number"):
        encode(Number(3), [])


@pytest.mark.parametrize("name", ["load", "nn", "__class__", "nothing", "Tensor"])
def test_a_name_that_is_no_tensor_type_is_refused(name: str) -> None:
    with pytest.raises(TransferError, match="torch does not know"):
        blank_tensors({"__tensor__": 0, "dtype": name, "shape": [1]})


def test_fingerprints() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": (1, None)}
    assert fingerprint(one) == fingerprint({"b": (1, None), "a": torch.tensor([1.0, 2.0])}), "the order of keys is none"
    for other in (
        {**one, "b": [1, None]},
        {**one, "a": torch.tensor([1.0, 2.0000002])},
        {**one, "a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {**one, "a": torch.tensor([[1.0, 2.0]])},
        {**one, "b": (1, 0)},
        {**one, "b": (1.0, None)},
    ):
        assert fingerprint(one) != fingerprint(other)
    assert fingerprint(torch.tensor(0.0)) != fingerprint(torch.tensor(-0.0))
    assert fingerprint(torch.tensor([1, 2], dtype=torch.bfloat16)) == fingerprint(torch.tensor([1.0, 2.0]).bfloat16())


# ---- streams --------------------------------------------------------------------------------------------------------


def draw() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), torch.randn(20).tolist(), np.random.normal(), random.random(), random.gauss(0, 1)


def test_restored_streams_give_the_same_numbers() -> None:
    draw()
    before = streams.capture()
    travelled = json.loads(json.dumps(before))
    first = draw()
    assert streams.capture() != before
    streams.restore(travelled)
    assert streams.capture() == before and draw() == first


def test_new_streams_depend_on_all_that_they_are_seeded_from() -> None:
    before = streams.capture()
    wanted = ((1, 2, 3), (1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4))
    made = [streams.seeded(seed, {"data": index, "tensor": 0}, generation) for seed, index, generation in wanted]
    stages = [streams.seeded(1, {"data": 2, "pipe": stage, "tensor": 0}, 3) for stage in (0, 1, 2)]
    assert streams.capture() == before
    assert made[0] == made[1] == stages[0] and len({json.dumps(each) for each in stages}) == 3
    for name in ("torch", "numpy", "python"):
        assert len({json.dumps(each[name]) for each in made}) == 4


@contextmanager
def tracked() -> Iterator[None]:
    """Inside the block DeepSpeed's tracker keeps a stream of this process."""
    tracker = get_cuda_rng_tracker()
    try:
        tracker.add("model-parallel-rng", 5)
        yield
    finally:
        tracker.reset()


def test_new_tensor_ranks_draw_alike_but_from_the_tracker() -> None:
    with tracked():
        base = streams.capture()
        wider = Layout(zero_stage=1, tensor=3)
        fork, other = (streams.continued(PRESENT, wider, rank, 1, 3, lambda _: base) for rank in (1, 2))
        new = [streams.seeded(1, {"data": 4, "tensor": tensor}, 3) for tensor in (0, 1)]
    for one, another in ((base, fork), (fork, other), new):
        assert one != another and one["further"].keys() == another["further"].keys()
        assert {**one, "further": {}} == {**another, "further": {}}


def test_places_that_live_on_keep_their_streams() -> None:
    source = Layout(zero_stage=1, data=2, tensor=2)
    rows = {
        "data=4 tensor=2": [0, 1, 2, 3, None, None, None, None],
        "data=3": [0, 2, None],
        "tensor=4": [0, 1, 0, 0],
        "data=1 sequence=2 tensor=2": [0, 1, 0, 1],
        "pipe=2 data=2": [0, 2, None, None],
    }
    for text, origins in rows.items():
        target = Layout(zero_stage=1, **{name: int(size) for name, size in (part.split("=") for part in text.split())})
        assert [streams.origin(source, target, rank) for rank in range(target.world_size)] == origins, text
    four, posted = Layout(zero_stage=1, tensor=4), streams.capture()
    found = [streams.continued(source, four, rank, 1, 3, lambda _: posted) for rank in range(4)]
    assert [each is posted for each in found] == [True, True, False, False]


# ---- feasible -------------------------------------------------------------------------------------------------------

PRESENT = Layout(data=2, zero_stage=1)


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        (None, {"data": 0}, "data=0 is below 1"),
        (None, {"zero_stage": 7}, "zero_stage=7 is no ZeRO stage"),
        (None, {"data": 2.5}, "data=2.5 is not a whole number"),
        (None, {"data": True}, "data=True is not a whole number"),
        (None, {"date": 2}, "no 'date'"),
        (None, {}, "no layout was given"),
        (PRESENT, {"data": 2}, "both .* and changes to the present layout"),
    ],
)
def test_layouts_that_do_not_exist(layout: Layout | None, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SwitchRefused, match=words):
        feasible.target_layout(PRESENT, layout, changes)


@pytest.mark.parametrize("value", ["x", {"data": 2}, 3, (2, 1)])
def test_a_layout_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(SwitchRefused, match="Layout"):
        feasible.target_layout(PRESENT, value, {})


def test_target_layout() -> None:
    assert feasible.target_layout(PRESENT, None, {"data": 4}) == Layout(data=4, zero_stage=1)
    assert feasible.target_layout(PRESENT, Layout(data=1, zero_stage=3), {}) == Layout(data=1, zero_stage=3)


def test_too_few_processes() -> None:
    feasible.check_size(Layout(data=4, zero_stage=1), 4)
    with pytest.raises(SwitchRefused, match=r"needs 5 members and this launch has 4 processes; nearest: .*data=4"):
        feasible.check_size(Layout(data=5, zero_stage=1), 4)


def test_more_ranks_than_samples() -> None:
    with pytest.raises(SwitchRefused, match=r"data=4 ranks share a train_batch_size of 3: 1 .*nearest: .*data=3"):
        feasible.check_batch(Layout(data=4, zero_stage=1), BatchSizes(3, 3), nn.Linear(1, 1))


def test_batch_norm_with_uneven_micro_batches() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for data in (1, 2, 4):
        feasible.check_batch(Layout(data=data, zero_stage=1), BatchSizes(8, 4), model)
    with pytest.raises(SwitchRefused, match=r"size 8 over data=3 .*'1' is a BatchNorm.* use a train_batch_size of \d+"):
        feasible.check_batch(Layout(data=3, zero_stage=1), BatchSizes(8, 4), model)
    feasible.check_batch(Layout(data=3, zero_stage=1), BatchSizes(8, 4), nn.Linear(2, 2))


def test_memory_counts_all_members_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feasible, "available_bytes", lambda: 1000)
    nodes = {0: "a", 1: "a", 2: "b"}

    def check(member: int, *needs: int) -> None:
        feasible.check_memory(member, {(other, "cpu"): need for other, need in enumerate(needs)}, nodes)

    check(0, 500, 500, 900)
    check(2, 900, 900, 900)
    with pytest.raises(SwitchRefused, match=r"node 'a' need 1001 bytes .*member 1 500.* 1000 are available"):
        check(1, 501, 500)


def test_memory_of_a_device_is_its_members_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feasible, "available_bytes", lambda: 1000)
    monkeypatch.setattr(feasible, "free_bytes", lambda: 700)
    nodes = {0: "a", 1: "a"}
    feasible.check_memory(0, {(0, "cuda"): 700, (0, "cpu"): 400, (1, "cuda"): 900, (1, "cpu"): 600}, nodes)
    with pytest.raises(SwitchRefused, match=r"member 1 needs 900 bytes on cuda .* 700 are free"):
        feasible.check_memory(1, {(0, "cuda"): 700, (1, "cuda"): 900}, nodes)


def test_available_bytes_are_those_of_this_system() -> None:
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert 1 << 20 < feasible.available_bytes() <= total
