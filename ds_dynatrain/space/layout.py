"""Layouts: the size of every parallel axis, the ZeRO stage, and the numbering of ranks that follows from them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ds_dynatrain.errors import LayoutError

RANK_ORDER = ("pipe", "data", "sequence", "tensor")
STAGES = (0, 1, 2, 3)
OF_AXES = {"pipe": "boundaries", "data": "shares", "expert": "experts"}
"""Map from an axis to the field of a layout that describes the indexes of this axis, such as their shares of samples.
"""
NO_AXES = ("zero_stage", *OF_AXES.values(), "order")
"""Fields of a layout that are not axes."""
ExpertMap = tuple[tuple[tuple[int, ...], ...], ...]
"""For each layer and each index of the expert axis: the numbers of the experts at this index, in storage order."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A complete layout: every axis has a size (1 if not named) and the ZeRO stage has no default.

    world size = pipe x data x sequence x tensor. `expert` divides data x sequence x tensor and adds no ranks; `data`
    never includes `sequence`. Ranks are numbered with the pipe index varying slowest, then data, sequence and tensor.

    boundaries: the first layer of each pipeline stage, followed by the number of layers, such as (0, 3, 7) for layers 0
        to 2 and 3 to 6. None lets the model's partition method decide.
    shares: how many samples of a global batch each index of the data axis gets, such as (3, 5). None divides the
        samples as evenly as possible.
    order: the order of tensors in the flat buffers of ZeRO stages 1 and 2, as half-open ranges of tensor numbers: (4,
        6, 0, 4) stands for 4, 5, 0, 1, 2, 3. None is DeepSpeed's order. Switches choose it; see `dynatrain.owners`.
    experts: for each layer with experts, the experts at each index of the expert axis, such as (((0, 2), (1, 3)),) for
        one layer and expert=2. None gives the first index the first experts, and so on; a map equal to this default
        becomes None.

    Raises LayoutError for a size below 1, a stage that is not 0, 1, 2 or 3, an expert size that does not divide,
    boundaries that do not make `pipe` stages of at least one layer each, an index without a share of at least 1, an
    order in which a number does not occur exactly once, indices with unequal numbers of experts, and an expert at
    several indices.
    """

    zero_stage: int
    data: int = 1
    pipe: int = 1
    expert: int = 1
    tensor: int = 1
    sequence: int = 1
    boundaries: tuple[int, ...] | None = None
    shares: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    experts: ExpertMap | None = None

    def __post_init__(self) -> None:
        """Raise LayoutError, stating the arithmetic that fails, if the sizes do not form a valid layout."""
        for name, value in {**self.axes(), "zero_stage": self.zero_stage}.items():
            if not _is_whole(value):
                raise LayoutError(f"{name}={value!r} is not a whole number; give 1, 2, ..., and for zero_stage 0 to 3")
        if self.zero_stage not in STAGES:
            raise LayoutError(
                f"zero_stage={self.zero_stage} is no ZeRO stage; give one of {', '.join(map(str, STAGES))}"
            )
        for name, size in self.axes().items():
            if size < 1:
                raise LayoutError(f"{name}={size} is below 1; leave an axis out to give it the size 1")
        width = self.ranks_per_stage
        if width % self.expert:
            raise LayoutError(
                f"expert={self.expert} does not divide data x sequence x tensor = {self.data} x {self.sequence} x "
                f"{self.tensor} = {width} (remainder {width % self.expert}); give a divisor of {width}"
            )
        for name, example in (("boundaries", "(0, 3, 7)"), ("shares", "(3, 5)"), ("order", "(4, 6, 0, 4), or None")):
            numbers = getattr(self, name)
            if numbers is not None and not (isinstance(numbers, tuple) and all(map(_is_whole, numbers))):
                raise LayoutError(f"{name}={numbers!r} is no tuple of whole numbers; give one such as {example}")
        if self.boundaries is not None:
            _check_boundaries(self.boundaries, self.pipe)
        if self.shares is not None:
            _check_shares(self.shares, self.data)
        if self.order is not None:
            _check_order(self.order)
        if self.experts is not None:
            _check_experts(self.experts, self.expert)
            if not self.moved_experts:
                object.__setattr__(self, "experts", None)

    def axes(self) -> dict[str, int]:
        """Return the size of every axis, by name."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in NO_AXES)
        return {name: getattr(self, name) for name in names}

    @property
    def world_size(self) -> int:
        """Number of ranks: pipe x data x sequence x tensor."""
        return math.prod(getattr(self, axis) for axis in RANK_ORDER)

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks of a pipeline stage, which are consecutive: data x sequence x tensor."""
        return self.data * self.sequence * self.tensor

    @property
    def moved_experts(self) -> int:
        """Number of experts, over all layers, whose position in `experts` differs from the default."""
        pairs = (pair for layer in self.experts or () for pair in enumerate(itertools.chain(*layer)))
        return sum(place != expert for place, expert in pairs)

    def expert_place(self, rank: int) -> tuple[int, int]:
        """Return (a rank's index on the expert axis, its position among the ranks of its stage with this index).

        Consecutive ranks of a stage share one set of experts, regardless of their indexes on other axes.
        """
        place, index = divmod(rank % self.ranks_per_stage, self.expert)
        return index, place

    def replace(self, **changes: Any) -> Layout:
        """Return a copy of the layout with some fields changed. Raises LayoutError for an unknown name.

        A new `pipe` resets the boundaries, a new `data` the shares, and a new `expert` the map of experts, because
        these fit only one size. Every change resets the order.
        """
        names = tuple(field.name for field in dataclasses.fields(self))
        unknown = sorted(set(changes) - set(names))
        if unknown:
            raise LayoutError(f"a layout has no {', '.join(map(repr, unknown))}; give one of {', '.join(names)}")
        was = {axis: getattr(self, axis) for axis in OF_AXES}
        dropped = {name: None for axis, name in OF_AXES.items() if changes.get(axis, was[axis]) != was[axis]}
        lists = {name: _as_tuple(value) for name, value in changes.items() if isinstance(value, list | tuple)}
        found = dataclasses.replace(self, **{**dropped, **changes, **lists})
        return found if found == self or "order" in changes else dataclasses.replace(found, order=None)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return a rank's index on each axis that adds ranks (all but `expert`).

        Raises LayoutError for a rank outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank} is not in a world of {self.world_size} ({self}); give 0 to {self.world_size - 1}"
            )
        place = {}
        for axis in reversed(RANK_ORDER):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in RANK_ORDER}

    def rank(self, **place: int) -> int:
        """Return the rank with the given indexes (0 on axes not named). This is the inverse of `coordinate`.

        Raises LayoutError for an unknown axis, or an index outside its axis.
        """
        unknown = sorted(set(place) - set(RANK_ORDER))
        if unknown:
            raise LayoutError(
                f"no axis {', '.join(map(repr, unknown))} orders ranks; give one of {', '.join(RANK_ORDER)}"
            )
        rank = 0
        for axis in RANK_ORDER:
            size, index = getattr(self, axis), place.get(axis, 0)
            if not 0 <= index < size:
                raise LayoutError(f"{axis} index {index} is not below {axis}={size}; give 0 to {size - 1}")
            rank = rank * size + index
        return rank

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as JSON-compatible values. Boundaries, shares, experts and order are left out if None."""
        found: dict[str, Any] = {**self.axes(), "zero_stage": self.zero_stage}
        for name in (*OF_AXES.values(), "order"):
            if (numbers := getattr(self, name)) is not None:
                found[name] = _as_list(numbers)
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        """Return the layout that `to_dict` wrote. Axes that are missing have size 1.

        Raises LayoutError for an unknown name or a missing stage.
        """
        if "zero_stage" not in values:
            raise LayoutError(
                f"zero_stage is missing among {', '.join(values) or 'nothing'}, and it has no default; give "
                "zero_stage=0, 1, 2 or 3"
            )
        return cls(zero_stage=values["zero_stage"]).replace(**values)

    def __str__(self) -> str:
        """Return a short form for people, such as "data=4 zero_stage=2".

        Axes of size 1, except data, are left out. An order of tensors appears as "owners=nearest".
        """
        parts = []
        for name, size in self.axes().items():
            if size != 1 or name == "data":
                parts.append(f"{name}={size}")
        for name in ("boundaries", "shares"):
            if (numbers := getattr(self, name)) is not None:
                parts.append(f"{name}={','.join(map(str, numbers))}")
        if self.order is not None:
            parts.append("owners=nearest")
        if self.experts is not None:
            parts.append(f"experts=moved:{self.moved_experts}")
        return " ".join([*parts, f"zero_stage={self.zero_stage}"])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_boundaries(boundaries: tuple[int, ...], pipe: int) -> None:
    """Raise LayoutError unless the boundaries divide the layers into `pipe` stages of at least one layer each."""
    if len(boundaries) != pipe + 1:
        raise LayoutError(
            f"boundaries={boundaries} cut {max(0, len(boundaries) - 1)} stages and pipe is {pipe}: give the first "
            f"layer of each stage and the number of layers, {pipe + 1} numbers"
        )
    if boundaries[0] != 0:
        raise LayoutError(f"boundaries={boundaries} leave out layers 0 to {boundaries[0] - 1}; begin with 0")
    for stage, (start, stop) in enumerate(itertools.pairwise(boundaries)):
        if start >= stop:
            raise LayoutError(
                f"boundaries={boundaries} give stage {stage} no layer: {start} is not below {stop}; give ascending "
                "numbers"
            )


def _check_shares(shares: tuple[int, ...], data: int) -> None:
    """Raise LayoutError unless each index of the data axis has a share of at least one sample."""
    if len(shares) != data:
        raise LayoutError(f"shares={shares} are for {len(shares)} data indices and data is {data}; give {data} shares")
    if min(shares) < 1:
        index = shares.index(min(shares))
        raise LayoutError(f"shares={shares} leave data index {index} without a sample; use fewer data ranks")


def _check_order(order: tuple[int, ...]) -> None:
    """Raise LayoutError unless the runs are a permutation of the numbers from 0."""
    if len(order) % 2:
        raise LayoutError(f"order={order!r} is no tuple of runs; give one such as (4, 6, 0, 4), or None")
    reached = 0
    for start, stop in sorted(zip(order[::2], order[1::2], strict=True)):
        if start != reached or stop <= start:
            raise LayoutError(f"order={order} does not have each tensor once: see the run {start} to {stop}; give None")
        reached = stop


def _check_experts(experts: ExpertMap, size: int) -> None:
    """Raise LayoutError, naming the layer, unless every layer assigns each expert to exactly one of `size` indices, and
    equally many experts to each index.
    """
    if not isinstance(experts, tuple) or not all(
        isinstance(layer, tuple) and all(isinstance(held, tuple) and all(map(_is_whole, held)) for held in layer)
        for layer in experts
    ):
        raise LayoutError(
            f"experts={experts!r} is no map of experts; give for each layer the experts of each index of the expert "
            "axis, such as (((0, 2), (1, 3)),)"
        )
    for number, layer in enumerate(experts):
        counts, every = tuple(map(len, layer)), sorted(itertools.chain(*layer))
        if len(layer) != size:
            raise LayoutError(
                f"experts of layer {number} are for {len(layer)} indices and expert is {size}: give {size} lists"
            )
        if len(set(counts)) != 1:
            raise LayoutError(
                f"experts of layer {number}: the indices have {', '.join(map(str, counts))} of {len(every)} experts; "
                "give each equally many"
            )
        if every != list(range(len(every))):
            twice = sorted({one for one, two in itertools.pairwise(every) if one == two})
            wrong = sorted({*every} - {*range(len(every))})
            left = sorted({*range(len(every))} - {*every})
            raise LayoutError(
                f"experts of layer {number}: of 0 to {len(every) - 1}, {left} have no index, {twice} have two, and "
                f"{wrong} do not exist; name each expert once"
            )
    if size == 1 and any(layer[0] != tuple(range(len(layer[0]))) for layer in experts):
        raise LayoutError("experts are given an order and expert is 1, where each rank has all of them; leave them out")


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _as_list(value: Any) -> Any:
    return list(map(_as_list, value)) if isinstance(value, tuple) else value


def whole_replicas(layout: Layout, alive: Collection[int]) -> list[int]:
    """Return the data indexes whose ranks are all alive and that form complete blocks of the expert axis.

    The ranks at these indexes together hold the whole state. With ZeRO the result is either all indexes or none.

    alive: the ranks that are alive.
    """
    if len(alive) == layout.world_size:
        return list(range(layout.data))
    if layout.zero_stage > 0:
        return []
    block = layout.expert
    if layout.data % block:  # the expert axis spans other axes, too
        return []
    lost = {layout.coordinate(rank)["data"] for rank in range(layout.world_size) if rank not in alive}
    blocks = [range(start, start + block) for start in range(0, layout.data, block)]
    return [index for each in blocks if not lost & {*each} for index in each]
