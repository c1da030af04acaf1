"""Loops of Hugging Face's and Lightning's on the device, a part of what `--on-device tests/integrations` runs there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pool import RankPool
from tests.integrations import test_lightning as lightning
from tests.integrations.conftest import IMPORTS, alone  # noqa: F401
from tests.integrations.test_trainer import stock_log  # noqa: F401
from tests.integrations.test_trainer import test_a_world_that_changes as test_trainer  # noqa: F401

pytestmark = pytest.mark.full
kept, stock = lightning.kept, lightning.stock


@pytest.fixture(scope="package")
def four(lab_built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Of their own: `deepspeed.initialize` is ours in them."""
    ranks = RankPool(4, tmp_path_factory.mktemp("four"), module="tests.device.rank_process", imports=IMPORTS)
    yield ranks
    ranks.stop()


def test_lightning(four: RankPool, stock: dict[str, Any], tmp_path: Path) -> None:
    lightning.test_a_world_that_changes(four, stock, tmp_path)
