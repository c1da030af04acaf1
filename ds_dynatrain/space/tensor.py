"""Logical tensors, the line of integer coordinates that numbers all their elements, and runs of coordinates.

The line is the Virtual Parameter Space of one state kind: tensor after tensor in registration order, and row-major
within a tensor. Registration follows the optimizer: the trainable tensors of group 0, of group 1, ..., then the frozen
tensors. Neighbors in a flat buffer of ZeRO are therefore neighbors on the line, and a rank's share of a group is a
single run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import interval
from ds_dynatrain.space.interval import Ints

FROZEN = -1
Held = TypeVar("Held")
IN_EMPTY_GROUP = "no tensor of group "
"""Name prefix of the placeholder tensor for an optimizer group that has no tensor on a pipeline stage.

The number of the group follows."""


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of the model, with the shape that it has if every axis has size 1.

    group: the number of its optimizer parameter group, or `FROZEN`.
    expert: whether it belongs to an expert, so that ZeRO partitions it only over the ranks with this expert.
    """

    name: str
    shape: tuple[int, ...]
    group: int = 0
    expert: bool = False

    def __post_init__(self) -> None:
        """Raise LayoutError for a negative dim or a group below -1."""
        if any(dim < 0 for dim in self.shape):
            raise LayoutError(f"tensor {self.name!r}: shape {self.shape} has a negative dim; give dims of 0 or more")
        if self.group < FROZEN:
            raise LayoutError(
                f"tensor {self.name!r}: group {self.group} is below {FROZEN} (frozen); give {FROZEN} or the number of "
                "its group"
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def trainable(self) -> bool:
        """Whether the tensor belongs to an optimizer group; otherwise it is frozen."""
        return self.group != FROZEN

    @property
    def words(self) -> str:
        """Shape and group as text for messages, such as "of shape (4, 4), in optimizer group 1"."""
        group = f"in optimizer group {self.group}" if self.trainable else "frozen"
        return f"of shape {self.shape}, {group}{', an expert' if self.expert else ''}"


@dataclass(frozen=True, eq=False)
class CoordinateLine:
    """The coordinates of all tensors: element i (row-major) of tensor t is coordinate `bases[t] + i`.

    numels: number of elements of each tensor.
    groups: the optimizer group of each tensor, or FROZEN.
    experts: whether each tensor belongs to an expert.
    bases: the coordinate of each tensor's first element, followed by the length of the line.
    trainable_count: number of trainable tensors; they come first.
    """

    tensors: tuple[LogicalTensor, ...]
    numels: Ints = field(init=False, repr=False)
    groups: Ints = field(init=False, repr=False)
    experts: npt.NDArray[np.bool_] = field(init=False, repr=False)
    bases: Ints = field(init=False, repr=False)
    trainable_count: int = field(init=False, repr=False)
    _index: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raise LayoutError if two tensors have the same name, or if the tensors are not ordered by group."""
        names, numels, groups, experts = list[str](), list[int](), list[int](), list[bool]()
        for tensor in self.tensors:
            names.append(tensor.name)
            numels.append(tensor.numel)
            groups.append(tensor.group)
            experts.append(tensor.expert)
        index = dict(zip(names, range(len(names)), strict=True))
        if len(index) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise LayoutError(
                f"{len(names)} tensors have {len(index)} names; used twice: {', '.join(twice)}; give each "
                "tensor a name of its own"
            )
        values = {
            "numels": interval.ints(numels),
            "groups": interval.ints(groups),
            "experts": np.array(experts, dtype=bool),
            "bases": np.cumsum([0, *numels], dtype=np.int64),
            "trainable_count": len(groups) - groups.count(FROZEN),
            "_index": index,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        order = np.where(self.groups == FROZEN, np.iinfo(np.int64).max, self.groups)
        wrong = np.flatnonzero(np.diff(order) < 0)
        if len(wrong):
            before, after = self.tensors[int(wrong[0])], self.tensors[int(wrong[0]) + 1]
            raise LayoutError(
                f"tensor {after.name!r} of group {after.group} is registered after {before.name!r} of group "
                f"{before.group}; register group 0, 1, ... in order and frozen tensors last"
            )

    def __len__(self) -> int:
        """Return the number of coordinates."""
        return int(self.bases[-1])

    def groups_at(self, coordinates: Ints) -> Ints:
        """Return the optimizer group of the tensor at each coordinate, or FROZEN."""
        return self.groups[np.searchsorted(self.bases[:-1], coordinates, side="right") - 1]

    def index(self, name: str) -> int:
        """Return the number of the tensor with the given name. Raises LayoutError if there is none."""
        try:
            return self._index[name]
        except KeyError:
            raise LayoutError(
                f"there is no tensor {name!r} among the {len(self.tensors)} that are registered; give the name of a "
                "parameter of the model"
            ) from None


class BufferId(NamedTuple):
    """The name of a one-dimensional local buffer of one state kind.

    place: "tensor" (a whole tensor), "partition" (a rank's part of a frozen tensor), "group" (the flat buffer of an
    optimizer group) or "subgroup" (the buffer of a ZeRO-3 sub-group).
    index: the number of the tensor, group or sub-group.
    """

    place: str
    index: int  # type: ignore[assignment]  # the field hides tuple.index


def of_kind(buffers: Mapping[tuple[str, BufferId], Held], kind: str) -> dict[BufferId, Held]:
    """Return the buffers of one state kind, keyed by buffer name."""
    return {name: held for (held_kind, name), held in buffers.items() if held_kind == kind}


class Piece(NamedTuple):
    """One run [start, stop) of coordinates, which lies `offset` elements into a buffer."""

    start: int
    stop: int
    buffer: BufferId
    offset: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of coordinates as a struct of int64 arrays, sorted by start and disjoint.

    start, stop: coordinates, half open.
    buffer: index into `buffers`.
    offset: elements into that buffer.
    """

    start: Ints
    stop: Ints
    buffer: Ints
    offset: Ints
    buffers: tuple[BufferId, ...] = ()

    @classmethod
    def empty(cls, buffers: tuple[BufferId, ...] = ()) -> Pieces:
        """Return pieces without a run."""
        return cls(*(np.empty(0, np.int64),) * 4, buffers)

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.start)

    def __iter__(self) -> Iterator[Piece]:
        """Yield the runs one by one."""
        for start, stop, buffer, offset in zip(*np.stack(self.columns).tolist(), strict=True):
            yield Piece(start, stop, self.buffers[buffer], offset)

    @property
    def numel(self) -> int:
        """Number of elements in all pieces."""
        return int((self.stop - self.start).sum())

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The four arrays, in the order of the fields."""
        return self.start, self.stop, self.buffer, self.offset

    def take(self, row: Ints, start: Ints, stop: Ints) -> Pieces:
        """Return the parts [start[i], stop[i]) of pieces number row[i], with adjusted offsets."""
        offset = self.offset[row] + start - self.start[row]
        return replace(self, start=start, stop=stop, buffer=self.buffer[row], offset=offset)

    def intersect(self, other: Pieces) -> tuple[Pieces, Pieces]:
        """Return the runs in both: once with the buffers and offsets of `self`, once with those of `other`."""
        row, run, start, stop = interval.intersect(self.start, self.stop, other.start, other.stop)
        return self.take(row, start, stop), other.take(run, start, stop)

    def restrict(self, start: Ints, stop: Ints) -> Pieces:
        """Return the parts within the sorted, disjoint runs [start[i], stop[i])."""
        row, _, low, high = interval.intersect(self.start, self.stop, start, stop)
        return self.take(row, low, high)

    def subtract(self, start: Ints, stop: Ints) -> Pieces:
        """Return the parts outside the sorted, disjoint runs [start[i], stop[i])."""
        return self.take(*interval.subtract(self.start, self.stop, start, stop))

    def tidy(self) -> Pieces:
        """Return the same elements sorted by start, in the fewest runs."""
        order = np.argsort(self.start, kind="stable")
        return self.take(order, self.start[order], self.stop[order]).coalesce()

    def coalesce(self) -> Pieces:
        """Return the same elements in fewer runs: merge runs that are adjacent on the line and in the buffer."""
        joined = (
            (self.start[1:] == self.stop[:-1])
            & (self.buffer[1:] == self.buffer[:-1])
            & (self.offset[1:] - self.offset[:-1] == self.start[1:] - self.start[:-1])
        )
        first, last = interval.chains(joined, len(self))
        return self.take(first, self.start[first], self.stop[last])


def split_by_tensor(bases: Ints, pieces: Pieces) -> tuple[Ints, Pieces]:
    """Cut pieces at tensor boundaries; return the tensor number of each resulting piece, and the pieces.

    bases: the first coordinate of each tensor, and the end of the line.
    """
    filled = np.flatnonzero(np.diff(bases))
    row, tensor, low, high = interval.intersect(pieces.start, pieces.stop, bases[filled], bases[filled + 1])
    return filled[tensor], pieces.take(row, low, high)
