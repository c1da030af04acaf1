"""Loops of Hugging Face's and Lightning's on the device, a part of what `--on-device tests/integrations` runs there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.pool import RankPool
from tests.integrations.conftest import IMPORTS, alone  # noqa: F401
from tests.integrations.test_lightning import kept, stock  # noqa: F401
from tests.integrations.test_lightning import test_a_world_that_changes as test_lightning  # noqa: F401
from tests.integrations.test_trainer import stock_log  # noqa: F401
from tests.integrations.test_trainer import test_a_world_that_changes as test_trainer  # noqa: F401


@pytest.fixture(scope="package")
def four(lab_built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Of their own: `deepspeed.initialize` is ours in them."""
    ranks = RankPool(4, tmp_path_factory.mktemp("four"), module="tests.device.rank_process", imports=IMPORTS)
    yield ranks
    ranks.stop()
