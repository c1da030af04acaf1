"""Members that stand in for others: plans between stages, with weights read from cast masters, over real threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch

from ds_dynatrain.errors import LayoutError, MemberMissing
from ds_dynatrain.plan import SwitchPlan, plan_switch, standing_in
from ds_dynatrain.space import FROZEN, MASTER, WEIGHT, Layout, VirtualParameterSpace
from ds_dynatrain.transfer import Buffers, execute_standing_in
from tests.transfer.hub import Hub
from tests.transfer.states import buffers_of, differences, dtype_of, logical_state, space

BUDGET = 64 * 1024
GROUPS = (0, 1)
WORLDS = [Layout(zero_stage=stage, data=data) for stage, data in ((1, 3), (2, 2), (3, 4))]
ABSENT = 1000


@dataclass
class Scene:
    """A source of which some members are not there. holders: rank -> who has what it held."""

    source: Layout
    holders: tuple[int, ...]
    target: Layout
    members: tuple[int, ...]
    weight: int = 2

    @property
    def named(self) -> tuple[int, ...]:
        """Who holds each rank in the plan: the first of several ranks of one holder is its own."""
        first = [rank for rank, one in enumerate(self.holders) if one not in self.holders[:rank]]
        return tuple(one if rank in first else ABSENT + rank for rank, one in enumerate(self.holders))

    @property
    def stand_ins(self) -> dict[int, int]:
        return {name: one for name, one in zip(self.named, self.holders, strict=True) if name != one}

    @property
    def all(self) -> list[int]:
        return sorted({*self.holders, *self.members})


def plans_of(scene: Scene) -> list[SwitchPlan]:
    """State of what is trained, of which weights are cast from masters; and frozen weights, dealt as by stage 3."""
    vps = space(scene.source, scene.named, scene.weight)
    to = scene.target, scene.members
    trained, frozen = vps.with_groups(WEIGHT, GROUPS), vps.with_groups(WEIGHT, [FROZEN])
    as_stage_3 = frozen.with_layout(scene.source.replace(zero_stage=3), scene.named)
    return [
        plan_switch(trained, *to, (WEIGHT, MASTER, "exp_avg", "exp_avg_sq"), {WEIGHT: MASTER}),
        plan_switch(as_stage_3, *to, (WEIGHT,)),
    ]


def held_by(plan: SwitchPlan, rank: int, state: dict[str, torch.Tensor]) -> Buffers:
    """What a rank of the source held; trained weights are cast."""
    sides = plan.sides
    found = {key: held for key, held in buffers_of(sides.vps, sides.vps.layout, rank, state).items()}
    if not sides.held_as:
        return found
    cast = {
        (WEIGHT, name): held.to(dtype_of(sides.vps.kind(WEIGHT)))
        for (kind, name), held in found.items()
        if kind == MASTER
    }
    return {key: held for key, held in found.items() if key[0] != WEIGHT} | cast


def play(scene: Scene, missing: int | None = None) -> list[str]:
    """What is wrong afterwards."""
    plans = plans_of(scene)
    vps: VirtualParameterSpace = space(scene.source, scene.named, scene.weight)
    state, hub, errors = logical_state(vps), Hub(), list[BaseException]()
    targets = {one: buffers_of(vps, scene.target, rank, None) for rank, one in enumerate(scene.members)}

    def run(one: int) -> None:
        played = [name for name, by in scene.stand_ins.items() if by == one]
        mine = [*played, *([one] if one in scene.named else [])]
        try:
            for plan in plans:
                sources = {name: held_by(plan, scene.named.index(name), state) for name in mine}
                before = {key: held.clone() for name in mine for key, held in sources[name].items()}
                execute_standing_in(
                    standing_in(plan, one, played),
                    sources,
                    targets.get(one, {}),
                    hub.transport(one),
                    scene.stand_ins,
                    2.0 if missing is not None else 60.0,
                    BUDGET,
                )
                after = {key: held for name in mine for key, held in sources[name].items()}
                assert all(torch.equal(held, after[key]) for key, held in before.items())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in scene.all if one != missing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    wrong = []
    for rank, one in enumerate(scene.members):
        wrong += differences(vps, scene.target, rank, state, targets[one])
    return wrong


@pytest.mark.parametrize("weight", [4, 2])
@pytest.mark.parametrize("source", WORLDS, ids=str)
def test_one_is_absent(source: Layout, weight: int) -> None:
    """A newcomer takes its place, or the others stay alone, at any stage."""
    for stage in range(4):
        dead = stage % source.data
        buddy = (dead + 1) % source.data
        holders = tuple(10 + (buddy if rank == dead else rank) for rank in range(source.data))
        replaced = tuple(99 if rank == dead else 10 + rank for rank in range(source.data))
        members = replaced if stage % 2 else tuple(sorted(set(holders)))
        target = Layout(zero_stage=stage, data=len(members))
        assert play(Scene(source, holders, target, members, weight)) == []


def test_one_has_all_and_others_take_it() -> None:
    """The holder of every rank is in the target, or is not."""
    source = Layout(zero_stage=2, data=4)
    for members in ((7, 8, 9), (8, 9)):
        target = Layout(zero_stage=1, data=len(members))
        assert play(Scene(source, (7, 7, 7, 7), target, members)) == []


def test_several_stand_in_for_several() -> None:
    """Between two processes there are messages of several pairs of members at once."""
    source = Layout(zero_stage=3, data=6)
    target = Layout(zero_stage=3, data=4)
    assert play(Scene(source, (1, 1, 2, 2, 3, 1), target, (3, 2, 1, 4))) == []


def test_a_member_that_does_not_come_is_named() -> None:
    source = Layout(zero_stage=1, data=3)
    with pytest.raises(MemberMissing):
        play(Scene(source, (1, 2, 2), source, (1, 2, 3)), missing=2)


def test_nobody_stands_in_at_the_target() -> None:
    layout = Layout(zero_stage=1, data=2)
    plan = plan_switch(space(layout, (1, 2)), layout, (1, 2))
    with pytest.raises(LayoutError, match="member 2 is in the target"):
        standing_in(plan, 1, [2])
