"""In this folder the pool is that of the device."""

from __future__ import annotations

import pytest

from tests.engine.pool import RankPool


@pytest.fixture(scope="session")
def pool(lab_pool: RankPool) -> RankPool:
    return lab_pool
