"""Rounds of copies between threads in place of members, and the places where a process keeps them."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ds_dynatrain.buddies.assignment import buddies_of, wards_of
from ds_dynatrain.buddies.shipping import Round, Ward
from ds_dynatrain.buddies.taking import UndigestedCopy, copy_of, header_of, nbytes_of, spread
from ds_dynatrain.engine.copies import kept as kept_module
from ds_dynatrain.engine.copies.copy import Copy
from ds_dynatrain.engine.copies.kept import Kept
from ds_dynatrain.errors import TransferError
from ds_dynatrain.membership.whole import Mark
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.reshard.encoding import encode
from ds_dynatrain.space import EXP_AVG, MASTER, BufferId, Layout

SECONDS = 20.0
MARK = Mark(3, "3.0", 0, 7, Layout(data=3, zero_stage=1))


@dataclass
class Wire:
    """What is under way between members. A send ends when it is taken, as gloo's does."""

    lines: dict[tuple[int, int, int], queue.Queue[Any]] = field(default_factory=dict)
    making: threading.Lock = field(default_factory=threading.Lock)

    def line(self, sender: int, receiver: int, tag: int) -> queue.Queue[Any]:
        """The one line of these two, whichever of them asks first."""
        with self.making:
            return self.lines.setdefault((sender, receiver, tag), queue.Queue())


@dataclass
class End:
    """One member's transport."""

    wire: Wire
    mine: int

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Sending:
        taken = threading.Event()
        self.wire.line(self.mine, member, tag).put((tensor.view(torch.uint8), taken))
        return Sending(taken)

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Receiving:
        return Receiving(tensor.view(torch.uint8), self.wire.line(member, self.mine, tag))


@dataclass
class Sending:
    taken: threading.Event

    def wait(self, deadline: float) -> None:
        assert self.taken.wait(SECONDS)


@dataclass
class Receiving:
    tensor: torch.Tensor
    line: queue.Queue[Any]

    def wait(self, deadline: float) -> None:
        values, taken = self.line.get(timeout=SECONDS)
        self.tensor.copy_(values)
        taken.set()


def copy(rank: int, mark: Mark = MARK, elements: int = 5) -> Copy:
    """One with two kinds, a module buffer of one element and one of none."""
    tensors: list[torch.Tensor] = []
    rest = encode({"buffers": {"mean": torch.tensor(1.5 + rank), "empty": torch.empty(0)}}, tensors)
    name = BufferId("group", 0)
    buffers = {(kind, name): torch.arange(elements) + 100.0 * rank for kind in (MASTER, EXP_AVG)}
    buffers[EXP_AVG, name] = buffers[EXP_AVG, name].to(torch.bfloat16)
    digests = {kind: np.array([rank, 1 << 63], np.uint64) for kind in (MASTER, EXP_AVG)}
    return Copy(mark, rank, buffers, {"rest": rest, "seed": 5}, tensors, digests, "ab")


class FakeTaken:
    """A `UndigestedCopy` of a copy that is there already."""

    def __init__(self, of: Copy, fails: bool = False) -> None:
        self._copy, self._fails = of, fails
        sources = [*of.buffers.values(), *of.tensors]
        shapes = [(source.dtype, tuple(source.shape)) for source in sources]
        self.memory = torch.zeros(nbytes_of(shapes), dtype=torch.uint8)
        for there, here in zip(spread(self.memory, shapes), sources, strict=True):
            there.copy_(here)

    def copy(self) -> Copy:
        if self._fails:
            raise TransferError("it does not fit")
        return self._copy


def rounds(
    nodes: str, taken: dict[int, Any], marks: dict[int, Mark] | None = None, copies: int = 1
) -> list[tuple[Round, Kept]]:
    """One round of members on these nodes, who have numbers other than their ranks. marks: of those who err."""
    wire, buddies, found = Wire(), buddies_of(nodes, copies), []
    for rank in range(len(nodes)):
        kept, wards = Kept(), wards_of(buddies, rank)
        _, rooms = kept.begin(MARK, len(wards))
        here = [Ward(10 + ward, ward, room) for ward, room in zip(wards, rooms, strict=True)]
        own = cast(UndigestedCopy | None, taken.get(rank))
        mark = (marks or {}).get(rank, MARK)
        others = [10 + buddy for buddy in buddies[rank]]
        found.append((Round(mark, own, others, here, End(wire, 10 + rank), kept), kept))
    threads = [threading.Thread(target=each.run, daemon=True) for each, _ in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert all(each.is_over for each, _ in found)
    return found


def same(one: Copy, other: Copy) -> bool:
    """Whether all of it is equal."""
    return (
        (one.mark, one.rank, one.said, one.said_digest) == (other.mark, other.rank, other.said, other.said_digest)
        and one.buffers.keys() == other.buffers.keys()
        and all(torch.equal(held, other.buffers[key]) for key, held in one.buffers.items())
        and all(torch.equal(held, other.tensors[number]) for number, held in enumerate(one.tensors))
        and all(np.array_equal(held, other.digests[kind]) for kind, held in one.digests.items())
    )


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("nodes", ["ab", "aa", "abc", "aab", "aaab", "aabb", "abcde"])
def test_each_copy_comes_to_its_buddies(nodes: str, copies: int) -> None:
    made = {rank: copy(rank) for rank in range(len(nodes))}
    found = rounds(nodes, {rank: FakeTaken(one) for rank, one in made.items()}, copies=copies)
    buddies = buddies_of(nodes, copies)
    for rank, (each, kept) in enumerate(found):
        assert each.is_whole and not each.error
        held = kept.copies()
        assert sorted(one.rank for one in held) == sorted({rank, *wards_of(buddies, rank)})
        assert all(same(one, made[one.rank]) for one in held)
        assert each.sent_bytes > FakeTaken(made[rank]).memory.numel()


@pytest.mark.parametrize("nodes", ["ab", "abc", "aaab"])
@pytest.mark.parametrize("how", ["none taken", "not described"])
def test_who_has_no_copy_holds_up_nobody(nodes: str, how: str) -> None:
    """The one and its buddy know that the round is not whole; all others' copies are where they belong."""
    taken = {rank: FakeTaken(copy(rank)) for rank in range(len(nodes))}
    if how == "none taken":
        del taken[1]
    else:
        taken[1] = FakeTaken(copy(1), fails=True)
    found, (buddy,) = rounds(nodes, taken), buddies_of(nodes)[1]
    for rank, (each, kept) in enumerate(found):
        assert each.is_whole == (rank not in (1, buddy)), each.error
        assert all(one.rank != 1 for one in kept.copies())
        assert rank == 1 or kept.find(MARK, rank) is not None


def test_a_buddy_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "available_bytes", lambda: 1000)
    taken = {0: FakeTaken(copy(0)), 1: FakeTaken(copy(1, elements=1000))}
    (one, kept), (other, others) = rounds("ab", taken)
    assert not one.is_whole and "no room for the copy of member 11: a copy takes 6" in one.error
    assert not other.is_whole and "member 10 has no room for the copy of this member" in other.error
    assert [held.rank for held in kept.copies()] == [0] and others.find(MARK, 1) is not None, "its own counts"


