"""Stores for process groups: a connection that nobody answers."""

from __future__ import annotations

import time

import pytest
import torch.distributed as td

from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.elastic.store import world_store
from ds_dynatrain.elastic.world import World

WORLD = World(term="1", generation=1, change="planned", members=("a/0",))


def test_whoever_accepts_and_never_answers_is_not_waited_for() -> None:
    """As a process does that hangs: the kernel has accepted for it."""
    with listen(Address("127.0.0.1", 0), is_guarded=False) as silent:
        begin = time.monotonic()
        with pytest.raises(td.DistNetworkError, match="not answered for 1 s"):
            world_store("127.0.0.1", silent.getsockname()[1], WORLD, 0.5)
        assert time.monotonic() - begin < 10


def test_nobody_there_is_said_as_torch_says_it() -> None:
    with listen(Address("127.0.0.1", 0), is_guarded=False) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(td.DistError):
        world_store("127.0.0.1", port, WORLD, 0.5)
