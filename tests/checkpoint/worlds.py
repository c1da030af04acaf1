"""Checkpoints of worlds that exist in one process only: every rank of a layout writes its files, one after another."""

from __future__ import annotations

from pathlib import Path

import torch

from ds_dynatrain.checkpoint.manifest import Manifest
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.writing import shares_of, write_shares
from ds_dynatrain.space import MASTER, WEIGHT, Layout, VirtualParameterSpace
from ds_dynatrain.transfer import Buffers
from tests.transfer.states import buffers_of, dtype_of


def state_of(vps: VirtualParameterSpace, seed: int = 1) -> dict[str, torch.Tensor]:
    """Every kind over the whole line; weights that have a master are cast from it."""
    generator = torch.Generator().manual_seed(seed)
    numel = int(vps.bases[-1])
    state = {kind.name: torch.randn(numel, generator=generator).to(dtype_of(kind)) for kind in vps.kinds}
    trained = sum(tensor.numel for tensor in vps.tensors if tensor.trainable)
    state[WEIGHT][:trained] = state[MASTER][:trained].to(state[WEIGHT].dtype)
    return state


def save(folder: Path, vps: VirtualParameterSpace, layout: Layout, state: dict[str, torch.Tensor]) -> Manifest:
    """What all ranks of a layout write, and the manifest as it comes back from its file."""
    rows = []
    for rank in range(layout.world_size):
        buffers = buffers_of(vps, layout, rank, state)
        rows += write_shares(folder, rank, shares_of(vps, layout, rank, buffers, vps.present_kinds(layout)))
    (folder / "manifest.arrow").write_bytes(Manifest.of(rows).to_bytes())
    manifest = Manifest.from_bytes((folder / "manifest.arrow").read_bytes())
    manifest.check(folder)
    return manifest


def load(folder: Path, manifest: Manifest, vps: VirtualParameterSpace, layout: Layout, rank: int) -> Buffers:
    """The buffers of one rank of a layout, filled."""
    buffers = buffers_of(vps, layout, rank, None)
    with Reader(folder, manifest) as reader:
        reader.fill(vps, layout, rank, buffers)
    return buffers
