"""A thing that was asked for and cannot follow the world, with a way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ds_dynatrain.errors import UnsupportedError

BLOCK = "dynatrain"
"""What a DeepSpeed configuration has for this package."""
AXES = ("pipe", "tensor", "expert", "sequence")
"""Of a layout, which frameworks that give each rank samples of its own cannot have."""


class Refusal(NamedTuple):
    """is_wanted: whether what a framework was given asks for it."""

    name: str
    is_wanted: Callable[[Any], bool]
    why: str
    instead: str


def refuse(refusals: Iterable[Refusal], given: Any) -> None:
    """UnsupportedError for the first that is asked for."""
    for refusal in refusals:
        if refusal.is_wanted(given):
            raise UnsupportedError(f"{refusal.name}: {refusal.why}; {refusal.instead}")