def test_a_copy_of_another_moment_is_not_taken() -> None:
    late = replace(MARK, step=6)
    (one, kept), (other, _) = rounds("ab", {0: FakeTaken(copy(0)), 1: FakeTaken(copy(1, late))}, {1: late})
    assert "member 11 sent a copy of rank 1 at step 6, and that of rank 1 at step 7 was due" in one.error
    assert "member 10 sent a copy of rank 0 at step 7" in other.error and kept.find(late, 1) is None


@pytest.mark.parametrize("header", [b"", b"{}", b"[]", b'{"rows": 5}', b"[" * 100000, b"\xff"])
def test_a_header_that_none_can_be(header: bytes) -> None:
    with pytest.raises(TransferError, match="the header of a copy cannot be read"):
        copy_of(header, torch.zeros(64, dtype=torch.uint8))


def test_a_header_for_other_bytes() -> None:
    with pytest.raises(TransferError, match=r"a copy of 192 bytes was announced, and 64 came"):
        copy_of(header_of(copy(0)), torch.zeros(64, dtype=torch.uint8))


# ---- places ----------------------------------------------------------------------------------------------------------


def step(kept: Kept, number: int, is_whole: bool = True) -> None:
    """One moment, as a round and the boundary after it make it."""
    mark = replace(MARK, step=number)
    kept.begin(mark, 1)
    kept.add(copy(0, mark))
    kept.add(copy(1, mark))
    if is_whole:
        kept.whole = mark


def steps(kept: Kept) -> list[int]:
    return sorted({one.mark.step for one in kept.copies()})


def test_what_is_whole_on_all_is_not_written_over() -> None:
    kept = Kept()
    step(kept, 1)
    step(kept, 2)
    assert steps(kept) == [1, 2] and kept.whole is not None and kept.whole.step == 2
    step(kept, 3, is_whole=False)
    assert steps(kept) == [2, 3]
    step(kept, 4, is_whole=False)
    assert steps(kept) == [2, 4], "the last that was whole on all stays"
    step(kept, 5)
    step(kept, 6)
    assert steps(kept) == [5, 6]


def test_a_moment_that_is_being_written_is_not_there() -> None:
    kept = Kept()
    step(kept, 1)
    mark = replace(MARK, step=2)
    kept.begin(mark, 1)
    kept.add(copy(1, mark))
    kept.add(copy(0, replace(MARK, step=9)))  # of a round that was given up
    assert [(one.mark.step, one.rank) for one in kept.copies()] == [(2, 1), (1, 0), (1, 1)]
    assert kept.find(mark, 0) is None and kept.find(mark, 1) is not None


def test_what_is_forgotten_does_not_come_back() -> None:
    kept = Kept()
    step(kept, 1)
    mark = replace(MARK, step=2)
    kept.begin(mark, 1)
    kept.forget()
    kept.add(copy(0, mark))
    assert not kept.copies() and kept.whole is None
    step(kept, 3)
    assert steps(kept) == [3]


def test_what_a_load_has_replaced_counts_no_more() -> None:
    """Also a copy from before it that comes after the word of it; a world that was formed since is newer."""
    kept = Kept()
    step(kept, 1)
    kept.void_before(replace(MARK, segment=f"{MARK.generation}.2").stretch)
    assert not kept.copies()
    step(kept, 9)
    assert not kept.copies()
    for generation, segment in ((MARK.generation, 2), (MARK.generation + 1, 0)):
        mark = replace(MARK, generation=generation, segment=f"{generation}.{segment}", step=segment)
        kept.begin(mark, 0)
        kept.add(copy(0, mark))
        kept.whole = mark
        assert kept.copies()[0].mark == mark
    kept.void_before(MARK.stretch)
    assert kept.since == (MARK.generation, 2), "an older word changes nothing"


def test_marks_are_ordered_by_age() -> None:
    """Of a later world, after a load of an older step, after parameters were registered anew."""
    ages = [
        MARK,
        replace(MARK, step=8),
        replace(MARK, registered=1, step=2),
        replace(MARK, segment="3.1", step=1),
        replace(MARK, segment="3.10", step=0),
        replace(MARK, generation=4, segment="4.0", step=0),
    ]
    assert sorted(ages, key=lambda mark: mark.moment) == ages
    assert [from_record(Mark, to_record(mark)) for mark in ages] == ages
