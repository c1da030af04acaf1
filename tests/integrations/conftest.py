"""Ranks for trainers: processes of their own, since `deepspeed.initialize` is ours in them from the first case on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.pool import RankPool


@pytest.fixture(scope="package")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """One rank."""
    ranks = RankPool(1, tmp_path_factory.mktemp("alone"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="package")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four."""
    ranks = RankPool(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.stop()
