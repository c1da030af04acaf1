"""Loops of Hugging Face's and Lightning's, where both are: processes of their own that share the card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.pool import RankPool

for package in ("transformers", "accelerate", "lightning"):
    pytest.importorskip(package)

from tests.device.test_loops import *  # noqa: F403, E402
from tests.integrations.conftest import IMPORTS  # noqa: E402


@pytest.fixture(scope="package")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    given = {"accelerator": "cuda", "module": "tests.gpu.rank_process", "imports": IMPORTS}
    ranks = RankPool(4, tmp_path_factory.mktemp("loops"), **given)
    yield ranks
    ranks.stop()
