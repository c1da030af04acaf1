"""Choice of the copies that make up a whole state: arithmetic on what members say that they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_dynatrain.space.layout import Layout


@dataclass(frozen=True)
class Mark:
    """The moment that a copy is of; equal for all ranks' copies of it.

    generation, segment: of the engine's world (`EngineCore`). registered: how often the job has registered its
    parameters anew, which makes another line each time. step: optimizer steps done. first: the moment of the first of
    several engines of a process, at whose boundary all have taken copies; empty for its own.
    """

    generation: int
    segment: str
    registered: int
    step: int
    layout: Layout
    first: tuple[int, ...] = ()

    @property
    def moment(self) -> tuple[int, ...]:
        """Key that is common to marks of all engines at one boundary.

        Of two moments of a job the larger one is the newer, also after a load of an older step.
        """
        return self.first or (self.generation, int(self.segment.partition(".")[2]), self.registered, self.step)

    @property
    def stretch(self) -> tuple[int, ...]:
        """Part of the moment that a load makes larger: a smaller stretch belongs to a state that was replaced."""
        return self.moment[:2]


@dataclass(frozen=True)
class Had:
    """A copy that a member has. mark: its moment. rank: the rank that it is of, at that moment.

    is_own: whether it is of the member itself. lacks_frozen: whether some frozen weights are in no copy of that moment.
    """

    mark: Mark
    rank: int
    is_own: bool = False
    lacks_frozen: bool = False


@dataclass(frozen=True)
class Frozen:
    """Frozen weights that are in no copy, since many members hold them.

    members: members that hold them, at the ranks of a layout without ZeRO.
    """

    layout: Layout
    members: tuple[int, ...]


@dataclass(frozen=True)
class WholeCopies:
    """A whole state at one moment. holders: the member that has the copy of each rank.

    frozen: members with the frozen weights that are in no copy, if there are any.
    """

    mark: Mark
    holders: tuple[int, ...]
    frozen: Frozen | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """Members that give something, ascending."""
        return tuple(sorted({*self.holders, *(() if self.frozen is None else self.frozen.members)}))


def newest_whole(engines: Sequence[Mapping[int, Iterable[Had]]]) -> tuple[WholeCopies, ...]:
    """Return, for each engine, the copies of the newest moment of which all engines have a copy of every rank.

    Return nothing if there is no such moment. engines: the copies that each member has of each engine. If several
    members have a rank's copy, that rank itself gives it, or the member that gives the fewest others.
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
    """Return the newest moment of any copy, and the ranks of which it has none; None without copies."""
    for mark, by_rank in _by_mark(had):
        return mark, tuple(rank for rank in range(mark.layout.world_size) if rank not in by_rank)
    return None


def _by_mark(had: Mapping[int, Iterable[Had]]) -> list[tuple[Mark, dict[int, dict[int, bool]]]]:
    """Return each moment, newest first: for each rank the members with a copy of it, and whether it is their own."""
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
