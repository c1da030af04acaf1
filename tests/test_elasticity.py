"""`compute_elastic_config` for programs that import the module that DeepSpeed 0.19.6 removed."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.elasticity import compute_elastic_config
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.run import main

PLUGIN = """
import sys
from deepspeed.elasticity import compute_elastic_config
block = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "min_gpus": 1, "max_gpus": 4,
         "min_time": 20, "ignore_non_elastic_batch_info": True, "version": 0.1}
batch, _, micro_batch = compute_elastic_config(ds_config={"elasticity": block}, target_deepspeed_version="0.19.8",
                                               world_size=2)
sys.argv.append(f"{batch} in micro-batches of {micro_batch}")
"""
"""What ms-swift's `deepspeed_elastic` callback does, with the block that its version 4.2 fills in."""


def block(**changes: Any) -> dict[str, Any]:
    base = {"enabled": True, "max_train_batch_size": 10_000, "micro_batch_sizes": [8, 12, 16, 17], "version": 0.1}
    return {"elasticity": {**base, "min_gpus": 32, "max_gpus": 1500, **changes}}


@pytest.mark.parametrize(
    ("config", "batch", "worlds"),
    [
        (block(), 9792, 23),
        (block(prefer_larger_batch=False), 9792, 23),
        (block(max_train_batch_size=240, micro_batch_sizes=[2, 4, 6], min_gpus=1), 240, 16),
    ],
)
def test_batches_of_deepspeed_0_18_9(config: dict[str, Any], batch: int, worlds: int) -> None:
    """The figures were computed with DeepSpeed 0.18.9, whose documentation has the first."""
    found, sizes = compute_elastic_config(config, "0.18.9")[:2]
    assert (found, len(sizes)) == (batch, worlds)
    assert all(
        any(found % (size * micro) == 0 for micro in config["elasticity"]["micro_batch_sizes"]) for size in sizes
    )


def test_a_world_size_has_its_largest_micro_batch() -> None:
    assert compute_elastic_config(block(), "0.18.9", world_size=64)[2:] == (17,)


@pytest.mark.parametrize(
    ("config", "world_size", "words"),
    [
        ({}, 0, r"^elasticity: .*; give an enabled block of version 0\.1$"),
        (block(enabled=False), 0, r"^elasticity\.enabled: "),
        (block(version=0.2), 0, r"^elasticity\.version: "),
        (block(micro_batch_sizes=[0]), 0, r"^elasticity\.micro_batch_sizes\.0: "),
        (block(micro_batch_sizes=[20_000]), 0, r"a size above max_train_batch_size 10000"),
        (block(min_gpus=1400, max_train_batch_size=1000), 0, r"divided by 1400 to 1500 ranks"),
        (block(), 128, r"^elasticity: 128 ranks cannot divide a batch of 9792 .* start one of \[32, "),
    ],
)
def test_bad_blocks(config: dict[str, Any], world_size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compute_elastic_config(config, "0.18.9", world_size)


def test_the_old_import_under_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "plugin.py"
    script.write_text(PLUGIN)
    monkeypatch.setitem(
        sys.modules, "ds_dynatrain.integrations.transformers", types.SimpleNamespace(make_trainers_elastic=int)
    )
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    main([str(script)])
    assert sys.argv[-1] == "8 in micro-batches of 2"
