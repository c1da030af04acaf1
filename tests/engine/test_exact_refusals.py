"""What an exact job refuses by name; and that its tests see each rule that is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

import ds_dynatrain
from ds_dynatrain.adapters.versions import deepspeed_versions as versions
from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine.first import first_layout
from ds_dynatrain.errors import ConfigError, SwitchRefused, UnsupportedError
from ds_dynatrain.exact.adapters import exact_sums as sums_of
from ds_dynatrain.exact.adapters import graph, refusals
from ds_dynatrain.exact.adapters.refusals import refuse_inexact_job, refuse_inexact_optimizer, unchanged_buffers
from ds_dynatrain.exact.extension import Exact
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.feasible import check_batch
from ds_dynatrain.space import Layout
from tests.engine import exactly, jobs
from tests.engine.exactly import NOT_ON_DEVICE, Bits, differences, together
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool

ZERO = {"stage": 1}
SIZES = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}


@pytest.fixture(autouse=True)
def mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")


def refused(words: str, model: nn.Module | None = None, mpu: Any = None, **more: Any) -> None:
    with pytest.raises(UnsupportedError, match=words):
        refuse_inexact_job({"zero_optimization": ZERO, **more}, model or nn.Linear(2, 2), mpu)


@pytest.mark.parametrize(
    "more",
    [
        {"bf16": {"enabled": True, "immediate_grad_update": True}},
        {"fp16": {"enabled": True, "auto_cast": True}},
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"torch_autocast": {"enabled": True}},
        {"zero_optimization": {"stage": 1, "overlap_comm": True}},
        {"zero_optimization": {"stage": 1, "memory_efficient_linear": True}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        {"gradient_predivide_factor": 2.0},
        {"communication_data_type": "fp16"},
        {"data_efficiency": {"enabled": True}},
        {"data_types": {"buffer_dtype": "fp32"}},
    ],
)
def test_a_key_that_was_not_tried(more: dict[str, Any]) -> None:
    refused(f"^exact: {next(iter(more))}.*was not measured .*; leave the key out, or dynatrain.exact", **more)


def test_what_is_off_or_tried_passes() -> None:
    zero = {"stage": 2, "overlap_comm": False, "reduce_scatter": True, "reduce_bucket_size": 5, "offload_optimizer": {}}
    given = {"zero_optimization": zero, "bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 1}}}
    refuse_inexact_job(given, nn.Linear(2, 2), None)


def test_a_key_of_the_block() -> None:
    with pytest.raises(UnsupportedError, match=r"dynatrain.balance beside dynatrain.exact: it was not tried"):
        check_job({"balance": {"mode": "advise"}})
    for more in ({"balance": {"mode": "off"}}, {"late": True}, {"buddies": {"mode": "copy"}}):
        check_job(more)


def check_job(block: dict[str, Any], sizes: dict[str, int] = SIZES) -> None:
    extension = Exact(DynatrainConfig.model_validate({"exact": True, **block}))
    extension.check_job({**sizes, "zero_optimization": ZERO}, nn.Linear(2, 2), None)


def test_a_series_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    for series in versions.SERIES[1:]:
        monkeypatch.setattr(refusals, "present", lambda series=series: series)
        refused("^dynatrain.exact: tested with DeepSpeed 0.19.8 only")


def test_a_model() -> None:
    refused("^exact: Linear: its layers send", mpu=object())


def test_a_pipeline_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "is_pipeline", lambda model: True)
    for block in ("bf16", "fp16"):
        refused("^exact: a pipeline of 16 bits: it was not tried yet; train it in fp32", **{block: {"enabled": True}})


def test_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    refused("^exact: fp16: DeepSpeed has no fp16 on this processor, .*train in bf16", fp16={"enabled": True})
    refuse_inexact_job({"zero_optimization": ZERO, "fp16": {"enabled": False}}, nn.Linear(2, 2), None)


def test_batch_norm() -> None:
    refused("^exact: '1' is a BatchNorm1d: its statistics", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_a_buffer_that_changes() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    with unchanged_buffers(model):
        model.calls += 1
    with pytest.raises(UnsupportedError, match=r"^exact: buffer 'mean': a forward pass changes it"):
        with unchanged_buffers(model):
            model.mean.mul_(0.9)
    with pytest.raises(UnsupportedError, match="'mean'"), unchanged_buffers(model):
        model.mean = torch.ones(2)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer(fused: bool) -> None:
    class Own(torch.optim.SGD):
        pass

    weights = [nn.Parameter(torch.zeros(2))]
    refuse_inexact_optimizer(torch.optim.AdamW(weights))
    if fused:
        wrong: torch.optim.Optimizer = torch.optim.AdamW(weights, fused=True)
    else:
        wrong = ds_dynatrain.register_optimizer(Own, ())(weights)
    with pytest.raises(UnsupportedError, match=r"^exact: (fused torch|tests).*; use torch's own without"):
        refuse_inexact_optimizer(wrong)


def test_an_optimizer_of_the_users() -> None:
    class Placeless(torch.optim.SGD):
        pass

    ds_dynatrain.register_optimizer(Placeless, (), placeless=True)
    refuse_inexact_optimizer(Placeless([nn.Parameter(torch.zeros(2))]))


def test_compile() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.compile()
    refused("^exact: a compiled model: it compiles again", model)


def test_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "is_accelerated", lambda: True)
    refused("^exact on 'cpu': it was not measured whether its kernels")


@pytest.mark.parametrize("mode", [None, "", "AUTO", "off"])
def test_mkl(monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setenv("MKL_CBWR", mode or "")
    if mode is None:
        monkeypatch.delenv("MKL_CBWR")
    refused(f"^exact: MKL_CBWR={mode or ''}: .*set MKL_CBWR=COMPATIBLE")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    refuse_inexact_job({}, nn.Linear(2, 2), None)


@pytest.mark.parametrize("missing", ["train_batch_size", "train_micro_batch_size_per_gpu"])
def test_batch_sizes_that_follow_from_the_world(missing: str) -> None:
    assert BatchSizes.of(dict(SIZES), 3, in_leaves=True) == BatchSizes(8, 2, True)
    with pytest.raises(ConfigError, match=r"dynatrain.exact: a leaf is .*give both"):
        check_job({}, {key: value for key, value in SIZES.items() if key != missing})


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, zero_stage=0),
        Layout(data=2, tensor=2, zero_stage=1),
        Layout(data=2, pipe=2, zero_stage=1),
        Layout(data=2, zero_stage=1, shares=(6, 2)),
    ],
)
def test_a_layout(layout: Layout) -> None:
    exact = Exact(DynatrainConfig(exact=True))
    with pytest.raises(SwitchRefused, match=r"data ranks at ZeRO stages 1 to 3, or pipelines at ZeRO stage 1; leave"):
        exact.check_layout(layout, BatchSizes(8, 2, True), False)
    exact.check_layout(Layout(data=4, zero_stage=2), BatchSizes(8, 2, True), False)
    check_batch(Layout(data=4, zero_stage=2), BatchSizes(8, 2, True), nn.Linear(2, 2))
    with pytest.raises(SwitchRefused, match=r"data=5 ranks share 4 leaves of 2 samples .* nearest: .*data=4"):
        check_batch(Layout(data=5, zero_stage=2), BatchSizes(8, 2, True), nn.Linear(2, 2))


def test_members_that_no_leaf_is_for() -> None:
    """Where they come and go as many begin as there are leaves; in a launch of fixed size that is refused."""
    sizes = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    given = {**sizes, "zero_optimization": ZERO}, DynatrainConfig(exact=True)
    for grows, data in ((True, 2), (False, 5)):
        assert first_layout(nn.Linear(2, 2), *given, 5, None, 1, grows, in_leaves=True).data == data


# ---- on ranks ----------------------------------------------------------------------------------------------------


def own_loop_case() -> None:
    """Loops that do not train leaf by leaf, and machines that differ."""
    model = small_gpt()
    with jobs.job(exactly.settings((4, 2)), model) as job:
        engine, batch = job.engine, exactly.batch()
        with pytest.raises(UnsupportedError, match=r"^engine.backward: only the micro-batches of engine.loader"):
            engine.backward(engine(*batch))
        with pytest.raises(UnsupportedError, match=r"engine.compile: it compiles again"):
            engine.compile()
        loss = engine(*next(iter(job.loader)))
        engine.backward(loss, retain_graph=True)
        with pytest.raises(UnsupportedError, match=r"micro-step 0 of a global batch after 1 that were trained"):
            engine.backward(loss)
    with pytest.raises(ConfigError, match=r"threads \(.*\) is 1 on member 0 and 2 on member 1"), threads():
        ds_dynatrain.initialize(model=small_gpt(), config=exactly.settings((4, 2)))


@contextmanager
def threads() -> Iterator[None]:
    """Rank 1 has two."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if torch.distributed.get_rank() == 1 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@NOT_ON_DEVICE
