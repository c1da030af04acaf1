"""Logical tensors, and the one line of integer coordinates on which all of their elements lie.

The line is the Virtual Parameter Space of one state kind: tensor after tensor in the order of registration, row-major
inside a tensor. Registration follows the optimizer (group 0's trainable tensors in order, group 1's, ..., then the
frozen ones), so neighbors in one of ZeRO's flat buffers are neighbors on the line and a rank's share of a group is a
single run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds_dynatrain.errors import LayoutError

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FROZEN = -1
IN_EMPTY_GROUP = "no tensor of group "
"""With its number: the element that stands for a group where a pipeline stage has nothing of it."""


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of the model as if every axis had size 1.

    group: its optimizer parameter group, or `FROZEN`. expert: ZeRO deals it to the ranks of an expert-data group only.
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
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def trainable(self) -> bool:
        """Whether an optimizer group owns the tensor."""
        return self.group != FROZEN

    @property
    def words(self) -> str:
        """Shape and group for messages, such as "of shape (4, 4), in optimizer group 1"."""
        group = f"in optimizer group {self.group}" if self.trainable else "frozen"
        return f"of shape {self.shape}, {group}{', an expert' if self.expert else ''}"


@dataclass(frozen=True, eq=False)
class Line:
    """The coordinates of all tensors: element i (row-major) of tensor t is coordinate `bases[t] + i`.

    `bases` has one entry more than there are tensors; the last is the length of the line.
    """

    tensors: tuple[LogicalTensor, ...]
    bases: Ints = field(init=False)
    numels: Ints = field(init=False)
    groups: Ints = field(init=False)
    experts: Flags = field(init=False)
    _index: dict[str, int] = field(init=False, repr=False)

    def __init__(self, tensors: Iterable[LogicalTensor]) -> None:
        """Lay the tensors out in the order given; LayoutError for a double name or an order that splits a group."""
        ordered = tuple(tensors)
        numels = np.array([tensor.numel for tensor in ordered], dtype=np.int64)
        groups = np.array([tensor.group for tensor in ordered], dtype=np.int64)
        object.__setattr__(self, "tensors", ordered)
        object.__setattr__(self, "numels", numels)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "experts", np.array([tensor.expert for tensor in ordered], dtype=bool))
        object.__setattr__(self, "bases", np.concatenate([np.zeros(1, np.int64), np.cumsum(numels)]))
        object.__setattr__(self, "_index", {tensor.name: index for index, tensor in enumerate(ordered)})
        self._check()

    def _check(self) -> None:
        if len(self._index) != len(self.tensors):
            names = [tensor.name for tensor in self.tensors]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise LayoutError(
                f"{len(names)} tensors have {len(self._index)} names; used twice: {', '.join(twice)}; give each "
                "tensor a name of its own"
            )
        order = np.where(self.groups == FROZEN, np.iinfo(np.int64).max, self.groups)
        wrong = np.flatnonzero(np.diff(order) < 0)
        if len(wrong):
            before, after = self.tensors[int(wrong[0])], self.tensors[int(wrong[0]) + 1]
            raise LayoutError(
                f"tensor {after.name!r} of group {after.group} is registered after {before.name!r} of group "
                f"{before.group}; register group 0, 1, ... in order and frozen tensors last"
            )

    def __len__(self) -> int:
        """Number of coordinates."""
        return int(self.bases[-1])

    @property
    def trainable_count(self) -> int:
        """Number of trainable tensors; they come first."""
        return int(np.count_nonzero(self.groups != FROZEN))

    def groups_at(self, coordinates: Ints) -> Ints:
        """Optimizer group of the tensor at each coordinate, or FROZEN."""
        return self.groups[np.searchsorted(self.bases[:-1], coordinates, side="right") - 1]

    def index(self, name: str) -> int:
        """Place of the tensor in the registration; LayoutError if there is none of that name."""
        try:
            return self._index[name]
        except KeyError:
            raise LayoutError(
                f"there is no tensor {name!r} among the {len(self.tensors)} that are registered; give the name of a "
                "parameter of the model"
            ) from None
