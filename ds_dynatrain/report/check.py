"""A line of what `ds-dynatrain doctor` says about this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One line about this machine. is_well: None where there is nothing to judge. note: what to do, or what for."""

    name: str
    value: str
    is_well: bool | None = None
    note: str = ""