def test_a_loop_of_ones_own(pool: RankPool) -> None:
    pool.run(own_loop_case)


def parts_case() -> None:
    """A block that is run twice, each time under reentrant checkpointing: two gradients of one parameter."""
    with jobs.job(exactly.settings((4, 2)), exactly.Reentrant()) as job:
        batch = next(iter(job.loader))
        with pytest.raises(UnsupportedError, match=r"got a second gradient.*use_reentrant=False, or ZeRO stage 1"):
            job.engine.backward(job.engine(*batch))


@NOT_ON_DEVICE
def test_a_gradient_in_several_parts(pool: RankPool) -> None:
    pool.run(parts_case)


# ---- mutations: each breaks one rule -----------------------------------------------------------------------------


def reversed_rows(sums: Any, chunk: Any, own: Any = sums_of.LeafSums._rows) -> Any:
    """Leaves of a micro-step in the order of the ranks, from the last to the first."""
    return reversed(list(own(sums, chunk)))


def rescaled(sums: Any, own: Any = sums_of.LeafSums.close) -> None:
    """Divided by the number of ranks, and multiplied by it."""
    own(sums)
    ranks = torch.distributed.get_world_size(group=sums._zero.dp_process_group)
    for part in sums._lines.held():
        part.div_(ranks).mul_(ranks)


