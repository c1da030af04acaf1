"""Process groups of the user's own, and of the engine's parts: described once, and built with those of every world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as td

from ds_dynatrain.adapters.world import World
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.space import Layout

RanksOf = Callable[[Layout, Sequence[str]], Iterable[Iterable[int]]]
"""(layout, the node of each rank) -> the ranks of each group; a rank is in one of them, or in none."""
OF_A_USER = "own"


@dataclass(frozen=True)
class OwnGroup:
    """What `engine.new_group` returns: the same object for the whole job, for another group in each world."""

    _world: Callable[[], World | None]
    _kind: str

    @property
    def group(self) -> td.ProcessGroup | object:
        """The present one, for `group=`; as with torch's `new_group` an object that is none on a rank in no group.

        RuntimeError on an idle member.
        """
        world = self._world()
        if world is None:
            raise RuntimeError("this member is idle: it is in no world, and in no group of it")
        return world.group(self._kind) if self._kind in world.kinds else td.GroupMember.NON_GROUP_MEMBER

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the present world in this rank's group, in its order; none where it is in no group."""
        world = self._world()
        return () if world is None or self._kind not in world.kinds else world.ranks(self._kind)


class OwnGroups:
    """All that the script has asked for, in order; the same on every process. of_all: kinds of groups of all ranks, for
    extensions."""

    def __init__(self, of_all: Iterable[str] = ()) -> None:
        self._rules: list[RanksOf] = []
        self.of_all = tuple(of_all)

    def __len__(self) -> int:
        return len(self._rules)

    def add(self, rule: RanksOf | None) -> str:
        """Take a rule in; the kind of its groups."""
        self._rules.append(_everybody if rule is None else rule)
        return f"{OF_A_USER}{len(self._rules) - 1}"

    def kinds(
        self, layout: Layout, members: Sequence[int], nodes: Mapping[int, str], mine: int
    ) -> dict[str, tuple[int, ...]]:
        """Kind -> ranks of the groups that a member is in, in a world; ConfigError for ranks that cannot be."""
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


def _everybody(layout: Layout, nodes: Sequence[str]) -> list[range]:
    return [range(layout.world_size)]
