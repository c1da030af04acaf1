"""Choice of a set of copies from which the whole state can be restored, given the copies that each member reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_dynatrain.space.layout import Layout


@dataclass(frozen=True)
class Mark:
    """Point in training at which a copy was taken. Copies of different ranks belong together if their marks are equal.

    generation: the number of the engine's world.
    segment: a name for a part of training in which no step number occurs twice (see `EngineCore.segment`).
    registered: how often parameters were registered again (`update_param_groups`).
    step: the number of optimizer steps done.
    layout: the layout of the engine's world.
    first: for a further engine of a process, the `moment` of the process's first engine; () for the first engine
        itself.
    """

    generation: int
    segment: str
    registered: int
    step: int
    layout: Layout
    first: tuple[int, ...] = ()

    @property
    def moment(self) -> tuple[int, ...]:
        """Sort key of the point in training at which the copy was taken. Copies that all engines of a process take
        together have the same key.

        A later copy always has a larger key, even if a checkpoint of an earlier step was loaded in between.
        """
        return self.first or (self.generation, int(self.segment.partition(".")[2]), self.registered, self.step)

    @property
    def stretch(self) -> tuple[int, ...]:
        """First part of `moment`. It grows whenever a state, such as a checkpoint, is loaded, so copies with a smaller
        value are out of date."""
        return self.moment[:2]


@dataclass(frozen=True)
class Had:
    """Description of a copy that a member has.

    mark: the point in training at which the copy was taken.
    rank: the rank whose state the copy contains.
    is_own: whether the copy contains the member's own state.
    lacks_frozen: whether some frozen weights are in no copy with this mark.
    """

    mark: Mark
    rank: int
    is_own: bool = False
    lacks_frozen: bool = False


@dataclass(frozen=True)
class Frozen:
    """Members that hold the frozen weights of a model. Copies leave such weights out if many members hold them anyway.

    layout: a layout without ZeRO.
    members: the member that holds the weights at each rank of this layout.
    """

    layout: Layout
    members: tuple[int, ...]


@dataclass(frozen=True)
class WholeCopies:
    """Set of copies from which the whole state of an engine can be restored.

    mark: the point in training at which the copies were taken.
    holders: for each rank, the member that provides its copy.
    frozen: the members with the frozen weights that are in no copy, if there are such weights.
    """

    mark: Mark
    holders: tuple[int, ...]
    frozen: Frozen | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """Members that provide a copy or frozen weights, in ascending order."""
        return tuple(sorted({*self.holders, *(() if self.frozen is None else self.frozen.members)}))

    def held_by(self, member: int) -> list[int]:
        """Return the ranks whose copies a member provides."""
        return [rank for rank, holder in enumerate(self.holders) if holder == member]


def newest_whole(engines: Sequence[Mapping[int, Iterable[Had]]]) -> tuple[WholeCopies, ...]:
    """Return, for each engine, the newest set that has one copy of every rank. The copies of all engines were taken at
    the same point in training. Returns () if there are no such sets.

    If several members have a rank's copy, the member of that rank itself provides it, or else the member that provides
    the fewest other copies.

    engines: for each engine, the copies that each member has.
    """
    found = [
        {
            mark.moment: WholeCopies(mark, _holder_of_each(by_rank))
            for mark, by_rank in _by_mark(had)
            if len(by_rank) == mark.layout.world_size
        }
        for had in engines
    ]
    common = set.intersection(*(set(whole) for whole in found))
    return tuple(whole[max(common)] for whole in found) if common else ()


def missing(had: Mapping[int, Iterable[Had]]) -> tuple[Mark, tuple[int, ...]] | None:
    """Return the point in training at which the newest copy was taken, and the ranks that have no copy from that point;
    None if there are no copies at all."""
    for mark, by_rank in _by_mark(had):
        return mark, tuple(rank for rank in range(mark.layout.world_size) if rank not in by_rank)
    return None


def _by_mark(had: Mapping[int, Iterable[Had]]) -> list[tuple[Mark, dict[int, dict[int, bool]]]]:
    """Group copies by the point in training at which they were taken, newest first: return a list of (mark, holders).

    holders: a map from each rank to {member that has the rank's copy: whether the copy is of the member's own state}.
    """
    found: dict[Mark, dict[int, dict[int, bool]]] = {}
    for member, copies in sorted(had.items()):
        for copy in copies:
            found.setdefault(copy.mark, {}).setdefault(copy.rank, {})[member] = copy.is_own
    return sorted(found.items(), key=lambda each: each[0].moment, reverse=True)


def _holder_of_each(by_rank: Mapping[int, Mapping[int, bool]]) -> tuple[int, ...]:
    chosen, gives = dict[int, int](), Counter[int]()
    for rank in sorted(by_rank, key=lambda one: (not any(by_rank[one].values()), len(by_rank[one]), one)):
        members = by_rank[rank]
        chosen[rank] = min(members, key=lambda member: (not members[member], gives[member], member))
        gives[chosen[rank]] += 1
    return tuple(chosen[rank] for rank in sorted(chosen))
