"""In this folder the pool is of ranks that share the card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.conftest import RANKS
from tests.engine.pool import RankPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device: torch {torch.__version__} sees none")
    ranks = RankPool(RANKS, tmp_path_factory.mktemp("gpu"), accelerator="cuda", module="tests.gpu.rank_process")
    yield ranks
    ranks.stop()
