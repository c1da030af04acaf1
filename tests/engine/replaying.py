"""Replicas on the ranks of a launch of fixed size: what elastic jobs begin at a boundary, put together by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.watched import GroupStatus
from ds_dynatrain.engine.buddies.copy import Copy
from ds_dynatrain.engine.buddies.kept import Room
from ds_dynatrain.engine.buddies.message import copy_of, header_of
from ds_dynatrain.engine.buddies.replay import Replay
from ds_dynatrain.engine.buddies.replica import Replica
from ds_dynatrain.engine.buddies.taking import take
from ds_dynatrain.transfer import GroupTransport


def begin(engine: Any) -> Replay:
    """Each rank keeps a replica of the next one, from the present moment on."""
    parts, size = engine._parts, engine.layout.world_size
    told = _told(engine)
    ward = (parts.rank + 1) % size
    copy = _read(told[ward])
    replica = Replica(parts, copy, parts.members[ward])
    transport = GroupTransport(td.group.WORLD, parts.members)
    buddy = parts.members[(parts.rank - 1) % size]
    replay = Replay(parts, own(engine).mark, buddy, [replica], transport, td.group.WORLD, GroupStatus())
    parts.buddies = SimpleNamespace(
        watched_step=replay.watched_step,
        finish_step=replay.finish,
        settle=lambda is_aborted: None,
    )
    return replay


def own(engine: Any) -> Copy:
    """The copy of this rank at present."""
    return take(engine._parts, Room()).copy()


def _told(engine: Any) -> list[Any]:
    mine = take(engine._parts, Room())
    told: list[Any] = [None] * engine.layout.world_size
    td.all_gather_object(told, (header_of(mine.copy()), mine.memory.numpy().tobytes()))
    return told


def _read(told: Any) -> Copy:
    header, memory = told
    return copy_of(
        header, torch.frombuffer(bytearray(memory), dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
    )


def _with_elements(copy: Copy) -> set[Any]:
    """The names of its buffers, less those of groups of which the rank has nothing."""
    return {key for key, held in copy.buffers.items() if len(held)}


def differences(engine: Any, replay: Replay) -> list[str]:
    """What of the ward's copy, as it would take it now, is not what this rank has of it."""
    ward = replay.replicas[0].rank
    theirs = _read(_told(engine)[ward])
    mine = next(copy for copy in replay.copies() if copy.rank == ward)
    found = [f"{key}" for key in _with_elements(theirs) ^ _with_elements(mine)]
    found += [
        f"{key}: {int((held != mine.buffers[key]).sum())} elements"
        for key, held in theirs.buffers.items()
        if key in mine.buffers and not _is_equal(held, mine.buffers[key])
    ]
    found += [f"{part} of the words" for part in theirs.said if theirs.said[part] != mine.said.get(part)]
    is_same = theirs.said_digest == mine.said_digest and theirs.mark == mine.mark
    return found if is_same else [*found, f"{theirs.mark} with {theirs.said_digest}"]


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, other than in padding, which may be anything."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
