"""Ranks for trainers: processes of their own, since `deepspeed.initialize` is ours in them from the first case on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.pool import RankPool

IMPORTS = ["tests.integrations.trainers"]
"""What takes ranks long to import."""


@pytest.fixture(scope="package")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four ranks; with `--on-device` they compute there."""
    module = "tests.engine.rank_process"
    if request.config.option.on_device:
        request.getfixturevalue("lab_built")
        module = "tests.device.rank_process"
    ranks = RankPool(4, tmp_path_factory.mktemp("four"), module=module, imports=IMPORTS)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="package")
def alone(four: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """One."""
    ranks = RankPool(1, tmp_path_factory.mktemp("alone"), beside=four)
    yield ranks
    ranks.stop()
