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
HOST_GRAD = "host_grad"
"""The gradient of a master part under CPU offload: kept from step to step, and stepped with again by what got none."""


@dataclass(frozen=True)
class Kind:
    """One per-element state.

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
        """Whether the trainable tensors of an optimizer group have it."""
        return self.groups is None or group in self.groups


def kind_of(kinds: Iterable[Kind], name: str) -> Kind:
    """The kind of that name; LayoutError if there is none."""
    known = {kind.name: kind for kind in kinds}
    if name not in known:
        raise LayoutError(f"there is no state kind {name!r}; give one of {', '.join(known)}")
    return known[name]


def standard_kinds(
    weight: int,
    master: int = 4,
    moments: Iterable[str | Kind] = (EXP_AVG, EXP_AVG_SQ),
    stale_grad: int | None = None,
    host_grad: int | None = None,
) -> tuple[Kind, ...]:
    """The kinds of a training, by bytes per element.

    weight, master: where they are equal a weight and its master are the same bytes (fp32), else a weight is cast from
    its master. moments: what an optimizer keeps; a mere name is of 4 bytes and of all groups. stale_grad: of ZeRO-3's
    last gradients, host_grad: of those that CPU offload keeps; None leaves the kind out. LayoutError for an item
    size below one byte.
    """
    if weight == master:
        first = (Kind(WEIGHT, weight, (WEIGHT, MASTER), MASTER), Kind(MASTER, master, (MASTER, WEIGHT)))
    else:
        first = (Kind(WEIGHT, weight, (WEIGHT,), MASTER), Kind(MASTER, master))
    stale = () if stale_grad is None else (Kind(STALE_GRAD, stale_grad),)
    host = () if host_grad is None else (Kind(HOST_GRAD, host_grad),)
    return (*first, *(held if isinstance(held, Kind) else Kind(held, 4) for held in moments), *stale, *host)
