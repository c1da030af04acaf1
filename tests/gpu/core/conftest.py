"""In this folder the pool is of ranks that share the card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.conftest import RANKS
from tests.engine.pool import RankPool

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
"""Without a card nothing is made ready for them either."""


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    ranks = RankPool(RANKS, tmp_path_factory.mktemp("gpu"), accelerator="cuda", module="tests.gpu.rank_process")
    yield ranks
    ranks.stop()
