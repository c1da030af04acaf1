"""The simulated job: how long a step takes in a world, and how long a switch, a copy and a checkpoint take.

Steps are predicted from the profile as in `balance`, and switches as in `ds-dynatrain plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ds_dynatrain.balance.choose import FittingLayout, Members, Search, choose, problem_of
from ds_dynatrain.balance.deal import Deal, cut_of, state_of
from ds_dynatrain.balance.partition import PLENTY, partition
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.step_time import Link, LinkCosts, StepTime, step_time
from ds_dynatrain.buddies.assignment import buddies_of
from ds_dynatrain.dry_run.change import REBUILD_SECONDS, VOTE_SECONDS, answered
from ds_dynatrain.dry_run.models import Model, ModelTensor
from ds_dynatrain.dry_run.planned_job import PlannedJob, layout_of
from ds_dynatrain.errors import ConfigError, LayoutError
from ds_dynatrain.plan import Topology
from ds_dynatrain.simulate.trace import Seconds
from ds_dynatrain.space.kind import MASTER, WEIGHT
from ds_dynatrain.space.layout import Layout


class Assumptions(BaseModel):
    """Times that are in neither a profile nor a cluster file. Their descriptions are printed with the results."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start_seconds: Seconds = Field(default=30.0, description="from the start of a process until it can train")
    detection_seconds: Seconds = Field(
        default=0.1, description="until the others notice a loss, unless its row says otherwise"
    )
    change_seconds: Seconds = Field(
        default=VOTE_SECONDS + REBUILD_SECONDS, description="of a live switch of this library, beside its bytes"
    )
    regroup_seconds: Seconds = Field(
        default=1.0, description="until torchft or ReCycle has groups without the lost members"
    )
    save_every_seconds: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="from one checkpoint to the next"
    )
    storage_bytes_per_second: Annotated[float, Field(gt=0)] = Field(
        default=2e9, description="at which all members together write and read a checkpoint"
    )
    slow_seconds: Seconds = Field(default=60.0, description="until this library's balancer knows that a member is slow")
    least_gain: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.03, description="of a step, below which this library's balancer moves nothing"
    )


@dataclass(frozen=True)
class SimulatedWorld:
    """The members that train together, their layout, and how fast they are.

    members: the members by rank.
    deal: the division of the samples.
    step_seconds: the time of a step.
    units: the members of each replica or stage, for policies that keep them together; () for an empty one.
    share: the part of a global batch that a step trains.
    """

    members: tuple[int, ...]
    layout: Layout
    deal: Deal
    step_seconds: float
    units: tuple[tuple[int, ...], ...] = ()
    share: float = 1.0

    @property
    def place(self) -> tuple[object, ...]:
        """A key for comparing worlds: worlds with equal keys differ at most in their step times and shares."""
        return self.members, self.layout, self.deal, self.units


