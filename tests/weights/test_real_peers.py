"""What the receivers send, given to vLLM's, SGLang's and verl's own functions.

Run with `pip install --no-deps vllm==0.33.0 sglang==0.5.23 verl==0.9.1`; a test is skipped where its package is absent.
Only single files of these packages are loaded, which need nothing but torch.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from ds_dynatrain.weights.outputs import ParamMeta
from ds_dynatrain.weights.receivers import patches, servers, verl, vllm_source
from ds_dynatrain.weights.update import Outgoing
from tests.weights import fakes
from tests.weights.test_group import equal

SHAPES = {"words": (23, 6), "odd": (7,), "scale": (), "up": (10, 7), "down": (7, 10), "last": (3, 3)}


def part_of(package: str, path: str, *absent: str) -> ModuleType:
    """One file of an installed package, loaded without the package. absent: files that it imports and does not need."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    name = f"peers_{package}_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, Path(spec.origin).parent / path)
    assert spec is not None and spec.loader is not None
    for other in absent:
        module: Any = ModuleType(f"{package}.{other.removesuffix('.py').replace('/', '.')}")
        module.__getattr__ = lambda name: object
        sys.modules.setdefault(module.__name__, module)
    found = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def some(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def metadata(tensors: dict[str, torch.Tensor]) -> list[ParamMeta]:
    return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]


def messages(tensors: dict[str, torch.Tensor], buckets: list[list[Any]]) -> list[torch.Tensor]:
    """The packed bytes of each bucket."""
    out: Any = Outgoing(fakes.FakeSource(tensors), [[1, 0, 0]], None, False)
    found = servers.packed(out, iter(tensors.items()), buckets, torch.device("cpu"))
    return [data.clone() for _, data in found]


@pytest.mark.parametrize("bucket_bytes", [1, 300, 600, 1 << 20])
def test_vllm_packs_alike(bucket_bytes: int) -> None:
    theirs, tensors, expected = part_of("vllm", "distributed/weight_transfer/packed_tensor.py"), some(), []
    passing = iter(tensors.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while (chunk := theirs.pack_tensors(passing, lambda item: item[1], bucket_bytes)) is not None:
            expected.append(chunk.packed_tensor)
    found = messages(tensors, servers.grouped(metadata(tensors), bucket_bytes))
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


class Rollout(nn.Module):
    """A model whose loader fuses two tensors, as vLLM's do."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.held = {name: torch.zeros_like(each) for name, each in tensors.items() if name not in ("up", "down")}
        self.fused = torch.zeros(20, 7, dtype=torch.bfloat16)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            rows = {"up": self.fused[:10], "down": self.fused[10:].view(7, 10)}
            rows.get(name, self.held.get(name)).copy_(tensor)  # type: ignore[union-attr]
        return {name for name, _ in weights}


def test_vllm_loads_sparse_patches() -> None:
    theirs, first, held = (
        part_of("vllm", "model_executor/model_loader/checkpoint_weight_patch.py"),
        some(),
        dict[str, Any](),
    )
    second = {name: torch.where(torch.rand(each.shape) < 0.1, -each, each) for name, each in first.items()}
    model, sent = Rollout(first), list[int]()
    for tensors in (first, second, second):
        found = list(patches.patches(iter(tensors.items()), held, torch.device("cpu")))
        theirs.load_checkpoint_weight_patches(
            model,
            [theirs.CheckpointWeightPatch(p.name, p.full_shape, p.values.dtype, p.values, p.indices) for p in found],
        )
        sent.append(sum(len(patch.indices) for patch in found))
        whole = {**model.held, "up": model.fused[:10], "down": model.fused[10:].view(7, 10)}
        assert equal(whole, tensors)
    assert sent[0] == sum(each.numel() for each in first.values()) and 0 < sent[1] < sent[0] // 2 and sent[2] == 0


@pytest.mark.parametrize("bucket_bytes", [1, 300, 600, 1 << 20])
def test_sglang_takes_each_bucket_apart(bucket_bytes: int) -> None:
    theirs, tensors = part_of("sglang", "srt/weight_sync/tensor_bucket.py"), some()
    buckets, found = servers.grouped(metadata(tensors), bucket_bytes), dict[str, Any]()
    for bucket, data in zip(buckets, messages(tensors, buckets), strict=True):
        names, shapes = [meta.name for meta in bucket], [list(meta.shape) for meta in bucket]
        room = theirs.FlattenedTensorBucket.empty(names, [str(meta.dtype)[6:] for meta in bucket], shapes, "cpu")
        room.get_flattened_tensor().copy_(data)
        found |= dict(room.reconstruct_tensors())
    assert equal(found, tensors)


def test_verl_finds_the_changes_of_shards() -> None:
    spec = part_of("verl", "workers/engine/spec.py")
    gather = part_of("verl", "checkpoint_engine/delta_sync/sparse_gather.py")
    first, second = fakes.values(1), fakes.values(2)
    for rank in range(4):
        sides = [
            verl.shards(fakes.FakeSource(each, rank=rank, world_size=4, cut=40), spec.ShardSpec)
            for each in (first, second)
        ]
        for (name, old, _), (_, new, placed) in zip(*sides, strict=True):
            at, changed = gather.shard_delta_indices(new, old.clone(), 0)
            if placed.contributes:
                first[name].view(-1)[spec.translate_flat_indices(at, placed.place)] = changed
    assert equal(first, second)


def test_vllm_reads_a_source_by_its_own_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    base = part_of("vllm", "distributed/weight_transfer/base.py", "config/weight_transfer.py", "config/parallel.py")
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    held = {"whole": torch.randn(4, 6), "cut": torch.randn(2, 6)}
    rows = [
        ParamMeta("whole", torch.float32, (4, 6), (0, 1), (2,), (Replicate(),)),
        ParamMeta("cut", torch.float32, (4, 6), (0, 1), (2, 1), (Shard(0), Shard(1))),
    ]
    source: Any = SimpleNamespace(metadata=rows, iter_full=lambda: iter(held.items()), iter_local=lambda: iter(()))
    found = vllm_source(source)
    assert isinstance(found, base.WeightSource) and found.implements_iter_full() and found.implements_iter_local()
    assert [each.placements for each in found.metadata] == [None, (base.Shard(0), base.Shard(1))]
    assert found.owned_names(1) == ["whole", "cut"] and dict(found.iter_full()) == held
