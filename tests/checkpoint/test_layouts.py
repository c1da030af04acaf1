"""Any layout to any layout: what is written is every element once, and what is read is what was there, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_dynatrain.checkpoint.manifest import Manifest
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.space import WEIGHT, Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from ds_dynatrain.transfer import digest
from tests.checkpoint.worlds import load, save, state_of
from tests.plan.test_axes import LAYOUTS, space
from tests.space import models
from tests.transfer.states import buffers_of, differences

few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def round_trip(vps: VirtualParameterSpace, source: Layout, target: Layout) -> None:
    state = state_of(vps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = save(folder, vps, source, state)
        check_written_once(vps, source, manifest)
        check_digests(vps, manifest, state)
        for rank in range(target.world_size):
            buffers = load(folder, manifest, vps, target, rank)
            held = {kind: values for kind, values in state.items() if vps.is_held(source, kind)}
            wrong = differences(
                vps, target, rank, held | {k: untouched(state[k]) for k in state.keys() - held}, buffers
            )
            assert wrong == []


def untouched(values: torch.Tensor) -> torch.Tensor:
    """What `buffers_of` leaves where nothing is put."""
    return torch.full_like(values, -12345.0)


def check_written_once(vps: VirtualParameterSpace, layout: Layout, manifest: Manifest) -> None:
    """No element twice, none left out, and of weights that follow from masters nothing."""
    stored = [row for row in manifest if row.file]
    expected = 0
    for kind in vps.present_kinds(layout):
        for tensor in vps.tensors:
            if tensor.numel and (tensor.trainable or kind == WEIGHT):
                manifest.runs(tensor.name, kind)
                expected += tensor.numel if kind != WEIGHT or not tensor.trainable else 0
    assert sum(row.extent.numel for row in stored) == expected


def check_digests(vps: VirtualParameterSpace, manifest: Manifest, state: dict[str, torch.Tensor]) -> None:
    """Those of whole tensors, in whatever parts they were written."""
    for tensor, kind in manifest.rows:
        number = vps.line.index(tensor)
        whole = state[kind][int(vps.bases[number]) : int(vps.bases[number + 1])]
        assert manifest.digest(tensor, kind) == digest(whole), (tensor, kind)


@few
@given(models.tensor_lists(), models.zero_rules, models.layouts, models.layouts, models.weight_sizes)
def test_data_and_stages(
    tensors: list[LogicalTensor], rules: ZeroRules, source: Layout, target: Layout, weight: int
) -> None:
    vps = VirtualParameterSpace.of(
        tensors, rules, standard_kinds(weight, stale_grad=weight), source, range(source.data)
    )
    round_trip(vps, source, target)


@few
@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), models.weight_sizes)
def test_all_axes(source: Layout, target: Layout, weight: int) -> None:
    round_trip(space(source, tuple(range(source.world_size)), weight), source, target)


LARGE = [LogicalTensor("a", (300, 500)), LogicalTensor("b", (500,)), LogicalTensor("c", (40, 300, 10), 1)]


@pytest.mark.parametrize("data", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bytes_read_are_those_of_the_pieces(tmp_path: Path, data: int, stage: int) -> None:
    layout, target = Layout(data=data, zero_stage=stage), Layout(data=4, zero_stage=3)
    vps = VirtualParameterSpace.of(LARGE, ZeroRules(), standard_kinds(4), layout, range(data))
    manifest = save(tmp_path, vps, layout, state_of(vps))
    for rank in range(4):
        pieces = {kind: vps.holding(target, rank, kind).numel for kind in ("master", "exp_avg", "exp_avg_sq")}
        buffers = buffers_of(vps, target, rank, None)
        with Reader(tmp_path, manifest) as reader:
            reader.fill(vps, target, rank, buffers)
        wanted = 4 * sum(pieces.values())
        assert reader.bytes_read <= 1.02 * wanted, "weights are masters' values, and are there already"


def test_a_weight_that_is_not_its_master(tmp_path: Path) -> None:
    """What a user has changed without the master is stored beside it, and only that."""
    layout, target = Layout(data=2, zero_stage=1), Layout(data=3, zero_stage=2)
    vps = VirtualParameterSpace.of(LARGE, ZeroRules(), standard_kinds(2), layout, (0, 1))
    state = state_of(vps)
    state[WEIGHT][1234] = 77.0
    manifest = save(tmp_path, vps, layout, state)
    assert {row.tensor for row in manifest if row.kind == WEIGHT and row.file} == {"a"}
    for rank in range(3):
        assert differences(vps, target, rank, state, load(tmp_path, manifest, vps, target, rank)) == []


def test_other_types_of_weights(tmp_path: Path) -> None:
    layout = Layout(data=2, zero_stage=2)
    tensors = [*LARGE, LogicalTensor("frozen", (33,), -1)]
    small = VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(2), layout, (0, 1))
    large = VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(4), layout, (0, 1))
    state = state_of(small)
    manifest = save(tmp_path, small, layout, state)
    frozen = state[WEIGHT][-33:].float()
    wide = {**state, WEIGHT: torch.cat([state["master"][:-33], frozen])}
    for rank in range(2):
        assert differences(large, layout, rank, wide, load(tmp_path, manifest, large, layout, rank)) == []


def test_replicas_share_the_work(tmp_path: Path) -> None:
    layout = Layout(data=4, zero_stage=0)
    vps = VirtualParameterSpace.of(LARGE, ZeroRules(), standard_kinds(2), layout, range(4))
    manifest = save(tmp_path, vps, layout, state_of(vps))
    sizes = [sum(row.nbytes for row in manifest if row.file.startswith(f"{rank:05d}")) for rank in range(4)]
    assert max(sizes) - min(sizes) <= 64 and sum(sizes) == 12 * int(np.sum([t.numel for t in LARGE]))
