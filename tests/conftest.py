"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ds_dynatrain.adapters.versions import present
from tests.engine.pool import RankPool
from tests.ops import build

RANKS = 4
NEWEST_ALONE = ["adapters/test_tensor.py", "adapters/test_experts.py"]
"""Of the core, what DeepSpeed 0.18 does not have: a description of what AutoTP cuts, and AutoEP."""
collect_ignore = [] if present().has_autotp else NEWEST_ALONE


def pytest_report_header() -> str | None:
    """What is left out with another DeepSpeed."""
    return f"not in this DeepSpeed, left out: {', '.join(collect_ignore)}" if collect_ignore else None


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
