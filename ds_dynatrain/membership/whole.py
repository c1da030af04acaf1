"""Choice of the copies that make up a whole state, from the copies that each member reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_dynatrain.space.layout import Layout


@dataclass(frozen=True)
class Mark:
    """Point in training at which a copy was taken. Copies of different ranks belong together if their marks are equal.

    generation: the number of the engine's world.
    segment: the engine's segment, a part of training in which no step number occurs twice (see `EngineCore.segment`).
    registered: how often parameters were registered again (`update_param_groups`).
    step: the number of optimizer steps done.
    layout: the layout of the engine's world.
    first: the `moment` of the process's first engine, at whose boundary all engines took copies; empty for that engine.
    """

    generation: int
    segment: str
    registered: int
    step: int
    layout: Layout
    first: tuple[int, ...] = ()

    @property
    def moment(self) -> tuple[int, ...]:
        """Sort key of the boundary at which the copy was taken, shared by the marks of all engines at that boundary.

        A larger key is always newer, even after a checkpoint of an earlier step was loaded.
        """
        return self.first or (self.generation, int(self.segment.partition(".")[2]), self.registered, self.step)

    @property
    def stretch(self) -> tuple[int, ...]:
        """First part of `moment`, which grows with every load of a state. Copies with a smaller value hold a state that
        a load has replaced."""
        return self.moment[:2]


@dataclass(frozen=True)
class Had:
    """A copy that a member has.

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
    """Frozen weights that are in no copy, because many members hold them.

    layout: a layout without ZeRO.
    members: the member that holds the weights at each rank of this layout.
    """

    layout: Layout
    members: tuple[int, ...]


@dataclass(frozen=True)
class WholeCopies:
    """Copies that make up a whole state.

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
    """Return, for each engine, the newest set of copies with one copy of every rank, all taken at one boundary by all
    engines; () if there is none.

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
    """Return the mark of the newest copy, and the ranks without a copy of this mark; None if there are no copies."""
    for mark, by_rank in _by_mark(had):
        return mark, tuple(rank for rank in range(mark.layout.world_size) if rank not in by_rank)
    return None


def _by_mark(had: Mapping[int, Iterable[Had]]) -> list[tuple[Mark, dict[int, dict[int, bool]]]]:
    """Return (mark, holders) for each mark, newest first.

    The holders are a map from each rank to {member that has the rank's copy: whether the copy is of the member's own
    state}.
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