@dataclass(frozen=True, eq=False)
class SimulatedJob:
    """The job to simulate: a profiled model in a cluster.

    layout: the layout in which all members train. Policies with a fixed shape keep its axes.
    least: the number of members below which training waits.
    most: the number of members that may train at once; further members are spares.
    """

    profile: Profile
    topology: Topology
    layout: Layout
    assumed: Assumptions
    least: int
    most: int
    _chosen: dict[tuple[float, ...], FittingLayout | None] = field(default_factory=dict)
    _moved: dict[tuple[Layout, Layout], float] = field(default_factory=dict)

    @classmethod
    def read(
        cls, profile: Path, cluster: Path, layout: str | None, assumed: Assumptions, least: int, most: int | None
    ) -> SimulatedJob:
        """Return the job that a profile, a cluster file and the options describe.

        Raises DynatrainError, which names the file or the option, if they cannot be used or do not belong together.
        """
        measured, topology = Profile.load(profile), Topology.read(cluster)
        most = min(most or len(topology.node_of), len(topology.node_of))
        if not 1 <= least <= most:
            raise ConfigError(f"--least {least} and at most {most} members: give 1 to {most}")
        given = Layout(zero_stage=1, data=min(most, measured.train_batch_size))
        shape = given if layout is None else layout_of(layout, stage=1)
        if shape.world_size > most:
            raise ConfigError(f"--layout {shape} needs {shape.world_size} members and {most} may train; give fewer")
        try:
            if shape.pipe > 1 and shape.boundaries is None:
                problem = problem_of(measured, shape, Deal.of(measured, shape), Members((1.0,) * shape.world_size))
                shape = shape.replace(boundaries=partition(problem).boundaries)
            job = cls(measured, topology, shape, assumed, least, most)
            job.step(job.layout, None)
        except LayoutError as error:
            raise ConfigError(f"{profile}: the profile is of another model: {error}") from None
        return job

    @cached_property
    def links(self) -> LinkCosts:
        """The links over which members exchange the messages of a step."""
        classes = self.topology.node, self.topology.network
        inside, between = (Link(each.bytes_per_second, each.latency_seconds) for each in classes)
        return LinkCosts(inside, between, max(1, len(self.topology.node_of) // len(self.topology.names)))

    @cached_property
    def reference_seconds(self) -> float:
        """The time of a step if all members train and none is slow."""
        members = sorted(self.topology.node_of)
        best, given = self.best(members, dict.fromkeys(members, 1.0)), self.step(self.layout, None).seconds
        return given if best is None else min(best.step_seconds, given)

    def step(
        self, layout: Layout, speeds: Sequence[float] | None, deal: Deal | None = None, members: tuple[int, ...] = ()
    ) -> StepTime:
        """Return the time of a step.

        speeds: the speed of each rank; None if no rank is slow.
        members: the member at each rank; () for the first members of the cluster.
        """
        links = replace(self.links, members=members)
        return step_time(self.profile, layout, deal or Deal.of(self.profile, layout), speeds, links)

    def best(self, ready: Iterable[int], speeds: Mapping[int, float]) -> SimulatedWorld | None:
        """Return the world with the fastest step, as this library's scheduler (`"layouts": "best"`) chooses it.

        Returns None if there are too few members, or if no layout fits into their memory.
        """
        among = tuple(ready)[: self.most]
        if len(among) < self.least:
            return None
        known = tuple(speeds[member] for member in among)
        if known not in self._chosen:
            memory = self.topology.device_memory_bytes
            members = Members(known, PLENTY if memory is None else int(memory), self.links, are_placed=True)
            search = Search(zero_stages=(self.layout.zero_stage,), pipeline=self.layout.pipe > 1, count=1)
            self._chosen[known] = None
            with suppress(LayoutError):
                self._chosen[known] = choose(self.profile, self.layout, members, search)[0]
        if (found := self._chosen[known]) is None:
            return None
        members_by_rank = tuple(among[place] for place in found.members)
        return self.timed(SimulatedWorld(members_by_rank, found.layout, found.deal, 0.0), speeds)

    def timed(self, world: SimulatedWorld, speeds: Mapping[int, float]) -> SimulatedWorld:
        """Return a copy of `world` with its step time computed from the speeds of its members."""
        pace = [speeds[member] for member in world.members]
        return replace(world, step_seconds=self.step(world.layout, pace, world.deal, world.members).seconds)

    def switch_seconds(self, source: Layout, target: Layout) -> float:
        """Return the pause of a live switch, whose bytes take as long as `ds-dynatrain plan` says."""
        pair = source.replace(shares=None), target.replace(shares=None)
        if pair not in self._moved:
            figures = answered(self._planned, *pair, self.topology).figures if pair[0] != pair[1] else None
            phases = {} if figures is None else figures.seconds.phases
            self._moved[pair] = phases.get("moves", 0.0) + phases.get("certificate", 0.0)
        return self.assumed.change_seconds + self._moved[pair]

    @cached_property
    def _planned(self) -> PlannedJob:
        """A model with one tensor per layer of the profile, fp32 masters and Adam's moments, for which switches are
        planned.
        """
        weight, master = self.profile.kind_bytes(WEIGHT), self.profile.kind_bytes(MASTER)
        item = 2 if (master > weight).any() else 4
        shapes = [(max(1, nbytes // item),) for nbytes in weight.tolist()]
        tensors = (ModelTensor(f"layer.{at}", shape, (at,), dim=0) for at, shape in enumerate(shapes))
        model = Model("the profile", len(shapes), tuple(tensors))
        return PlannedJob(model, {"bf16": {"enabled": item == 2}})

    @cached_property
    def storage_seconds(self) -> float:
        """The time to write or read a checkpoint of the whole state."""
        return float(self.profile.counts("total_bytes").sum()) / self.assumed.storage_bytes_per_second

    def copy_seconds(self, layout: Layout) -> float:
        """Return the time from a step until the buddies have complete copies of it; 0 at stage 0, whose replicas need
        no copies.
        """
        if layout.zero_stage == 0:
            return 0.0
        parts, cut = state_of(self.profile, layout)[1], cut_of(self.profile, layout)
        most = np.add.reduceat(parts, cut[:-1]).max()
        return float(most) / self.topology.network.bytes_per_second

    def survives(self, world: SimulatedWorld, gone: Collection[int]) -> bool:
        """Return whether each rank's state is still held by a living member: by itself, a replica or a buddy
        (docs/buddies.md).
        """
        members = world.members
        if world.layout.zero_stage == 0:
            width = world.layout.ranks_per_stage // world.layout.data
            places = {(r // world.layout.ranks_per_stage, r % width) for r, m in enumerate(members) if m not in gone}
            return len(places) == world.layout.pipe * width
        keepers = buddies_of([self.topology.node_of[member] for member in members])
        lost = [rank for rank, member in enumerate(members) if member in gone]
        return all(keepers and any(members[each] not in gone for each in keepers[rank]) for rank in lost)
