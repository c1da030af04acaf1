"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.pool import RankPool
from tests.ops import build

RANKS = 4


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four rank processes for the whole session, started by the first test that runs a case on them."""
    ranks = RankPool(RANKS, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def fused_adam() -> None:
    """DeepSpeed's FusedAdam, which a configuration without `torch_adam` means, is compiled."""
    build("FusedAdamBuilder")


@pytest.fixture(scope="session")
def cpu_adam() -> None:
    """DeepSpeedCPUAdam, which offload means, is compiled."""
    build("CPUAdamBuilder")


@pytest.fixture(scope="session")
def cpu_lion() -> None:
    """DeepSpeedCPULion is compiled."""
    build("CPULionBuilder")
