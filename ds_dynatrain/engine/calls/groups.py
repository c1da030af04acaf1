"""Groups of the user's own, in whatever world."""

from __future__ import annotations

from ds_dynatrain.adapters.worlds import add_groups
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.groups import OwnGroup, RanksOf
from ds_dynatrain.errors import ConfigError


class GroupCalls(EngineCore):
    """What stands for `torch.distributed.new_group`."""

    def new_group(self, ranks: RanksOf | None = None) -> OwnGroup:
        """A group that is built anew with every world; use it as `group=handle.group`, asked for each time.

        Call it on every process, idle ones too, in the same order, before the first batch. ranks: called as
        `ranks(layout, nodes)`, where `nodes[rank]` names the node of each rank; it returns the ranks of each group, and
        a rank is in one of them or in none. By default all working members are in one group.

        ConfigError after the first batch, or for ranks that cannot be; a layout for which `ranks` returns such is
        refused.
        """
        if self._has_stood or self._switcher.is_busy:
            raise ConfigError("new_group: the first batch was dealt; call it before that, on every process")
        kind = self.own_groups.add(ranks)
        world = self.world
        if world is not None:
            wanted = self.own_groups.kinds(self.layout, self.members, self.candidates.nodes, self.control.member)
            with self.membership.building_more(self.job.number):
                seconds = self.settings.timeout_seconds
                add_groups(self.surroundings.background.store, world, {kind: wanted.get(kind, ())}, seconds)
        return OwnGroup(self, kind)
