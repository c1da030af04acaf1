"""Refusals of features that cannot follow the world. Each refusal names an alternative."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ds_dynatrain.errors import UnsupportedError

BLOCK = "dynatrain"
"""Key of this package's block in a DeepSpeed configuration."""
AXES = ("pipe", "tensor", "expert", "sequence")
"""Axes of a layout that are refused in frameworks that give each rank its own samples."""


class Refusal(NamedTuple):
    """A feature that is refused.

    name: the name of the feature.
    is_wanted: function that returns whether a framework's settings request the feature.
    why: the reason for the refusal.
    instead: what to do instead.
    """

    name: str
    is_wanted: Callable[[Any], bool]
    why: str
    instead: str


def refuse(refusals: Iterable[Refusal], given: Any) -> None:
    """Raise UnsupportedError for the first refused feature that the settings request."""
    for refusal in refusals:
        if refusal.is_wanted(given):
            raise UnsupportedError(f"{refusal.name}: {refusal.why}; {refusal.instead}")
