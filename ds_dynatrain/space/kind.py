"""State kinds (weight, master, moments, ...): their properties, and the kinds of one job.

The row of a kind in `STATE` holds its properties. To add a kind, add a row, and the code that reads and writes the kind
in DeepSpeed's optimizers (`adapters/zero/stages`). Values that an optimizer keeps per element are *moments*: they all
share one row, and the optimizer's rule names them (`adapters/zero/optimizers`).
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

    element: which of the job's data types the kind has.
    needed_for: the first phase of a step that reads or writes the kind. A late switch sends kinds that only
        the optimizer step needs after training has resumed, during the first batch.
    stages: the ZeRO stages that hold the kind.
    whole_in: the stages in which each rank of a ZeRO group holds the whole kind.
    of_frozen: whether frozen tensors also have the kind.
    is_cast: whether the kind can be cast from the master of a trained tensor; copies then omit it.
    is_offloaded: whether the kind exists only with CPU offload.
    pinned_in: the stages in which DeepSpeed pins the kind's memory when it is offloaded.
    is_moment: whether the kind exists only after the optimizer's first step; other kinds exist from the start.
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
        """Whether the kind is a gradient that a backward pass leaves for the next step.

        Checkpoints of other tools do not contain such kinds.
        """
        return self.needed_for == "backward"


MOMENT = StateRow(is_moment=True)
STATE: Mapping[str, StateRow] = {
    WEIGHT: StateRow("weight", "forward", whole_in=frozenset({0, 1, 2}), of_frozen=True, is_cast=True),
    MASTER: StateRow(pinned_in=frozenset({1, 2})),
    # ZeRO-3 steps a parameter that got no gradient with its previous gradient.
    STALE_GRAD: StateRow("gradient", "backward", stages=frozenset({3}), whole_in=frozenset(), pinned_in=frozenset({3})),
    # With CPU offload such a parameter is stepped with the previous gradient left in its master part.
    HOST_GRAD: StateRow(
        needed_for="backward",
        stages=frozenset({1, 2, 3}),
        whole_in=frozenset(),
        is_offloaded=True,
        pinned_in=frozenset({1, 2, 3}),
    ),
}
"""A map from name to row for all state kinds except moments. No moment can have one of these names."""


def row_of(kind: str) -> StateRow:
    """Return the properties of a state kind. A name that `STATE` does not list is taken as that of a moment."""
    return STATE.get(kind, MOMENT)


@dataclass(frozen=True)
class Kind:
    """A state kind of one job.

    itemsize: bytes per element.
    sources: the kinds with the same bytes as this kind, beginning with itself; any of them may be read instead of it.
    derived_from: the kind from which a rank can cast this one locally, or None.
    groups: the optimizer groups whose tensors have the kind; None for all trainable tensors (weights: all tensors).
    whole_tensors: whether, under ZeRO stages 1 and 2, a rank that owns a part of a tensor holds the whole tensor.
    """

    name: str
    itemsize: int
    sources: tuple[str, ...] = ()
    derived_from: str | None = None
    groups: frozenset[int] | None = None
    whole_tensors: bool = False

    def __post_init__(self) -> None:
        """Put the kind itself first among its sources. Raises LayoutError if the item size is below one byte."""
        if self.itemsize < 1:
            raise LayoutError(f"kind {self.name!r} has an item size of {self.itemsize} bytes; give 1 or more")
        others = tuple(name for name in self.sources if name != self.name)
        object.__setattr__(self, "sources", (self.name, *others))

    def is_of(self, group: int) -> bool:
        """Return whether the trainable tensors of the optimizer group with number `group` have this kind."""
        return self.groups is None or group in self.groups

    def overlaps(self, layout: Layout) -> bool:
        """Return whether, under a layout, a rank that owns part of a tensor of this kind holds the whole tensor."""
        return self.whole_tensors and layout.zero_stage in (1, 2)


def kind_of(kinds: Sequence[Kind], name: str) -> Kind:
    """Return the state kind with the given name. Raises LayoutError if there is none."""
    for kind in kinds:
        if kind.name == name:
            return kind
    raise LayoutError(f"there is no state kind {name!r}; give one of {', '.join(kind.name for kind in kinds)}")


def standard_kinds(
    weight: int, master: int = 4, moments: Iterable[str | Kind] = (EXP_AVG, EXP_AVG_SQ), **gradients: int
) -> tuple[Kind, ...]:
    """Return the state kinds of a job. Sizes are in bytes per element.

    weight, master: sizes of weights and of masters. If these are equal (fp32), a weight and its master have the same
    bytes; otherwise the weight is cast from the master.
    moments: the values that the optimizer keeps; a name alone means 4 bytes and all groups.
    gradients: the size of each further kind, such as `stale_grad=4`.
    Raises LayoutError for a size below 1.
    """
    same = (WEIGHT, MASTER) if weight == master else ()
    first = Kind(WEIGHT, weight, same, MASTER), Kind(MASTER, master, same)
    kept = (held if isinstance(held, Kind) else Kind(held, 4) for held in moments)
    return *first, *kept, *(Kind(name, size) for name, size in gradients.items())
