"""Layers of a pipeline are frozen and trained again while it runs, between changes of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ds_dynatrain.errors import SwitchRefused
from tests.engine import freezing, jobs
from tests.engine.pipeline_walks import Path, Walked, job, layout, settings, whole
from tests.engine.pool import RankPool

CHANGES = ((), ("1.", "3.norm")), (("3.norm",), ("4.", "5.")), (("1.", "5."), ()), (("4.",), ("2.",))
"""At each place of a path after the first: what is trained from there on, and what is frozen."""
STEPS = 2


@dataclass
class Frozen(Walked):
    """And what was not as it should be after a registration."""

    wrong: list[str] = field(default_factory=list)


def freezing_walk(path: Path, name: str, dtype: str = "fp32", changes: Any = CHANGES) -> Frozen:
    """Go the path; at each place train, change what is trained, and train again."""
    found = Frozen()
    with job(settings(path[0], dtype), name) as made:
        engine = made.engine
        engine.boundary()
        while True:
            number = engine.generation - 1
            losses = [engine.train_batch().item() for _ in range(STEPS)]
            if number < len(changes):
                found.wrong += freezing.change(engine, *changes[number])
                losses += [engine.train_batch().item() for _ in range(STEPS)]
            found.losses[number] = losses
            if number + 1 == len(path):
                return found
            engine.switch(path[number + 1], at=engine.global_steps)
            engine.boundary()
            assert engine.last_switch.outcome == "committed", engine.last_switch.reason


def in_place(places: int, name: str, dtype: str = "fp32", changes: Any = CHANGES) -> Frozen:
    """The same in one process, without a switch."""
    found = Frozen()
    with job(settings(layout(1, 1), dtype), name) as made:
        for number in range(places):
            losses = [made.engine.train_batch().item() for _ in range(STEPS)]
            if number < len(changes):
                found.wrong += freezing.change(made.engine, *changes[number])
                losses += [made.engine.train_batch().item() for _ in range(STEPS)]
            found.losses[number] = losses
    return found


Changes = Sequence[tuple[Sequence[str], Sequence[str]]]
FIRST: Changes = ((), ("0.", "1.")), ((), ("2.", "3.")), (("2.",), ()), (("0.weight", "1.", "3."), ("4.", "5."))
"""Of layers that no stage shares: stages at the beginning have nothing to train, then the last one."""
TIED: Changes = ((), ("tied_modules.", "1.")), ((), ("2.", "3.")), (("tied_modules.words.weight", "3."), ())
FEW: Changes = ((), ("0.", "2.", "3.")), ((), ("4.",)), (("3.",), ("6.",)), (("0.weight", "6."), ())
BOUNDS = (0, 2, 6)
UNEVEN = [layout(4, 1, 1, (0, 1, 2, 4, 7)), layout(2, 2, 1, (0, 2, 7)), layout(4, 1, 1, (0, 1, 5, 6, 7)), layout(2, 1)]

WALKS: dict[str, tuple[str, str, Path, Changes]] = {
    "2 stages x 2, ZeRO 1": (
        "tied",
        "fp32",
        [layout(2, 2), layout(2, 2, 1, (0, 2, 7)), layout(4, 1), layout(1, 4), layout(2, 1)],
        CHANGES,
    ),
    "2 stages x 2, ZeRO 0": (
        "tied",
        "fp32",
        [layout(2, 2, 0), layout(4, 1, 0), layout(2, 2, 1), layout(1, 2, 0), layout(2, 2, 0)],
        CHANGES,
    ),
    "bf16": ("tied", "bf16 in fp32", [layout(2, 2), layout(4, 1), layout(2, 1)], CHANGES),
    "stages without anything to train, ZeRO 1": (
        "pruned",
        "fp32",
        [
            layout(2, 2, 1, BOUNDS),
            layout(2, 2, 1, (0, 4, 6)),
            layout(4, 1, 1, (0, 1, 2, 4, 6)),
            layout(2, 2, 1, BOUNDS),
        ],
        FIRST,
    ),
    "stages without anything to train, ZeRO 0": (
        "pruned",
        "fp32",
        [
            layout(4, 1, 0, (0, 1, 2, 4, 6)),
            layout(2, 2, 0, (0, 4, 6)),
            layout(1, 2, 0),
            layout(4, 1, 0, (0, 1, 4, 5, 6)),
        ],
        FIRST,
    ),
    "stages without anything to train, bf16": ("uneven", "bf16 in fp32", UNEVEN, FEW),
    "stages without anything to train, bf16 in bf16": ("uneven", "bf16", UNEVEN, FEW),
    "stages without anything to train, fp16": ("uneven", "fp16", UNEVEN, FEW),
    "a frozen tie": (
        "tied",
        "fp32",
        [layout(2, 2), layout(4, 1), layout(2, 2, 1, (0, 4, 7)), layout(1, 4)],
        TIED,
    ),
    "a frozen tie, bf16": (
        "tied",
        "bf16 in fp32",
        [layout(2, 2), layout(4, 1), layout(2, 2, 1, (0, 4, 7)), layout(1, 4)],
        TIED,
    ),
    "a stage of a function": ("uneven", "fp32", [*UNEVEN[:2], layout(4, 1, 0, (0, 1, 5, 6, 7)), layout(2, 1, 0)], FEW),
}


@pytest.mark.full
@pytest.mark.parametrize("title", WALKS)
def test_freezing_between_changes_of_stages(pool: RankPool, title: str) -> None:
    name, dtype, path, changes = WALKS[title]
    found = pool.run(freezing_walk, path=path, name=name, dtype=dtype, changes=changes, seconds=120)
    expected, *_ = pool.once(in_place, places=len(path), name=name, dtype=dtype, changes=changes)
    assert expected.wrong == [] and [rank.wrong for rank in found if rank] == [[]] * sum(map(bool, found))
    assert jobs.furthest(whole(found), whole([expected])) < (5e-7 if dtype == "fp32" else 2e-3)


def refused() -> list[str]:
    """What cannot be taken over in a pipeline is named on all members alike, and the job goes on."""
    said: list[str] = []
    with job(settings(layout(2, 2)), "tied") as made:
        engine = made.engine
        engine.train_batch()

        def ask(*groups: Any) -> None:
            with pytest.raises(SwitchRefused) as caught:
                engine.update_param_groups(*groups)
            said.append(str(caught.value))

        embedding = engine.module.tied_modules["words"]
        embedding.places.requires_grad_(True)
        ask([{"params": embedding.places, "like": 0}])
        embedding.places.requires_grad_(False)
        if engine.data_rank == 1:
            freezing.flip(engine.module, (), ("1.",))
        ask()
        freezing.flip(engine.module, ("1.",), ())
        ask([{"params": [*engine.module.forward_funcs[1].parameters()]}] if engine.grid.stage_id else [])
        assert not engine.update_param_groups()
        engine.train_batch()
    return said


def test_what_cannot_be_taken_over_is_named(pool: RankPool) -> None:
    for said in pool.run(refused):
        for sentence, words in zip(
            said,
            (
                "'tied_modules.words.places' is in a tied layer and not in its `tied_weight_attr`",
                "another member that holds '1.",
                "groups are given here and",
            ),
            strict=True,
        ):
            assert words in sentence


def groups_by_hand() -> list[tuple[int, float]]:
    """A group of what is trained anew, with a learning rate of its own; every stage names what it has of it."""
    with job(settings(layout(2, 2)), "tied") as made:
        engine = made.engine
        engine.train_batch()
        freezing.change(engine, (), ("2.", "5."))
        engine.train_batch()
        freezing.flip(engine.module, ("2.", "5."), ())
        mine = [held for name, held in engine.module.named_parameters() if name.startswith(("2.", "5."))]
        engine.update_param_groups([{"params": mine, "like": 0, "lr": 0.25}])
        engine.train_batch()
        engine.switch(layout(4, 1), at=engine.global_steps)
        engine.train_batch()
        assert engine.last_switch.outcome == "committed", engine.last_switch.reason
        groups = engine._parts.host.model_map.group_names
        return [
            (len(names), group["lr"]) for names, group in zip(groups, engine.basic_optimizer.param_groups, strict=True)
        ]


@pytest.mark.full
def test_a_group_that_stages_name_together(pool: RankPool) -> None:
    found = pool.run(groups_by_hand)
    assert all(rank == found[0] for rank in found) and [rate for _, rate in found[0]][-1] == 0.25
    assert found[0][-1][0] == 7 + 2, "of a block and of the norm"
