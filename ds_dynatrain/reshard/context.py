"""Surroundings of a member: who could work, the board, the group it idles in, the job, and the user's groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as td

from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import LaunchWorld
from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes
from ds_dynatrain.adapters.zero.incoming import Row
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.extension import Extension
from ds_dynatrain.membership.control import Control
from ds_dynatrain.space import Layout
from ds_dynatrain.support.axes import PIPELINE, ULYSSES, Features

Boards = tuple[Control, Control]
"""Two connections to the board of one generation: for the main thread, and for threads in the background."""


@dataclass(frozen=True)
class Candidates:
    """Members that could work: the numbers of all members of the job at present, idle ones too, and the node of each.

    mine: this member's number. A number never changes and never belongs to two members.
    """

    mine: int
    nodes: Mapping[int, str]

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the members, ascending."""
        return tuple(sorted(self.nodes))

    def __len__(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True)
class Context:
    """Surroundings of an engine, replaced as a whole when members come and go; in a fixed launch they never change.

    launch: the group that this process stands in while it is idle. control: the board; background: the same over
    another connection, for preparations beside training.
    """

    launch: LaunchWorld
    candidates: Candidates
    control: Control
    background: Control


OnIdle = Callable[[Any], object]
"""The user's function for idle members, called with the engine."""


@dataclass(frozen=True)
class Job:
    """Settings that are fixed once for the whole job, the same on every process.

    features: of the model. rows: its parameters, and described: the configuration, as every process has to have them.
    extensions: in the order in which their hooks are called; machine: values that they want to be equal on every
    process, by name. number: of this engine among those that the process has made, from 1.
    """

    settings: DynatrainConfig
    user_config: dict[str, Any]
    batch_sizes: BatchSizes
    job_seed: int
    features: Features
    rows: list[Row]
    described: dict[str, str]
    extensions: tuple[Extension, ...]
    machine: dict[str, str]
    on_idle: OnIdle | None
    number: int = 1

    @property
    def has_stages(self) -> bool:
        """Whether the model is a PipelineModule, in whatever number of stages."""
        return PIPELINE in self.features

    @property
    def has_sequence(self) -> bool:
        """Whether the model can have a sequence axis."""
        return ULYSSES in self.features


RanksOf = Callable[[Layout, Sequence[str]], Iterable[Iterable[int]]]
"""Function of (layout, the node of each rank) that returns the ranks of each group; a rank is in at most one of
them.
"""
OF_A_USER = "own"


@dataclass(frozen=True)
class OwnGroup:
    """Handle that `engine.new_group` returns: the same object for the whole job, for another group in each world."""

    _world: Callable[[], World | None]
    _kind: str

    @property
    def group(self) -> td.ProcessGroup | object:
        """Group in the present world, for `group=`; on a rank in no group, the same placeholder as of torch's
        `new_group`.

        Raises RuntimeError on an idle member.
        """
        world = self._world()
        if world is None:
            raise RuntimeError("this member is idle: it is in no world, and in no group of it")
        return world.group(self._kind) if self._kind in world.kinds else td.GroupMember.NON_GROUP_MEMBER

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the present world in this rank's group, in its order; () on a rank in no group."""
        world = self._world()
        return () if world is None or self._kind not in world.kinds else world.ranks(self._kind)


class OwnGroups:
    """Groups that the script has asked for, in order; the same on every process.

    of_all: kinds of groups of all ranks, for extensions.
    """

    def __init__(self, of_all: Iterable[str] = ()) -> None:
        self._rules: list[RanksOf] = []
        self.of_all = tuple(of_all)

    def __len__(self) -> int:
        return len(self._rules)

    def add(self, rule: RanksOf | None) -> str:
        """Add a rule; return the kind of its groups."""
        self._rules.append(rule or (lambda layout, nodes: [range(layout.world_size)]))
        return f"{OF_A_USER}{len(self._rules) - 1}"

    def kinds(
        self, layout: Layout, members: Sequence[int], nodes: Mapping[int, str], mine: int
    ) -> dict[str, tuple[int, ...]]:
        """Return, by kind, the ranks of the groups that a member is in, in a world; raise ConfigError for impossible
        ranks.
        """
        if mine not in members:
            return {}
        rank, everybody = members.index(mine), tuple(range(layout.world_size))
        found = dict.fromkeys(self.of_all, everybody)
        places = tuple(nodes.get(member, "") for member in members)
        for number, rule in enumerate(self._rules):
            groups = [tuple(int(one) for one in group) for group in rule(layout, places)]
            everyone = [one for group in groups for one in group]
            wrong = [one for one in everyone if not 0 <= one < layout.world_size or everyone.count(one) > 1]
            if wrong:
                raise ConfigError(
                    f"new_group {number}: in {layout} rank {wrong[0]} is no rank, or stands in two groups: {groups}; "
                    f"let the rule return each of 0 to {layout.world_size - 1} at most once"
                )
            found.update({f"{OF_A_USER}{number}": group for group in groups if rank in group})
        return found
