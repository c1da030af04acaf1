"""Moves by group calls of NCCL's on a card: bytes arrive, and a move that fails has its communicator made anew."""

from __future__ import annotations

import os

import pytest

from tests.device import test_batched
from tests.engine.pool import RankPool
from tests.gpu.staging import NCCL

pytestmark = pytest.mark.skipif(os.environ.get("COLLECTIVES") != NCCL, reason="collectives are staged on gloo here")


def test_all_bytes_go_in_batches(pool: RankPool) -> None:
    test_batched.test_all_bytes_go_in_batches(pool, 300)


@pytest.mark.parametrize("how", ["first", "before", "raises"])
def test_moves_that_fail_undo_the_switch(pool: RankPool, how: str) -> None:
    test_batched.test_moves_that_fail_undo_the_switch(pool, how, (4, 1), (4, 3))
