"""`Check`, one line of the report of `ds-dynatrain doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One line of the report of `ds-dynatrain doctor`, about this machine.

    name: the property that was checked.
    value: the value that was found.
    is_well: whether a job can run with this value; None if any value is acceptable.
    note: what to do about the value, or its purpose.
    """

    name: str
    value: str
    is_well: bool | None = None
    note: str = ""
