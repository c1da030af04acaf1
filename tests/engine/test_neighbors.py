"""How the bytes of a switch travel: from memory to memory on one machine, over gloo where that is asked for."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.errors import TransferError
from ds_dynatrain.reshard.preparation import Ways
from ds_dynatrain.transfer import Transport, neighbors
from tests.engine import jobs
from tests.engine.pool import RankPool

SCHEDULE: jobs.Schedule = {1: (4, 3), 2: (3, 0), 3: (2, 2)}


def forbidden(process: int, address: int, into: Any) -> None:
    """A kernel that lets nobody read."""
    raise TransferError("cannot read: Operation not permitted")


def walked(transport: str, can_read: bool) -> tuple[jobs.Record, list[set[int]]]:
    """A job, and whose memory this rank read at each of its switches."""
    config, seen = jobs.config(start=(2, 1)), list[set[int]]()
    config["dynatrain"]["transport"] = transport
    own = Ways.transport

    def noted(self: Ways, world: World | None) -> Transport:
        seen.append(set(self.neighbors.members) if self.neighbors is not None else set())
        return own(self, world)

    reading = neighbors.read_memory if can_read else forbidden
    with (
        patch.object(Ways, "transport", noted),
        patch.object(neighbors, "read_memory", reading),
    ):
        return jobs.run(config, 4, SCHEDULE), seen


READS = {("auto", True): True, ("auto", False): False, ("gloo", True): False}
"""What is asked for and whether the machine permits reading: are the bytes then read, or sent over gloo?"""


def test_the_way_of_the_bytes(pool: RankPool) -> None:
    """It makes no difference to a loss; every switch is committed on its certificate."""
    losses = []
    for (transport, can_read), reads in READS.items():
        ranks = pool.run(walked, transport=transport, can_read=can_read)
        losses.append(jobs.global_losses([rank[0] for rank in ranks]))
        for number, (_, seen) in enumerate(ranks):
            others = {member for member in range(4) if member != number}
            assert seen, number
            if not reads:
                assert not any(seen), number
                continue
            assert all(near and near <= others for near in seen)
            assert others in seen
    assert all(each == losses[0] for each in losses)


@pytest.mark.parametrize("value", ["shared", 1, None])
def test_other_values_are_refused(value: Any) -> None:
    from ds_dynatrain.config import split_config
    from ds_dynatrain.errors import ConfigError

    with pytest.raises(ConfigError, match=r"dynatrain\.transport"):
        split_config({"dynatrain": {"transport": value}})


def test_the_ring_that_was_is_refused_with_what_to_use() -> None:
    from ds_dynatrain.config import split_config
    from ds_dynatrain.errors import ConfigError

    with pytest.raises(ConfigError, match=r'dynatrain\.transport: "ring" is gone.* use "gloo"'):
        split_config({"dynatrain": {"transport": "ring"}})
