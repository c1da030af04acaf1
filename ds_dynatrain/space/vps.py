"""The Virtual Parameter Space: every element of training state at one coordinate, whichever rank holds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import zero
from ds_dynatrain.space.cut import WHOLE, Partitioner, is_partitioned, shared_stages
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.space.kind import Kind, kind_of
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.mesh import Mesh
from ds_dynatrain.space.sharding import GroupedSharding, Sharding
from ds_dynatrain.space.tensor import BufferId, CoordinateLine, LogicalTensor, Pieces, split_by_tensor
from ds_dynatrain.space.zero import LocalSpace


@dataclass(frozen=True, eq=False)
class VirtualParameterSpace:
    """Tensors, the rules that cut them, their state kinds, and the present (layout, members).

    members: the member at each rank. partitioner: how a layout's pipe, expert and tensor axes deal the tensors out, or
    None if these always have size 1. tensors, bases: those of the line. Cached results do not depend on the members, so
    `with_layout` hands them on.
    """

    line: CoordinateLine
    rules: zero.ZeroRules
    kinds: tuple[Kind, ...]
    layout: Layout
    members: tuple[int, ...]
    partitioner: Partitioner | None = None
    tensors: tuple[LogicalTensor, ...] = field(init=False, repr=False)
    bases: Ints = field(init=False, repr=False)
    _meshes: dict[Layout, Mesh] = field(default_factory=dict, repr=False)
    _shardings: dict[tuple[Layout, str], Sharding] = field(default_factory=dict, repr=False)
    _tables: dict[Layout, tuple[BufferId, ...]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        tensors: Iterable[LogicalTensor],
        rules: zero.ZeroRules,
        kinds: Iterable[Kind],
        layout: Layout,
        members: Iterable[int],
        partitioner: Partitioner | None = None,
    ) -> VirtualParameterSpace:
        """Build a space from tensors in the order of registration; LayoutError as for it and a `CoordinateLine`."""
        return VirtualParameterSpace(
            CoordinateLine(tuple(tensors)), rules, tuple(kinds), layout, tuple(members), partitioner
        )

    def __post_init__(self) -> None:
        """Raise LayoutError if the members do not fill the world, or if kinds that share bytes differ in size."""
        check_members(self.layout, self.members)
        sizes = {kind.name: kind.itemsize for kind in self.kinds}
        for kind in self.kinds:
            wrong = [name for name in kind.sources if sizes.get(name, kind.itemsize) != kind.itemsize]
            if wrong:
                raise LayoutError(
                    f"kind {kind.name!r} of {kind.itemsize} bytes reads {wrong[0]!r} of {sizes[wrong[0]]}; "
                    "give both one type"
                )
        object.__setattr__(self, "tensors", self.line.tensors)
        object.__setattr__(self, "bases", self.line.bases)

    def kind(self, name: str) -> Kind:
        """Return the kind of that name; LayoutError if there is none."""
        return kind_of(self.kinds, name)

    def present_kinds(self, layout: Layout | None = None) -> tuple[str, ...]:
        """Return the names of the kinds that a layout (the present one if None) holds at all."""
        found = []
        for kind in self.kinds:
            if zero.is_held(layout or self.layout, kind.name):
                found.append(kind.name)
        return tuple(found)

    def mesh(self, layout: Layout) -> Mesh | None:
        """Return which rank holds what before ZeRO cuts the tensors; None if every rank has all of them. Computed once.

        Raise LayoutError for an axis that the space was built without, or that does not cut a tensor, and if tensor
        ranks have different numbers of ZeRO-3 sub-groups.
        """
        cuts = is_partitioned(layout)
        if not cuts and not self.line.experts.any():
            return None
        if layout not in self._meshes:
            if cuts and self.partitioner is None:
                raise LayoutError(
                    f"{layout}: this model is dealt out by data and sequence only; give other axes size 1"
                )
            partition = self.partitioner(layout) if cuts and self.partitioner else (WHOLE,) * len(self.tensors)
            mesh = Mesh(self.line, layout, partition)
            if layout.zero_stage == 3 and layout.tensor > 1:  # each sums the norms of its sub-groups in turn
                counts = [zero.subgroup_count(group.line, self.rules, layout) for group in mesh.shard_groups]
                if len(set(counts)) > 1:
                    raise LayoutError(
                        f"{layout}: with sub_group_size {self.rules.sub_group_size} the tensor ranks have "
                        f"{', '.join(map(str, counts))} sub-groups, and would wait for each other's norms for ever; "
                        "make zero_optimization.sub_group_size larger, or take a tensor size that cuts evenly"
                    )
            self._meshes[layout] = mesh
        return self._meshes[layout]

    def ties(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        """Return the sets of pipeline stages that share a tensor under a layout."""
        mesh = self.mesh(layout)
        return () if mesh is None else shared_stages(mesh.partition)

    def local(self, layout: Layout, rank: int) -> LocalSpace:
        """Return the part of the state that a rank holds, in terms of its own local tensors."""
        mesh, layout = self.mesh(layout), zero.as_cut(self.rules, layout)
        if mesh is None:
            return LocalSpace(self.line, self.rules, self.kinds, layout, rank)
        places = mesh.zero_rank(rank), layout.expert_place(rank)[1]
        return LocalSpace(mesh.local_line(mesh.place(rank)), self.rules, self.kinds, layout, *places)

    def sharding(self, layout: Layout, kind: str) -> Sharding:
        """Return how a layout holds a kind; computed once."""
        layout = zero.as_cut(self.rules, layout)
        key = (layout, kind)
        if key not in self._shardings:
            mesh, held = self.mesh(layout), self.kind(kind)
            if mesh is None:
                self._shardings[key] = zero.sharding(self.line, self.rules, layout, held)
            else:  # few lines differ
                cut = cache(lambda line, experts: zero.sharding(line, self.rules, layout, held, experts))
                self._shardings[key] = GroupedSharding.of(mesh, lambda group: cut(group.line, group.experts))
        return self._shardings[key]

    def has(self, kind: str, group: int) -> bool:
        """Return whether the trainable tensors of an optimizer group have a state kind."""
        return self.kind(kind).is_of(group)

    def buffers(self, layout: Layout) -> tuple[BufferId, ...]:
        """Return the buffers that a rank may have under a layout; all pieces number them alike. Computed once."""
        if layout not in self._tables:
            mesh, cut = self.mesh(layout), zero.as_cut(self.rules, layout)
            names: dict[BufferId, None] = {}
            lines = [self.line] if mesh is None else [group.line for group in mesh.shard_groups]
            for line in dict.fromkeys(lines):
                names.update(dict.fromkeys(zero.buffer_table(line, self.rules, cut)))
            self._tables[layout] = tuple(names)
        return self._tables[layout]

    def holding(self, layout: Layout, rank: int, kind: str) -> Pieces:
        """Return the pieces of a kind on a rank, disjoint."""
        return self.sharding(layout, kind).holding(rank)

    def is_held(self, layout: Layout, kind: str) -> bool:
        """Return whether the layout holds the kind at all."""
        return zero.is_held(layout, kind)

    def is_replicated(self, layout: Layout, kind: str) -> bool:
        """Return whether ZeRO leaves the kind whole on every rank that it deals a tensor to."""
        return zero.is_replicated(zero.as_cut(self.rules, layout), kind)

    def owned(self, layout: Layout, rank: int, kind: str) -> Pieces:
        """Return the part of `holding` that the rank owns: over all ranks these tile the kind, replicated or not."""
        return self.sharding(layout, kind).owned(rank)

    def split_by_tensor(self, pieces: Pieces) -> tuple[Ints, Pieces]:
        """Cut pieces at the ends of tensors; return the tensor number of each, and the pieces."""
        return split_by_tensor(self.line, pieces)

    def with_groups(self, kind: str, groups: Iterable[int]) -> VirtualParameterSpace:
        """Return the same space with a kind limited to the tensors of some optimizer groups (FROZEN is one)."""
        kinds = [replace(each, groups=frozenset(groups)) if each.name == kind else each for each in self.kinds]
        return replace(self, kinds=tuple(kinds), _shardings={})

    def with_layout(self, layout: Layout, members: Iterable[int]) -> VirtualParameterSpace:
        """Return the same state under another layout and world."""
        return replace(self, layout=layout, members=tuple(members))


def check_members(layout: Layout, members: tuple[int, ...]) -> None:
    """Raise LayoutError unless each rank of the layout has one member and no member has two ranks."""
    if len(members) != layout.world_size:
        raise LayoutError(
            f"{layout} has {layout.world_size} ranks and {len(members)} members are given; give {layout.world_size} "
            "members"
        )
    if len(set(members)) != len(members):
        raise LayoutError(f"a member has two ranks in {members}; name each member once")
