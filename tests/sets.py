"""How much the default set plays of what the full set plays whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

FULL = pytest.mark.full
is_full = False
"""Set by conftest.py before any module of tests is imported."""


def examples(count: int) -> int:
    """Return how many examples hypothesis draws: `count` in the full set, a fourth in the default set."""
    return count if is_full else -(-count // 4)


def one_in(every: int, cases: Iterable[Any]) -> list[Any]:
    """Return parameters of which the default set has the first and each `every`-th after it."""
    return [pytest.param(case, marks=FULL if number % every else ()) for number, case in enumerate(cases)]
