"""Ranks for trainers: processes of their own, since `deepspeed.initialize` is ours in them from the first case on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.pool import RankPool


@pytest.fixture(scope="package")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four ranks."""
    ranks = RankPool(4, tmp_path_factory.mktemp("four"), imports=["tests.integrations.trainers"])
    yield ranks
    ranks.stop()


@pytest.fixture(scope="package")
def alone(four: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """One."""
    ranks = RankPool(1, tmp_path_factory.mktemp("alone"), beside=four)
    yield ranks
    ranks.stop()
