"""A member's surroundings: the members that could train, the key-value store ("board") that they share, this process's
group while it is idle, the job's settings, and the user's process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as td

from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import LaunchWorld
from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.extension import Extension
from ds_dynatrain.membership.control import Control
from ds_dynatrain.space import Layout
from ds_dynatrain.support.axes import PIPELINE, ULYSSES, Features

Boards = tuple[Control, Control]
"""Two connections to the members' key-value store of one generation: one for the main thread, one for background
threads."""


@dataclass(frozen=True)
class Candidates:
    """The members that could train: all current members of the job, idle ones included.

    mine: this member's number. A number never changes and never belongs to two members.
    nodes: the node of each member.
    """

    mine: int
    nodes: Mapping[int, str]

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the members, in ascending order."""
        return tuple(sorted(self.nodes))


@dataclass(frozen=True)
class Context:
    """The surroundings of an engine. They are replaced as a whole when members join or leave; in a fixed launch they
    never change.

    launch: the process group that this process uses while it is idle.
    candidates: the members that could train.
    control: the board (the key-value store that the members share).
    background: the same board over another connection, for preparations during training.
    """

    launch: LaunchWorld
    candidates: Candidates
    control: Control
    background: Control


OnIdle = Callable[[Any], object]
"""The user's function for idle members; its argument is the engine."""


@dataclass(frozen=True)
class Job:
    """Settings of the whole job, which never change and are the same on every process.

    features: the features of the model that limit its layouts.
    alike: what must be equal on every process, as plain JSON: the configuration, the parameters, the batch sizes, the
        seed and the values that extensions name.
    extensions: the extensions, in the order in which their hooks are called.
    on_idle: the user's function for idle members; None if there is none.
    number: the number of this engine in its process, counted from 1.
    """

    settings: DynatrainConfig
    user_config: dict[str, Any]
    batch_sizes: BatchSizes
    job_seed: int
    features: Features
    alike: dict[str, Any]
    extensions: tuple[Extension, ...]
    on_idle: OnIdle | None
    number: int = 1

    @property
    def has_stages(self) -> bool:
        """Whether the model is a PipelineModule, with any number of stages."""
        return PIPELINE in self.features

    @property
    def has_sequence(self) -> bool:
        """Whether the model can have a sequence axis."""
        return ULYSSES in self.features


RanksOf = Callable[[Layout, Sequence[str]], Iterable[Iterable[int]]]
"""Function of (layout, the node of each rank) that returns the ranks of each group; no rank may be in two groups."""
OF_A_USER = "own"


@dataclass(frozen=True)
class OwnGroup:
    """Handle that `engine.new_group` returns. The object stays the same for the whole job, while the process group
    behind it is another one in each world."""

    _world: Callable[[], World | None]
    _kind: str

    @property
    def group(self) -> td.ProcessGroup | object:
        """Process group in the current world, to be passed as `group=`; torch's placeholder for non-members on a rank
        in no group.

        Raises RuntimeError on an idle member.
        """
        world = self._world()
        if world is None:
            raise RuntimeError("this member is idle: it is in no world, and in no group of it")
        return world.group(self._kind) if self._kind in world.kinds else td.GroupMember.NON_GROUP_MEMBER

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the current world in this rank's group, in the group's order; () on a rank in no group."""
        world = self._world()
        return () if world is None or self._kind not in world.kinds else world.ranks(self._kind)


class OwnGroups:
    """Process groups that the script has requested, in order; the same on every process.

    of_all: kinds of groups that extensions use; each group contains all ranks.
    rules: functions that choose the ranks of each group, in the order of the script's requests.
    """

    def __init__(self, of_all: Iterable[str] = ()) -> None:
        self.rules: list[RanksOf] = []
        self.of_all = tuple(of_all)

    def add(self, rule: RanksOf | None) -> str:
        """Add a rule for the ranks of process groups; return a name ("kind") for these groups.

        rule: returns the ranks of each group; None for one group of all ranks.
        """
        self.rules.append(rule or (lambda layout, nodes: [range(layout.world_size)]))
        return f"{OF_A_USER}{len(self.rules) - 1}"

    def kinds(
        self, layout: Layout, members: Sequence[int], nodes: Mapping[int, str], mine: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each process group to which a member belongs in a world, keyed by the kind of the group.

        Raises ConfigError if a rule returns ranks that do not exist or are in two groups.

        members: the member at each rank.
        nodes: the node of each member.
        mine: the number of the member.
        """
        if mine not in members:
            return {}
        rank, everybody = members.index(mine), tuple(range(layout.world_size))
        found = dict.fromkeys(self.of_all, everybody)
        places = tuple(nodes.get(member, "") for member in members)
        for number, rule in enumerate(self.rules):
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
