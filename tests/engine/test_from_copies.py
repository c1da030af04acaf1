"""All state from copies that members keep of each other: real engines in every kind of layout, one of whose ranks died.

Whoever is dead plays a newcomer. Ranks that have copies and no place in the new world give what they have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as td

from ds_dynatrain.adapters.groups.worlds import WorldSpec, build_world, drop
from ds_dynatrain.buddies.taking import copy_of, header_of, take
from ds_dynatrain.engine.copies.from_copies import FromCopies, serve
from ds_dynatrain.engine.copies.kept import Kept, Room
from ds_dynatrain.membership.session import Session
from ds_dynatrain.membership.survival import Survivor, whole_copies
from ds_dynatrain.membership.whole import Had, WholeCopies
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.reshard.restoration import Goal, Restoration, let_go
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, oracle
from tests.engine.axis_walks import Subject
from tests.engine.pool import RankPool
from tests.engine.subjects import SUBJECTS
from tests.engine.transitions import layout

STEPS, MORE = 2, 2
GENERATION = 9
KEY = f"restore/{GENERATION}/copies"


def kept_by(engine: Any, dead: int) -> tuple[Kept, WholeCopies | None]:
    """On a working rank: the copies that it has, its own and, next to the dead one, that one's; which make a whole."""
    parts = engine._parts
    taken = take(parts, Room(), everything=parts.layout.zero_stage == 0)
    mine, size = taken.copy(), parts.layout.world_size
    told: list[Any] = [None] * size
    td.all_gather_object(told, (header_of(mine), bytearray(taken.memory.numpy()), bool(taken.frozen)))
    kept, had = Kept(), {rank: (rank, dead) if rank == (dead + 1) % size else (rank,) for rank in range(size)}
    kept.begin(mine.mark, 1)
    for rank in had[parts.rank] if parts.rank != dead else ():
        header, memory, _ = told[rank]
        kept.add(copy_of(header, taken.memory.new_tensor(memory)))
    kept.frozen, kept.frozen_of = taken.frozen, (parts.layout, parts.rank)
    survivors = {
        str(rank): Survivor(
            parts.members[rank],
            rank,
            parts.generation,
            parts.global_steps,
            True,
            True,
            parts.layout,
            tuple(Had(mine.mark, each, each == rank) for each in had[rank]),
            (parts.layout, rank) if told[rank][2] else None,
        )
        for rank in range(size)
        if rank != dead
    }
    return kept, next(iter(whole_copies([survivors])), None)


def case(find: Callable[[], Subject], dtype: str, at: Layout, target: Layout, dead: int) -> Any:
    """(state when copies were taken, losses of steps after that; state once it is restored, losses of the same steps)
    of a rank, as far as it worked."""
    subject = find()
    with axis_walks.started(subject, dtype, at) as made:
        engine, batches, kept = made.engine, iter(made.loader), Kept()
        before: tuple[Any, list[float]] | None = None
        parts, whole = engine._parts, None
        control, old = parts.control, parts.world
        session = Session(control, "test", parts.members, "a test", is_patient=True)
        if not engine.idle:
            for _ in range(STEPS):
                subject.step(engine, next(batches))
            kept, whole = kept_by(engine, dead)
            if parts.rank == 0 and whole is not None:
                session.say("whole", to_record(whole))
            before = oracle.gather(engine, subject.places), [subject.step(engine, next(batches)) for _ in range(MORE)]
        whole = from_record(WholeCopies, session.said_by(session.members[0], "whole", "a test"))
        mine, members = control.member, tuple(range(4 - target.world_size, 4))
        after, seconds, ties = None, control.timeout_seconds, parts.vps.ties(target)
        if mine in members or mine in whole.members:
            spec = WorldSpec(GENERATION, mine, members, whole.members, target, ties)
            world = build_world(control.store, spec, seconds)
            world.connect(seconds)
            goal = Goal(target, members, world, KEY, f"{KEY}/record")
            let_go(parts)
            if mine in members:
                source = partial(FromCopies, parts, goal, whole, kept)
                Restoration(parts, goal, source, "copies", None).run()
                control.teardowns.add(world.retire_transfer())
            else:
                serve(parts, goal, whole, kept)
                control.teardowns.add(drop(world))
        if old is not None:
            control.teardowns.add(drop(old))
        if mine in members:
            assert engine.global_steps == STEPS
            after = oracle.gather(engine, subject.places), [subject.step(engine, next(batches)) for _ in range(MORE)]
        else:
            parts.launch.install()
            parts.world = None
        return before, after
    return None, None


FULL = pytest.mark.full
CASES = [
    ("module", "fp32", "d3z1", "d3z1", 1),
    ("module", "bf16", "d3z3", "d2z2", 0),
    pytest.param("module", "bf16", "d4z2", "d4z2", 3, marks=FULL),
    pytest.param("module", "fp32", "d4z3", "d4z3", 2, marks=FULL),
    pytest.param("module", "fp16", "d2z2", "d4z1", 1, marks=FULL),
    pytest.param("module", "bf16 in fp32", "d4z1", "d3z1", 0, marks=FULL),
    pytest.param("module", "bf16", "d4z1", "d1z0", 0, marks=FULL),
    pytest.param("module", "bf16", "d3z0", "d3z0", 1, marks=FULL),  # beside another engine with single holders
    pytest.param("module", "fp32", "d3z0", "d2z1", 0, marks=FULL),
    pytest.param("PipelineModule", "fp32", "p2d2z0", "p2d2z0", 2, marks=FULL),
    pytest.param("AutoTP", "fp32", "d2t2z0", "d2t2z0", 1, marks=FULL),
    pytest.param("PipelineModule", "fp32", "p2d2z1", "p2d2z1", 2, marks=FULL),
    pytest.param("PipelineModule", "bf16", "p4z1", "d4z1", 1, marks=FULL),
    pytest.param("AutoTP", "fp32", "d2t2z1", "d2t2z1", 1, marks=FULL),
    pytest.param("AutoEP", "fp32", "d4e2z1", "d4e2z1", 1, marks=FULL),
    pytest.param("Ulysses", "fp32", "d2s2z1", "d2s2z1", 3, marks=FULL),
]


@pytest.mark.parametrize(("kind", "dtype", "at", "target", "dead"), CASES)
def test_all_is_as_when_the_copies_were_taken(
    pool: RankPool, kind: str, dtype: str, at: str, target: str, dead: int
) -> None:
    """Every element; and where the world is of the same size, what follows has the same losses."""
    layouts = {"at": layout(at), "target": layout(target)}
    ranks = pool.run(case, find=SUBJECTS[kind], dtype=dtype, **layouts, dead=dead, seconds=120)
    state, _ = ranks[0][0]
    restored = [after for _, after in ranks if after is not None]
    assert len(restored) == layouts["target"].world_size
    for mine, _ in restored:
        assert oracle.differences(state, mine) == []
    if at == target:
        losses = [sorted(found[1] for found in side) for side in ([b for b, _ in ranks if b], restored)]
        assert losses[0] == losses[1]
