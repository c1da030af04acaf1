"""In this folder the pool is that of the device."""

from __future__ import annotations

import pytest

from tests.engine.pool import RankPool


@pytest.fixture(scope="session")
def pool(lab_pool: RankPool) -> RankPool:
    return lab_pool


LONG = (
    *("chain_of_20", "accumulation_is_exact", "no_trace", "all_pairs", "and_load[start1", "and_load[start2"),
    *("before_the_first_step", "dropout_goes_on", "idle_member_holds", "streams_stay", "woken_members"),
)
"""Parts of the names of cases that `make test-device` runs, and `make test` does not: it has them on the CPU."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones of this folder are of the full set."""
    for item in items:
        if item.path.parent.name == "core" and any(part in item.name for part in LONG):
            item.add_marker(pytest.mark.full)
