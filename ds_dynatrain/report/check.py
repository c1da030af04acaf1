"""One line of the report of `ds-dynatrain doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One line of the report of `ds-dynatrain doctor`, about this machine.

    is_well: whether a job can run with this value; None where any value will do. note: what to do about it, or what the
    value is for.
    """

    name: str
    value: str
    is_well: bool | None = None
    note: str = ""
