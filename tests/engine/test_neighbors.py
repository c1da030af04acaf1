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


def walked(transport: str, can_read: bool, can_share: bool) -> tuple[jobs.Record, list[dict[int, str]]]:
    """A job, and how this rank reached its neighbors at each of its switches."""
    config, seen = jobs.config(start=(2, 1)), list[dict[int, str]]()
    config["dynatrain"]["transport"] = transport
    own = Preparation.transport

    def noted(self: Preparation) -> Transport:
        seen.append(self.neighbors.ways if self.neighbors is not None else {})
        return own(self)

    reading = neighbors.read_memory if can_read else forbidden
    with (
        patch.object(Preparation, "transport", noted),
        patch.object(neighbors, "read_memory", reading),
        patch.object(neighbors, "can_share", lambda: can_share),
    ):
        return jobs.run(config, 4, SCHEDULE), seen


WAYS = {
    ("auto", True, True): "memory",
    ("auto", False, True): "ring",
    ("ring", True, True): "ring",
    ("auto", False, False): "",
    ("gloo", True, True): "",
}
"""What is asked for and what the machine permits (reading, sharing), and how the bytes then travel; "" is gloo."""


def test_the_way_of_the_bytes(pool: RankPool) -> None:
    """It makes no difference to a loss; every switch is committed on its certificate."""
    losses = []
    for (transport, can_read, can_share), expected in WAYS.items():
        ranks = pool.run(walked, transport=transport, can_read=can_read, can_share=can_share)
        losses.append(jobs.global_losses([rank[0] for rank in ranks]))
        for number, (_, seen) in enumerate(ranks):
            others = {member for member in range(4) if member != number}
            assert seen, number
            if not expected:
                assert seen == [{}] * len(seen)
                continue
            assert all(ways and set(ways) <= others for ways in seen)
            assert others in map(set, seen)
            assert {way for ways in seen for way in ways.values()} == {expected}
    assert all(each == losses[0] for each in losses)


@pytest.mark.parametrize("value", ["shared", 1, None])
def test_other_values_are_refused(value: Any) -> None:
    from ds_dynatrain.config import DynatrainConfig
    from ds_dynatrain.errors import ConfigError

    with pytest.raises(ConfigError, match=r"dynatrain\.transport"):
        DynatrainConfig.from_deepspeed({"dynatrain": {"transport": value}})
