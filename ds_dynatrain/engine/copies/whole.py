"""Which copies make up a whole state: arithmetic on what members say that they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_dynatrain.engine.copies.copy import Mark
from ds_dynatrain.space import Layout


@dataclass(frozen=True)
class Had:
    """A copy that a member has: of which moment, and of which rank then. is_own: of the member itself. lacks_frozen:
    whether there are frozen weights that are in no copy of that moment.
    """

    mark: Mark
    rank: int
    is_own: bool = False
    lacks_frozen: bool = False


@dataclass(frozen=True)
class Frozen:
    """Frozen weights that are in no copy, since many hold them: those who do, at the ranks of a layout without ZeRO."""

    layout: Layout
    members: tuple[int, ...]


@dataclass(frozen=True)
class WholeCopies:
    """A whole state at one moment. holders: the member that has the copy of each rank. frozen: who has what else there
    is, if anything."""

    mark: Mark
    holders: tuple[int, ...]
    frozen: Frozen | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """All that give something, ascending."""
        return tuple(sorted({*self.holders, *(() if self.frozen is None else self.frozen.members)}))


def newest_whole(engines: Sequence[Mapping[int, Iterable[Had]]]) -> tuple[WholeCopies, ...]:
    """Of the newest moment of which there is a copy of every rank in all engines, one for each; none if there is no
    such moment.

    engines: what each member has of each. Of several that have a rank's copy that rank itself gives it, or the one that
    gives the fewest others.
    """
    found = [
        {
            mark.moment: WholeCopies(mark, _dealt(by_rank))
            for mark, by_rank in _by_mark(had)
            if len(by_rank) == mark.layout.world_size
        }
        for had in engines
    ]
    common = set.intersection(*(set(whole) for whole in found))
    return tuple(whole[max(common)] for whole in found) if common else ()


def missing(had: Mapping[int, Iterable[Had]]) -> tuple[Mark, tuple[int, ...]] | None:
    """The newest moment of which anybody has a copy, and the ranks of which nobody has one; None without copies."""
    for mark, by_rank in _by_mark(had):
        return mark, tuple(rank for rank in range(mark.layout.world_size) if rank not in by_rank)
    return None


def _by_mark(had: Mapping[int, Iterable[Had]]) -> list[tuple[Mark, dict[int, dict[int, bool]]]]:
    """Each moment, the newest first: for each rank the members that have a copy of it, and whether it is their own."""
    found: dict[Mark, dict[int, dict[int, bool]]] = {}
    for member, copies in sorted(had.items()):
        for copy in copies:
            found.setdefault(copy.mark, {}).setdefault(copy.rank, {})[member] = copy.is_own
    return sorted(found.items(), key=lambda each: each[0].moment, reverse=True)


def _dealt(by_rank: Mapping[int, Mapping[int, bool]]) -> tuple[int, ...]:
    chosen, gives = dict[int, int](), Counter[int]()
    for rank in sorted(by_rank, key=lambda one: (not any(by_rank[one].values()), len(by_rank[one]), one)):
        members = by_rank[rank]
        chosen[rank] = min(members, key=lambda member: (not members[member], gives[member], member))
        gives[chosen[rank]] += 1
    return tuple(chosen[rank] for rank in sorted(chosen))
