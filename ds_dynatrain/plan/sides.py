"""The two sides of a switch, and what each member of the target lacks, found by set operations on runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ds_dynatrain.errors import LayoutError, SwitchRefused
from ds_dynatrain.space import ABSENT, Kind, Layout, Pieces, Sharding, VirtualParameterSpace
from ds_dynatrain.space.tensor import Ints
from ds_dynatrain.space.vps import check_members

AS_LAID_OUT: Mapping[str, str] = {}


@dataclass(frozen=True, eq=False)
class Sides:
    """Source (the space's present layout and members) and target of a switch.

    kinds: the kinds that are present at the source and move; every other one is absent on both sides. held_as: kinds
    that the source does not hold as its layout would, but cut as another kind is.
    """

    vps: VirtualParameterSpace
    layout: Layout
    members: tuple[int, ...]
    kinds: tuple[Kind, ...]
    held_as: Mapping[str, str]
    source_rank: dict[int, int] = field(init=False)
    target_rank: dict[int, int] = field(init=False)

    def __init__(
        self,
        vps: VirtualParameterSpace,
        layout: Layout,
        members: Iterable[int],
        kinds: Iterable[str] | None = None,
        held_as: Mapping[str, str] = AS_LAID_OUT,
    ) -> None:
        """Check both sides: LayoutError for members that do not fill the world, SwitchRefused for a kind not held."""
        names = vps.present_kinds() if kinds is None else tuple(kinds)
        object.__setattr__(self, "vps", vps)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "members", tuple(members))
        object.__setattr__(self, "kinds", tuple(vps.kind(name) for name in names))
        object.__setattr__(self, "held_as", dict(held_as))
        object.__setattr__(self, "source_rank", {member: rank for rank, member in enumerate(vps.members)})
        object.__setattr__(self, "target_rank", {member: rank for rank, member in enumerate(self.members)})
        check_members(layout, self.members)
        if len(set(names)) != len(names):
            raise LayoutError(f"a state kind is named twice in {names}; name each once")
        self._check_present()

    def _check_present(self) -> None:
        present = self.vps.present_kinds()
        for kind in self.kinds:
            if kind.name not in present and not self.target(kind.name).is_empty:
                raise SwitchRefused(
                    f"{kind.name} is needed under {self.layout} and held by no rank under {self.vps.layout}",
                    "leave it out of the kinds of this switch",
                )

    @property
    def source_ranks(self) -> Ints:
        """For each target rank, the source rank of its member, or ABSENT."""
        return np.array([self.source_rank.get(member, ABSENT) for member in self.members], dtype=np.int64)

    def source(self, kind: str) -> Sharding:
        """How the source holds a kind."""
        return self.vps.sharding(self.vps.layout, self.held_as.get(kind, kind))

    def target(self, kind: str) -> Sharding:
        """How the target holds a kind."""
        return self.vps.sharding(self.layout, kind)

    def sources(self, kind: Kind) -> tuple[str, ...]:
        """The kinds present at the source that may be read for `kind`, itself first."""
        present = {other.name for other in self.kinds}
        return tuple(name for name in kind.sources if name in present)

    def derived_from(self, kind: Kind) -> str | None:
        """The kind that `kind` can be cast from, if that one moves too."""
        present = {other.name for other in self.kinds}
        return kind.derived_from if kind.derived_from in present else None

    def held(self, kind: Kind, rank: int) -> Iterator[tuple[str, Pieces]]:
        """What the source rank holds that may be read for `kind`, best first: (source kind, pieces)."""
        if rank == ABSENT:
            return
        for name in self.sources(kind):
            yield name, self.source(name).holding(rank)

    def wanted(self, kind: Kind, rank: int, source_rank: int) -> tuple[Ints, Ints]:
        """The tidy runs that a target rank must receive, if its member had `source_rank` (or ABSENT) at the source.

        All that it will hold, less what its member holds now and what it can cast from another kind.
        """
        want = self.target(kind.name).holding(rank)
        for _, held in self.held(kind, source_rank):
            want = want.subtract(held.start, held.stop)
        origin = self.derived_from(kind)
        if origin is not None:
            held = self.target(origin).holding(rank)
            want = want.subtract(held.start, held.stop)
        return want.start, want.stop
