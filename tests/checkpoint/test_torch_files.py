"""Files of `torch.save`, read without running them: where tensors lie, and files from strangers."""

from __future__ import annotations

import collections
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_dynatrain.checkpoint.others.torch_files import Stored, fields_of, read_tree, value_of, with_values
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError

FLAT = torch.arange(1000, dtype=torch.float32)
TREE: dict[str, Any] = {
    "flat": FLAT,
    "part": FLAT[100:160].view(6, 10),
    "turned": FLAT[:6].view(2, 3).t(),
    "low": torch.arange(7).to(torch.bfloat16),
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(5.0),
    "plain": {"a": [1, (2.5, None)], "shape": torch.Size([2, 3]), "dtype": torch.float16},
    "order": collections.OrderedDict(x=1),
}


class Trap:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_tensors_lie_where_it_says(tmp_path: Path) -> None:
    torch.save(TREE, tmp_path / "x.pt")
    tree = read_tree(tmp_path, "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    for name in ("flat", "part", "scalar"):
        stored: Stored = tree[name]
        raw = np.frombuffer(data, np.float32, stored.numel, stored.offset).reshape(stored.shape)
        assert stored.is_dense and np.array_equal(raw, TREE[name].numpy()) and stored.shape == tuple(TREE[name].shape)
        assert torch.equal(value_of(tmp_path, stored), TREE[name])
    assert not tree["turned"].is_dense and tree["none"].numel == 0
    assert torch.equal(value_of(tmp_path, tree["low"]), TREE["low"])
    assert tree["plain"] == {"a": [1, (2.5, None)], "shape": (2, 3), "dtype": torch.float16}
    with pytest.raises(CheckpointError, match="a small one is expected"):
        value_of(tmp_path, tree["turned"])
    found = with_values(tmp_path, {"a": (tree["low"], 1)})
    assert torch.equal(found["a"][0], TREE["low"])


def test_nothing_is_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"a": FLAT, "b": Trap(trace)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="trust_pickle=True"):
        read_tree(tmp_path, "x.pt")
    assert not trace.exists()
    assert isinstance(read_tree(tmp_path, "x.pt", trust_pickle=True)["a"], Stored) and trace.exists()


def test_records_of_deepspeed_are_stand_ins(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    scaler = DynamicLossScaler(2.0**8, 1000, 1.0, 2, False)
    torch.save({"scaler": scaler, "stage": ZeroStageEnum.weights}, tmp_path / "x.pt")
    for trust in (False, True):
        tree = read_tree(tmp_path, "x.pt", trust)
        assert fields_of(tree["scaler"])["cur_scale"] == 2.0**8
        assert tree["stage"].args == (3,)


def test_damage_is_an_error_or_harmless(tmp_path: Path) -> None:
    torch.save(TREE, tmp_path / "x.pt")
    data, draw, refused = (tmp_path / "x.pt").read_bytes(), random.Random(4), 0
    for number in range(150):
        changed = bytearray(data)
        if number % 3:
            for _ in range(draw.randint(1, 4)):
                changed[draw.randrange(len(data))] = draw.randrange(256)
        else:
            del changed[draw.randrange(len(data)) :]
        (tmp_path / "y.pt").write_bytes(changed)
        try:
            tree = read_tree(tmp_path, "y.pt")
            assert isinstance(tree, dict)
            for stored in tree.values():
                if isinstance(stored, Stored) and stored.is_dense:
                    assert stored.offset + stored.nbytes <= len(changed)
        except CheckpointError:
            refused += 1
    assert refused >= 50
    (tmp_path / "y.pt").write_bytes(b"")
    with pytest.raises(CheckpointDamaged):
        read_tree(tmp_path, "y.pt")
