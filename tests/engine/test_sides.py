"""What digests read is cut while training runs: in the pause of a switch nothing is, and the losses are the same."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import pytest

from ds_dynatrain.reshard import preparation
from ds_dynatrain.space import Pieces
from ds_dynatrain.transfer import ReadyDigest
from tests.engine import jobs
from tests.engine.pool import RankPool

SCHEDULE: jobs.Schedule = {1: (4, 3), 2: (3, 0), 3: (2, 2), 4: (4, 2)}


def walked(late: bool, has_sides: bool) -> tuple[jobs.Record, list[str]]:
    """A job, and the threads in which something was cut."""
    config, own, where = jobs.config(start=(2, 1)), ReadyDigest.of, list[str]()
    config["dynatrain"]["late"] = late

    def noted(pieces: Pieces, *given: Any) -> ReadyDigest:
        if len(pieces):
            where.append(threading.current_thread().name)
        return own(pieces, *given)

    share = preparation.SIDES_SHARE if has_sides else 1 << 60
    with patch.object(ReadyDigest, "of", staticmethod(noted)), patch.object(preparation, "SIDES_SHARE", share):
        return jobs.run(config, 4, SCHEDULE), where


REFUSED = pytest.mark.not_on_device("late switches are refused on a device (docs/gpu.md)")


@pytest.mark.full
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=REFUSED)])
def test_nothing_is_cut_in_the_pause(pool: RankPool, late: bool) -> None:
    ahead = pool.run(walked, late=late, has_sides=True)
    for _, where in ahead:
        assert where and all(name.startswith("dynatrain-prepare") for name in where), where
    within = pool.run(walked, late=late, has_sides=False)
    assert any(not name.startswith("dynatrain-prepare") for _, where in within for name in where)
    losses = [jobs.global_losses([record for record, _ in ranks]) for ranks in (ahead, within)]
    assert losses[0] == losses[1]