def plain_norm(zero: Any, lines: Any) -> torch.Tensor:
    """In floating point, part by part."""
    total = sum(float(part.pow(2).sum()) for part in lines.held())
    held = torch.tensor([total])
    torch.distributed.all_reduce(held, group=zero.dp_process_group)
    return held.sqrt()[0]


BROKEN: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "order": lambda: patch.object(sums_of.LeafSums, "_rows", reversed_rows),
    "scale": lambda: patch.object(sums_of.LeafSums, "close", rescaled),
    "seed": lambda: patch.object(streams, "begin_leaf", lambda *place: torch.manual_seed(torch.distributed.get_rank())),
    "norm": lambda: patch.object(sums_of, "global_norm", plain_norm),
    "graph": lambda: patch.object(graph, "_with_hooks", lambda module: ()),
}


def broken_case(rule: str, start: jobs.Sizes) -> Bits:
    with BROKEN[rule]():
        return exactly.run(start, steps=3, model=exactly.with_several_uses if rule == "graph" else None)


@NOT_ON_DEVICE
@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[] if rule == "order" else pytest.mark.full) for rule in BROKEN]
)
def test_a_broken_rule_is_seen(pool: RankPool, rule: str) -> None:
    worlds = ((1, 1), (1, 3) if rule == "graph" else (3, 2))
    one, other = (together(pool.run(broken_case, rule=rule, start=start)) for start in worlds)
    assert (differences(one, other) == []) == (rule == "nothing")
