"""The policies that are compared: one function for each, with the rule that it implements and the source of that rule.

If a source leaves something open, the assumption here favours its policy. docs/simulate.md lists these assumptions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.simulate.simulated_job import SimulatedJob, SimulatedWorld

Kept = Literal["all", "step", "copies", "checkpoint", "saved"]
"""The state from which training continues, in this order: the present step, the last finished step, the newest complete
copies on buddies, the newest checkpoint, or a checkpoint that leaving members save now."""


@dataclass(frozen=True)
class Standing:
    """The situation after an event, as far as a policy knows it.

    held: the world whose members hold the newest state; None if no living member has it.
    ready: the members that can train.
    speeds: the speed of each member.
    seen: the speed of each member that the policy knows of; a slow-down is noticed only after some time.
    dead: the members of `held` that died since it was formed.
    leaving: the members of `held` that have been given notice and hand over their state.
    notice_seconds: the length of that notice.
    detection_seconds: the time until the others have noticed all losses.
    """

    held: SimulatedWorld | None
    ready: tuple[int, ...]
    speeds: Mapping[int, float]
    seen: Mapping[int, float]
    dead: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    notice_seconds: float = 0.0
    detection_seconds: float = 0.0

    @property
    def gone(self) -> frozenset[int]:
        """The members that have died or been given notice. A policy that ignores notices loses all of them."""
        return self.dead | self.leaving


@dataclass(frozen=True)
class Reaction:
    """The reaction of a policy to an event.

    world: the members that train from now on, and how; None if training waits.
    pause_seconds: the time until the members train, if the world is new.
    kept: the state from which the members continue.
    """

    world: SimulatedWorld | None
    pause_seconds: float = 0.0
    kept: Kept = "all"


Policy = Callable[[SimulatedJob, Standing], Reaction]


def with_buddies(job: SimulatedJob, now: Standing) -> Reaction:
    """Return the reaction of this library with buddies (docs/elastic.md, docs/buddies.md).

    Each change is a live switch to the fastest layout for the available members. Members with notice hand over their
    state. After a death, all go back to the newest complete set of copies or, if a member and its buddy have died, to
    the newest fallback checkpoint. A slow member gets less work once it has been noticed.
    """
    return _live(job, now, job.survives)


def our_checkpoint(job: SimulatedJob, now: Standing) -> Reaction:
    """Return the reaction of this library with `"buddies": "off"` and fallback checkpoints (docs/checkpoint.md).

    Changes are live as in `with_buddies`, but after any death the surviving processes go back to the newest checkpoint.
    """
    return _live(job, now, lambda held, gone: False)


def _live(job: SimulatedJob, now: Standing, has_copies: Callable[[SimulatedWorld, Collection[int]], bool]) -> Reaction:
    held = now.held
    stay = () if held is None else tuple(member for member in held.members if member in now.ready)
    found = job.best(dict.fromkeys((*stay, *now.ready)), now.seen)
    world = None if found is None else job.timed(found, now.speeds)
    if held is None:
        return Reaction(world, job.assumed.change_seconds + job.storage_seconds, "checkpoint")
    pause = now.detection_seconds + job.switch_seconds(held.layout, (world or held).layout)
    is_left_time = now.notice_seconds >= (pause if world else job.storage_seconds)
    gone = now.dead if is_left_time else now.gone
    if world is None and not stay:
        return Reaction(None, 0.0, "checkpoint" if gone else "saved")
    if gone and not has_copies(held, gone):
        return Reaction(world, pause + job.storage_seconds, "checkpoint")
    if not now.gone:
        staying = job.timed(held, now.speeds)
        gain = 0.0 if found is None else 1 - found.step_seconds / job.timed(held, now.seen).step_seconds
        if found is None or (gain < job.assumed.least_gain and {*found.members} <= {*stay}):
            return Reaction(staying)
    return Reaction(world, pause, "copies" if gone else "all")


def drop_replica(job: SimulatedJob, now: Standing) -> Reaction:
    """Return torchft's reaction: drop a replica that has lost a member, and average gradients over the other replicas.

    Source: torchft 0.3, `torchft/manager.py` (`WorldSizeMode.DYNAMIC`, `should_commit`). A replica is one index of the
    data axis, and holds the whole state. The current step is discarded. Each replica keeps its part of the batch, so a
    step with fewer replicas trains fewer samples. As soon as enough members are free, they form a replica, and get the
    state from another one while the others train.
    """
    layout, held = job.layout, now.held
    size = layout.world_size // layout.data
    units = _places(now, layout.data, size)
    alive = [unit for unit in units if unit]
    pace = np.ones((layout.pipe, layout.data, size // layout.pipe))
    for index, unit in enumerate(units):
        pace[:, index, :] = np.reshape([now.speeds[member] for member in unit] or [1.0] * size, (layout.pipe, -1))
    kept = held is not None and any(unit and not {*unit} & now.gone for unit in held.units)
    if len(alive) * size < job.least or not alive:
        return Reaction(None, 0.0, "step" if kept else "checkpoint")
    seconds, share = job.step(layout, pace.ravel().tolist()).seconds, len(alive) / layout.data
    return _regrouped(job, now, units, seconds, share, kept)


def peers_of_the_stage(job: SimulatedJob, now: Standing) -> Reaction:
    """Return ReCycle's reaction: data-parallel peers on the same stage take over a lost member's micro-batches.

    Source: Gandhi et al., ReCycle, SOSP 2024. Members of a stage hold the same state. The current step is repeated. The
    work that peers take over first fills the bubbles of the pipeline, which is assumed to be perfect here. A member
    that returns goes to the stage with the fewest members. If a stage has lost all its members, all start again from
    the newest checkpoint.
    """
    layout, held = job.layout, now.held
    size, data = layout.ranks_per_stage // layout.data, layout.data
    fresh = held is not None and any(
        all(not unit or {*unit} & now.gone for unit in held.units[stage * data : (stage + 1) * data])
        for stage in range(layout.pipe)
    )
    units = _places(now, layout.pipe * data, size, groups=layout.pipe, fresh=fresh)
    counts = [sum(map(bool, units[stage * data : (stage + 1) * data])) for stage in range(layout.pipe)]
    if sum(counts) * size < job.least or not all(counts):
        return Reaction(None, 0.0, "checkpoint" if fresh else "step")
    plain = np.reshape([min([now.speeds[m] for m in unit] or [np.inf]) for unit in units], (layout.pipe, data))
    slowest = np.broadcast_to(plain.min(axis=1)[:, None, None], (layout.pipe, data, size))
    whole = job.step(layout, slowest.ravel().tolist())
    fewer = job.step(layout, (slowest * (np.array(counts) / data)[:, None, None]).ravel().tolist())
    busiest = max(fewer.busy) + whole.reduce_seconds + whole.gather_seconds + whole.beside_seconds
    return _regrouped(job, now, units, max(whole.seconds, busiest), 1.0, held is not None and not fresh)


def _places(now: Standing, count: int, size: int, groups: int = 1, fresh: bool = False) -> tuple[tuple[int, ...], ...]:
    """Return the members at each place (a replica, or a part of one stage). A place keeps its members if all are alive;
    free members fill the other places.

    size: the number of members of a place. A place with fewer members is empty.
    groups: the number of groups of places. The group with the fewest members is filled first.
    fresh: whether to assign all members again, without regard to their present places.
    """
    ready, before = {*now.ready}, () if now.held is None or fresh else now.held.units
    units = [unit if {*unit} <= ready else () for unit in before] or [()] * count
    free = sorted(ready - {member for unit in units for member in unit})
    width = count // groups
    while len(free) >= size and () in units:
        filled = [sum(map(bool, units[group * width : (group + 1) * width])) for group in range(groups)]
        empty = [place for place, unit in enumerate(units) if not unit]
        units[min(empty, key=lambda place: filled[place // width])] = tuple(free[:size])
        free = free[size:]
    return tuple(units)


def _regrouped(
    job: SimulatedJob, now: Standing, units: tuple[tuple[int, ...], ...], seconds: float, share: float, kept: bool
) -> Reaction:
    """Return the reaction of a policy that keeps members together in replicas or in parts of stages.

    units: the members of each replica or part.
    seconds: the time of a step.
    share: the part of a global batch that a step trains.
    kept: whether the living members together hold the whole state.
    """
    members = tuple(member for unit in units for member in unit)
    world = SimulatedWorld(members, job.layout, Deal.of(job.profile, job.layout), seconds, units, share)
    if not kept:
        return Reaction(world, _from_storage(job, now), "checkpoint")
    return Reaction(world, now.detection_seconds + job.assumed.regroup_seconds, "step" if now.gone else "all")


def restart(job: SimulatedJob, now: Standing) -> Reaction:
    """Return the reaction of stock torchrun and DeepSpeed: end all processes, and let new ones load a checkpoint.

    Source: torch 2.13, `torch/distributed/elastic/agent/server/api.py` (a change of membership restarts all workers),
    and DeepSpeed's `save_checkpoint`, for which training waits. The data axis gets the largest size that divides the
    batch; other axes keep their sizes. Additional members wait, and cause no restart.
    """
    layout, held = job.layout, now.held
    size = layout.world_size // layout.data
    sizes = range(min(len(now.ready) // size, layout.data), 0, -1)
    data = next((each for each in sizes if job.profile.train_batch_size % each == 0), 0)
    if data * size < job.least or not data:
        return Reaction(None, 0.0, "checkpoint")
    shape = layout.replace(data=data)
    stay = () if held is None else tuple(member for member in held.members if member in now.ready)
    members = tuple(dict.fromkeys((*stay, *now.ready)))[: data * size]
    world = job.timed(SimulatedWorld(members, shape, Deal.of(job.profile, shape), 0.0), now.speeds)
    if held is not None and not now.gone and world.place == held.place:
        return Reaction(world)
    return Reaction(world, _from_storage(job, now), "checkpoint")


def _from_storage(job: SimulatedJob, now: Standing) -> float:
    """Return the number of seconds until new processes have been started and have read a checkpoint."""
    return now.detection_seconds + job.assumed.start_seconds + job.storage_seconds


@dataclass(frozen=True)
class Rival:
    """A policy and its name in tables.

    joins_at_once: whether members count as ready as soon as their processes start, because a join restarts all
        processes.
    saving_stops: whether training waits until a checkpoint is written.
    """

    title: str
    policy: Policy
    joins_at_once: bool = False
    saving_stops: bool = False


RIVALS = (
    Rival("this library, buddies", with_buddies),
    Rival("this library, checkpoints", our_checkpoint),
    Rival("drop the replica (torchft)", drop_replica),
    Rival("peers of the stage (ReCycle)", peers_of_the_stage),
    Rival("restart (DeepSpeed)", restart, joins_at_once=True, saving_stops=True),
)
