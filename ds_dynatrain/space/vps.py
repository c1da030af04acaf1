"""The Virtual Parameter Space: each element of training state has one coordinate, whichever rank holds it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import zero
from ds_dynatrain.space.cut import WHOLE, Partition, Partitioner, is_partitioned, shared_stages
from ds_dynatrain.space.interval import Ints, ints
from ds_dynatrain.space.kind import Kind, kind_of, row_of
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.mesh import Mesh
from ds_dynatrain.space.sharding import GroupedSharding, Sharding
from ds_dynatrain.space.strips import Strips
from ds_dynatrain.space.tensor import BufferId, CoordinateLine, LogicalTensor, Pieces, split_by_tensor
from ds_dynatrain.space.tiling import Tiling
from ds_dynatrain.space.zero import LocalSpace


@dataclass(frozen=True, eq=False)
class VirtualParameterSpace:
    """The tensors of a model, the rules that partition them, their state kinds, and the current layout and members.

    members: the member at each rank.
    partitioner: how a layout's pipe, expert and tensor axes partition the tensors, or None if these axes always have
    size 1.
    tiling: how coordinates number the elements of a tensor, in a space made by `tiled`; None for row-major order.
    tensors, bases: copies of the fields of `line`.

    Cached results do not depend on the members, so `with_layout` shares the caches.
    """

    line: CoordinateLine
    rules: zero.ZeroRules
    kinds: tuple[Kind, ...]
    layout: Layout
    members: tuple[int, ...]
    partitioner: Partitioner | None = None
    tiling: Tiling | None = None
    tensors: tuple[LogicalTensor, ...] = field(init=False, repr=False)
    bases: Ints = field(init=False, repr=False)
    _meshes: dict[Layout, Mesh] = field(default_factory=dict, repr=False)
    _shardings: dict[tuple[Layout, str], Sharding] = field(default_factory=dict, repr=False)
    _tables: dict[Layout, tuple[BufferId, ...]] = field(default_factory=dict, repr=False)
    _tiled: dict[tuple[Layout, Layout], VirtualParameterSpace] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        tensors: Iterable[LogicalTensor],
        rules: zero.ZeroRules,
        kinds: Iterable[Kind],
        layout: Layout,
        members: Iterable[int],
        partitioner: Partitioner | None = None,
    ) -> VirtualParameterSpace:
        """Build a space from tensors in registration order.

        Raises LayoutError if `CoordinateLine` or the space itself rejects its arguments.
        """
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
        """Return the state kind with the given name. Raises LayoutError if there is none."""
        return kind_of(self.kinds, name)

    def present_kinds(self, layout: Layout | None = None, among: Collection[str] | None = None) -> tuple[str, ...]:
        """Return the names of the state kinds that a layout (the current one if None) holds.

        among: the kinds to consider; None for all.
        """
        found = []
        for kind in self.kinds:
            if self.is_held(layout or self.layout, kind.name) and (among is None or kind.name in among):
                found.append(kind.name)
        return tuple(found)

    def mesh(self, layout: Layout) -> Mesh | None:
        """Return which rank holds which part of each tensor before ZeRO partitions it. The result is cached.

        Returns None if every rank holds every tensor.

        Raises LayoutError if the space has no partitioner and an axis needs one, if an axis cannot cut a tensor, or if
        tensor-parallel ranks would have different numbers of ZeRO-3 sub-groups.
        """
        cuts = is_partitioned(layout)
        if not cuts and not self.line.experts.any() and self.tiling is None:
            return None
        if layout not in self._meshes:
            if cuts and self.partitioner is None:
                raise LayoutError(
                    f"{layout}: this model is dealt out by data and sequence only; give other axes size 1"
                )
            partition = self.partitioner(layout) if cuts and self.partitioner else (WHOLE,) * len(self.tensors)
            mesh = Mesh(self.line, layout, partition, self.tiling)
            if layout.zero_stage == 3 and layout.tensor > 1:  # they sum norms sub-group by sub-group
                lines = dict.fromkeys(mesh.local_line(group.place) for group in mesh.shard_groups)
                counts = [zero.subgroup_count(line, self.rules, layout) for line in lines]
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
        """Return the part of the state that a rank holds, expressed in its local tensors."""
        mesh, layout = self.mesh(layout), zero.as_cut(self.rules, layout)
        if mesh is None:
            return LocalSpace(self.line, self.rules, self.kinds, layout, rank)
        places = mesh.zero_rank(rank), layout.expert_place(rank)[1]
        return LocalSpace(mesh.local_line(mesh.place(rank)), self.rules, self.kinds, layout, *places)

    def sharding(self, layout: Layout, kind: str) -> Sharding:
        """Return how a layout distributes a state kind over its ranks. The result is cached."""
        layout = zero.as_cut(self.rules, layout)
        key = (layout, kind)
        if key not in self._shardings:
            mesh, held = self.mesh(layout), self.kind(kind)
            if mesh is None:
                self._shardings[key] = zero.sharding(self.line, self.rules, layout, held)
            else:  # most shard groups share one local line, so cache by line
                line_of = mesh.local_line
                cut = cache(lambda line, experts: zero.sharding(line, self.rules, layout, held, experts))
                self._shardings[key] = GroupedSharding(
                    mesh, cache(lambda group: cut(line_of(group.place), group.experts)), self.buffers(layout)
                )
        return self._shardings[key]

    def tiled(self, target: Layout) -> VirtualParameterSpace:
        """Return the space in which a switch from the current layout to a target layout is planned.

        If either layout cuts tensors along a dim other than the first, this is a space with a tiling for both layouts;
        otherwise it is this space itself. Buffers and their contents are the same; only coordinates differ, and
        `logical` converts them to row-major ones. The result is cached for the latest pair of layouts.
        """
        pair = self.layout, target
        if pair not in self._tiled:
            meshes = [mesh for mesh in (self.mesh(self.layout), self.mesh(target)) if mesh is not None]
            forms = list(zip([tensor.shape for tensor in self.tensors], *(mesh.forms for mesh in meshes), strict=True))
            tiling = Tiling.of(self.line, forms, lambda tensor: chain(*(mesh.shards(tensor) for mesh in meshes)))
            self._tiled.clear()
            self._tiled[pair] = self if tiling is None else self._with(tiling)
        return self._tiled[pair]

    def _with(self, tiling: Tiling) -> VirtualParameterSpace:
        def partition(layout: Layout) -> Partition:
            mesh = self.mesh(layout)
            return (WHOLE,) * len(self.tensors) if mesh is None else mesh.partition

        return replace(self, partitioner=partition, tiling=tiling, _meshes={}, _shardings={}, _tiled={})

    @cached_property
    def logical(self) -> Strips:
        """Strips that map the coordinates of this space to coordinates in row-major order."""
        if self.tiling is not None:
            return self.tiling.strips
        return Strips.of(ints([0]), len(self.line), ints([0]))

    def buffers(self, layout: Layout) -> tuple[BufferId, ...]:
        """Return all buffers that a rank may have under a layout; `Pieces` number buffers in this order. Cached."""
        if layout not in self._tables:
            mesh, cut = self.mesh(layout), zero.as_cut(self.rules, layout)
            names: dict[BufferId, None] = {}
            lines = [self.line]
            if mesh is not None and cut.zero_stage == 3:  # only the number of sub-groups depends on local shapes
                lines = [mesh.local_line(group.place) for group in mesh.shard_groups]
            for line in dict.fromkeys(lines):
                names.update(dict.fromkeys(zero.buffer_table(line, self.rules, cut)))
            self._tables[layout] = tuple(names)
        return self._tables[layout]

    def holding(self, layout: Layout, rank: int, kind: str) -> Pieces:
        """Return the disjoint pieces of a state kind that a rank holds."""
        return self.sharding(layout, kind).holding(rank)

    def is_held(self, layout: Layout, kind: str) -> bool:
        """Return whether the layout holds the state kind."""
        return layout.zero_stage in row_of(kind).stages

    def is_replicated(self, layout: Layout, kind: str) -> bool:
        """Return whether ZeRO keeps the state kind whole on every rank of a ZeRO group."""
        return zero.as_cut(self.rules, layout).zero_stage in row_of(kind).whole_in

    def owned(self, layout: Layout, rank: int, kind: str) -> Pieces:
        """Return the pieces of a state kind that a rank owns: a part of those that it holds.

        Each element has exactly one owner, even if it is replicated.
        """
        return self.sharding(layout, kind).owned(rank)

    def split_by_tensor(self, pieces: Pieces) -> tuple[Ints, Pieces]:
        """Cut pieces at tensor boundaries; return the tensor number of each resulting piece, and the pieces."""
        return split_by_tensor(self.bases, pieces)

    def with_groups(self, kind: str, groups: Iterable[int]) -> VirtualParameterSpace:
        """Return a copy of the space with a state kind limited to the given optimizer groups (may include FROZEN)."""
        kinds = [replace(each, groups=frozenset(groups)) if each.name == kind else each for each in self.kinds]
        return replace(self, kinds=tuple(kinds), _shardings={}, _tiled={})

    def with_layout(self, layout: Layout, members: Iterable[int]) -> VirtualParameterSpace:
        """Return a copy of the space with another layout and other members."""
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
