"""Every ordered pair of (data, ZeRO stage) in living ranks: one long walk per dtype."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.engine import walks
from tests.engine.paths import LAYOUTS, circuit, part
from tests.engine.pool import RankPool

SEED = 5
SMALL_PART = 24


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_part_of_all_pairs(pool: RankPool, dtype: str) -> None:
    path = part(SEED, SMALL_PART)
    assert set(path) == set(LAYOUTS) and len(path) == SMALL_PART + 1
    walks.compare(pool, walks.settings(dtype), path)


@pytest.mark.full
@pytest.mark.usefixtures("fused_adam")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_part_of_all_pairs_with_fused_adam(pool: RankPool, dtype: str) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 2e-3}}
    walks.compare(pool, walks.settings(dtype, optimizer=optimizer), part(SEED, SMALL_PART), steps=walks.LONG_STEPS)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_pairs(pool: RankPool, dtype: str) -> None:
    path = circuit(SEED)
    assert sorted(pairwise(path)) == sorted((one, other) for one in LAYOUTS for other in LAYOUTS)
    bitwise = walks.compare(pool, walks.settings(dtype), path, seconds=900, steps=walks.LONG_STEPS)
    print(f"{dtype}: {bitwise} of {len(path) - 1} continuations are bitwise those of a static run")
