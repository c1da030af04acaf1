"""State kinds: what is held of a logical tensor, and from which other kind a rank could make it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ds_dynatrain.errors import LayoutError

WEIGHT = "weight"
MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
STALE_GRAD = "stale_grad"


@dataclass(frozen=True)
class Kind:
    """One per-element state.

    itemsize: bytes of an element.
    sources: the kinds whose bytes are equal to this one's, itself first; any of them may be read for it.
    derived_from: the kind that a rank can cast it from locally, or None.
    """

    name: str
    itemsize: int
    sources: tuple[str, ...] = ()
    derived_from: str | None = None

    def __post_init__(self) -> None:
        """Put the kind itself first among its sources; LayoutError for an item size below one byte."""
        if self.itemsize < 1:
            raise LayoutError(f"kind {self.name!r}: item size of {self.itemsize} bytes")
        others = tuple(name for name in self.sources if name != self.name)
        object.__setattr__(self, "sources", (self.name, *others))


def standard_kinds(
    precision: str, moments: Iterable[str] = (EXP_AVG, EXP_AVG_SQ), stale_grad: bool = False
) -> tuple[Kind, ...]:
    """The kinds of a training in "fp32" or "bf16" with an optimizer that keeps `moments`.

    In fp32 a weight and its master are the same bytes; in bf16 a weight is cast from its master. LayoutError for any
    other precision.
    """
    if precision == "fp32":
        size = 4
        first = (Kind(WEIGHT, 4, (WEIGHT, MASTER), MASTER), Kind(MASTER, 4, (MASTER, WEIGHT)))
    elif precision == "bf16":
        size = 2
        first = (Kind(WEIGHT, 2, (WEIGHT,), MASTER), Kind(MASTER, 4))
    else:
        raise LayoutError(f"precision {precision!r} is neither 'fp32' nor 'bf16'")
    stale = (Kind(STALE_GRAD, size),) if stale_grad else ()
    return (*first, *(Kind(name, 4) for name in moments), *stale)
