"""Updates from four trainer ranks to receiving ranks, without engines: geometry, proof, deltas, failures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as td

from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.errors import TransferError
from ds_dynatrain.weights.blocks import Move, check_coverage, moves_between, part_of
from ds_dynatrain.weights.receivers.group import Group
from ds_dynatrain.weights.update import Update, send
from tests.engine.pool import RankPool
from tests.weights import fakes


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def updates(
    address: str, steps: list[int], delta: bool = False, dtype: Any = torch.float32, **more: Any
) -> list[Update]:
    """One update of each step, over one object."""
    group = Group(address, timeout_seconds=20, **more)
    return [send(fakes.fake_source(step, dtype=dtype), group, delta=delta) for step in steps]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_element_arrives(pool: RankPool, size: int) -> None:
    with fakes.rollouts(size) as rollouts:
        records = pool.run(updates, address=rollouts.address, steps=[1, 2], bucket_bytes=300)
        rollouts.wait(2)
    for number, step in enumerate([1, 2]):
        expected = fakes.values(step)
        assert equal(rollouts.whole(number), expected)
        own = sum(each.nbytes for weights in rollouts.weights for each in weights[number].values())
        assert records[0][number].nbytes == own, "each rank gets its own bytes, and no others"
        assert records[0][number].digests == rollouts.updates[number].digests
    assert [each.version for each in rollouts.updates] == [1, 2]
    assert [each.step for each in rollouts.updates] == [1, 2]


WITHOUT_DEEPSPEED = """
import sys
sys.modules["deepspeed"] = None  # an import raises
from ds_dynatrain.weights.receivers import Folder, GroupReceiver
receiver = GroupReceiver("127.0.0.1:0")
print(receiver.address, flush=True)
print(receiver.update().digests)
"""


def test_receivers_need_no_deepspeed(pool: RankPool) -> None:
    command = [sys.executable, "-c", WITHOUT_DEEPSPEED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        record = pool.run(updates, address=process.stdout.readline().strip(), steps=[1])[0][0]
        assert process.stdout.readline().strip() == str(record.digests)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_deltas_are_exact(pool: RankPool, dtype: torch.dtype) -> None:
    with fakes.rollouts(2) as rollouts:
        records = pool.run(updates, address=rollouts.address, steps=[0, 1, 1, 2], delta=True, dtype=dtype)[0]
        rollouts.wait(4)
    assert [each.is_delta for each in records] == [False, True, True, True]
    for number, step in enumerate([0, 1, 1, 2]):
        assert equal(rollouts.whole(number), fakes.values(step, dtype))
    assert records[1].nbytes < records[0].nbytes and records[2].nbytes < 200


def test_another_object_sends_everything_first(pool: RankPool) -> None:
    with fakes.rollouts() as rollouts:
        for begin in (0, 2):
            records = pool.run(updates, address=rollouts.address, steps=[begin, begin + 1], delta=True)[0]
            assert [each.is_delta for each in records] == [False, True]
        rollouts.wait(4)
        assert [each.version for each in rollouts.updates] == [1, 2, 3, 4]
        assert equal(rollouts.whole(), fakes.values(3))


@pytest.fixture
def alone() -> Iterator[None]:
    """A trainer of one rank, in the test's own process."""
    td.init_process_group("gloo", store=td.HashStore(), rank=0, world_size=1)
    yield
    td.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_receiving_rank_that_starts_anew_takes_the_next_version() -> None:
    with fakes.rollouts(2) as rollouts:
        group = Group(rollouts.address, timeout_seconds=20)
        for step in (1, 2):
            assert send(fakes.fake_source(step), group).version == step
            rollouts.wait(step)
            rollouts.start_anew(1)
        assert send(fakes.fake_source(3), group).version == 3
        rollouts.wait(3)
        assert [each.version for each in rollouts.updates] == [1, 2, 3]
        assert equal(rollouts.whole(), fakes.values(3))


@pytest.mark.usefixtures("alone")
def test_tensors_may_change_from_update_to_update() -> None:
    first, second = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}, {"b": torch.ones(4, 3), "c": torch.arange(5.0)}
    sent = [first, first, second, {name: 2 * held for name, held in second.items()}, second, first]
    with fakes.rollouts(2, {}) as rollouts:
        group = Group(rollouts.address, timeout_seconds=20)
        for number, weights in enumerate(sent):
            send(fakes.FakeSource(weights), group)
            rollouts.wait(number + 1)
            assert equal(rollouts.whole(), weights), number
        assert [each.version for each in rollouts.updates] == [1, 2, 3, 4, 5, 6]


def incomplete(address: str, twice: bool) -> str:
    """One update whose source leaves out or repeats a run on rank 1, and a whole one."""
    group, source = Group(address, timeout_seconds=20), fakes.fake_source(1)
    runs = source.runs

    def wrong() -> Any:
        found = list(runs())
        yield from found if source.rank != 1 else [*found[:1], *found] if twice else found[1:]

    source.runs = wrong  # type: ignore[method-assign]
    with pytest.raises(TransferError) as error:
        send(source, group)
    assert send(fakes.fake_source(2), group).version == 2
    return str(error.value)


@pytest.mark.parametrize("twice", [False, True])
def test_an_update_that_is_not_whole_is_never_visible(pool: RankPool, twice: bool) -> None:
    with fakes.rollouts(2) as rollouts:
        said = pool.run(incomplete, address=rollouts.address, twice=twice)
        rollouts.wait(1)
    assert [each.version for each in rollouts.updates] == [2]
    assert equal(rollouts.whole(), fakes.values(2))
    assert "words" in said[0], said


def test_moves_cover_a_part_once() -> None:
    for dim in (None, 0, 1, 2):
        for size in (1, 2, 3, 4):
            shape = (5, 3, 4)
            for rank in range(size):
                part, local = part_of(shape, dim, rank, size)
                assert part.numel == torch.Size(local).numel()
                held = [Extent(0, 7, 0, 1), Extent(7, 3, 12, 5), Extent(10, 9, 12, 4), Extent(58, 2, 0, 1)]
                line, found = torch.arange(60), torch.full((part.numel,), -1)
                moves = []
                for extent in held:
                    mine = torch.cat(
                        [line[i : i + extent.length] for i in range(extent.start, 60, extent.step or 60)][
                            : extent.count
                        ]
                    )
                    for move in moves_between(extent, part):
                        moves.append(move)
                        for run in range(move.runs):
                            at, to = move.at + run * move.step, move.to + run * move.pace
                            found[to : to + move.length] = mine[at : at + move.length]
                check_coverage("x", part.numel, moves)
                expected = line.view(shape) if dim is None else line.view(shape).chunk(size, dim)[rank : rank + 1]
                expected = expected if dim is None else (expected[0] if expected else line[:0])  # type: ignore[assignment]
                assert torch.equal(found, expected.reshape(-1))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        ([Move(0, 0, 0, 0, 4, 1)], "elements \\[4, 10\\) are sent by no rank"),
        ([Move(0, 0, 0, 0, 6, 1), Move(0, 0, 5, 0, 5, 1)], "element 5 is sent twice"),
        ([Move(0, 0, 0, 0, 11, 1)], "lies outside"),
        ([Move(0, 0, -1, 0, 11, 1)], "lies outside"),
    ],
)
def test_coverage_names_the_element(moves: list[Move], words: str) -> None:
    with pytest.raises(TransferError, match=words):
        check_coverage("x", 10, moves)
