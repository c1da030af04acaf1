"""The table of state: every state kind of a logical tensor, where and when it is held; and the kinds of a job.

Every question about a kind by its name is answered by its row in `STATE`. A further kind needs a further row, and the
code that reads it from DeepSpeed's optimizers and puts it back (`adapters/zero/stages`). Values that an optimizer keeps
for each element are *moments*: one row serves them all, and their names come from the optimizer's rule
(`adapters/zero/optimizers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.layout import Layout

WEIGHT = "weight"
MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
STALE_GRAD = "stale_grad"
HOST_GRAD = "host_grad"


@dataclass(frozen=True)
class StateRow:
    """Properties of a state kind that are the same in all jobs.

    element: which of a job's types its elements have. needed_for: the first part of a step that reads or writes it; a
    late switch moves kinds that only the step needs during the first batch. stages: the ZeRO stages that hold it.
    whole_in: the stages among them in which every rank that ZeRO deals a tensor to has all of it. of_frozen: whether
    frozen tensors have it, too. is_cast: whether it can be cast from the master of a trained tensor; copies then leave
    it out. is_offloaded: whether it exists with CPU offload only. pinned_in: the stages in which DeepSpeed pins its
    memory when offloaded. is_moment: whether it comes with the optimizer's first step; all others exist from the start.
    """

    element: Literal["weight", "gradient", "master"] = "master"
    needed_for: Literal["forward", "backward", "step"] = "step"
    stages: frozenset[int] = frozenset({0, 1, 2, 3})
    whole_in: frozenset[int] = frozenset({0})
    of_frozen: bool = False
    is_cast: bool = False
    is_offloaded: bool = False
    pinned_in: frozenset[int] = frozenset()
    is_moment: bool = False

    @property
    def is_gradient(self) -> bool:
        """Whether a backward pass leaves it for the next step; checkpoints of other tools leave it out."""
        return self.needed_for == "backward"


MOMENT = StateRow(is_moment=True)
STATE: Mapping[str, StateRow] = {
    WEIGHT: StateRow("weight", "forward", whole_in=frozenset({0, 1, 2}), of_frozen=True, is_cast=True),
    MASTER: StateRow(pinned_in=frozenset({1, 2})),
    # ZeRO-3 steps a parameter without a gradient with its last one.
    STALE_GRAD: StateRow("gradient", "backward", stages=frozenset({3}), whole_in=frozenset(), pinned_in=frozenset({3})),
    # CPU offload steps it with the last gradient left in that of the master part.
    HOST_GRAD: StateRow(
        needed_for="backward",
        stages=frozenset({1, 2, 3}),
        whole_in=frozenset(),
        is_offloaded=True,
        pinned_in=frozenset({1, 2, 3}),
    ),
}
"""All kinds except moments, by name; a moment cannot have one of these names."""


def row_of(kind: str) -> StateRow:
    """Return the row of a kind in the table; a name that is not in it is a moment's."""
    return STATE.get(kind, MOMENT)


@dataclass(frozen=True)
class Kind:
    """A state kind of one job.

    itemsize: bytes of an element.
    sources: the kinds whose bytes are equal to this one's, itself first; any of them may be read for it.
    derived_from: the kind that a rank can cast it from locally, or None.
    groups: the optimizer groups whose tensors have it; None for all trainable tensors (weights: for all tensors).
    whole_tensors: under ZeRO stages 1 and 2 a rank that has a part of a tensor holds the kind of all of it.
    """

    name: str
    itemsize: int
    sources: tuple[str, ...] = ()
    derived_from: str | None = None
    groups: frozenset[int] | None = None
    whole_tensors: bool = False

    def __post_init__(self) -> None:
        """Put the kind itself first among its sources; LayoutError for an item size below one byte."""
        if self.itemsize < 1:
            raise LayoutError(f"kind {self.name!r} has an item size of {self.itemsize} bytes; give 1 or more")
        others = tuple(name for name in self.sources if name != self.name)
        object.__setattr__(self, "sources", (self.name, *others))

    def is_of(self, group: int) -> bool:
        """Return whether the trainable tensors of an optimizer group have the kind."""
        return self.groups is None or group in self.groups

    def overlaps(self, layout: Layout) -> bool:
        """Return whether several ranks of a layout hold whole tensors of the kind while each owns a part of them."""
        return self.whole_tensors and layout.zero_stage in (1, 2)


def kind_of(kinds: Sequence[Kind], name: str) -> Kind:
    """Return the kind of that name; LayoutError if there is none."""
    for kind in kinds:
        if kind.name == name:
            return kind
    raise LayoutError(f"there is no state kind {name!r}; give one of {', '.join(kind.name for kind in kinds)}")


def standard_kinds(
    weight: int, master: int = 4, moments: Iterable[str | Kind] = (EXP_AVG, EXP_AVG_SQ), **gradients: int
) -> tuple[Kind, ...]:
    """Return the kinds of a training, by bytes per element.

    weight, master: if they are equal (fp32), a weight and its master are the same bytes; otherwise a weight is cast
    from its master. moments: values that the optimizer keeps; a bare name stands for 4 bytes and all groups. gradients:
    the size of each further kind, such as `stale_grad=4`. Raise LayoutError for an item size below one byte.
    """
    same = (WEIGHT, MASTER) if weight == master else ()
    first = Kind(WEIGHT, weight, same, MASTER), Kind(MASTER, master, same)
    kept = (held if isinstance(held, Kind) else Kind(held, 4) for held in moments)
    return *first, *kept, *(Kind(name, size) for name, size in gradients.items())
