"""How the bytes of a switch travel: from memory to memory on one machine, over gloo where that is asked for."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer import Transport, neighbors
from tests.engine import jobs
from tests.engine.pool import RankPool

SCHEDULE: jobs.Schedule = {1: (4, 3), 2: (3, 0), 3: (2, 2)}


def forbidden(process: int, address: int, into: Any) -> None:
    """A kernel that lets nobody read."""
    raise TransferError("cannot read: Operation not permitted")


def walked(transport: str, is_permitted: bool) -> tuple[jobs.Record, list[list[int]]]:
    """A job, and the neighbors that this rank had at each of its switches."""
    config, seen = jobs.config(start=(2, 1)), list[list[int]]()
    config["dynatrain"]["transport"] = transport
    own = Preparation.transport

    def noted(self: Preparation) -> Transport:
        seen.append(sorted(self.neighbors.members) if self.neighbors is not None else [])
        return own(self)

    reading = neighbors.read_memory if is_permitted else forbidden
    with patch.object(Preparation, "transport", noted), patch.object(neighbors, "read_memory", reading):
        return jobs.run(config, 4, SCHEDULE), seen


def test_the_way_of_the_bytes(pool: RankPool) -> None:
    """It makes no difference to a loss; every switch is committed on its certificate."""
    losses = []
    for transport, is_permitted in (("auto", True), ("auto", False), ("gloo", True)):
        ranks = pool.run(walked, transport=transport, is_permitted=is_permitted)
        losses.append(jobs.global_losses([rank[0] for rank in ranks]))
        for number, (_, seen) in enumerate(ranks):
            others = {member for member in range(4) if member != number}
            ways = [set(found) for found in seen]
            assert ways, number
            if transport == "auto" and is_permitted:
                assert all(way and way <= others for way in ways) and others in ways
            else:
                assert ways == [set()] * len(ways)
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("value", ["shared", 1, None])
def test_other_values_are_refused(value: Any) -> None:
    from ds_dynatrain.config import DynatrainConfig
    from ds_dynatrain.errors import ConfigError

    with pytest.raises(ConfigError, match=r"dynatrain\.transport"):
        DynatrainConfig.from_deepspeed({"dynatrain": {"transport": value}})
