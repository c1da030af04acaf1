"""Models of `deepspeed.zero.Init`: cut over the launch, taken into the first layout, equal to whole ones then."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import ds_dynatrain
from ds_dynatrain.errors import ConfigError
from tests.engine import jobs, oracle
from tests.engine.models import SmallGPT, named_groups, small_gpt
from tests.engine.pool import RankPool
from tests.engine.test_members import holdings

STEPS = 5
M_MMAP_THRESHOLD = -3
WIDE = {"width": 160, "hidden": 200}
"""Tensors above the size from which a build without memory writes nothing."""


def settings(dtype: str, start: jobs.Sizes, **more: Any) -> dict[str, Any]:
    return jobs.config(dtype, start, **more)


def under_init(config: dict[str, Any], **sizes: Any) -> SmallGPT:
    """The model, built inside of the context as transformers does it."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        with deepspeed.zero.Init(config_dict_or_path=config):
            return SmallGPT(**sizes)


def converted(config: dict[str, Any], **sizes: Any) -> nn.Module:
    """The model, built whole and cut afterwards."""
    model = small_gpt(**sizes)
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    return model


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters of a model of `zero.Init`."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: held.detach().clone() for name, held in model.named_parameters()}


def whole(values: dict[str, torch.Tensor], **sizes: Any) -> SmallGPT:
    """A plain model with these values."""
    model = small_gpt(**sizes)
    with torch.no_grad():
        for name, held in model.named_parameters():
            held.copy_(values[name])
    return model


def trained(config: dict[str, Any], model: nn.Module, schedule: jobs.Schedule) -> tuple[dict[str, Any], Any, int]:
    """(states at the start and after the last step, where this member works; its losses; its events)."""
    states: dict[str, Any] = {}
    record = jobs.Record()
    with jobs.job(config, model=model, model_parameters=named_groups(model)) as made:
        if not made.engine.idle:
            states["start"] = oracle.gather(made.engine)
        jobs.train(made, STEPS, schedule, record)
        states["end"] = oracle.gather(made.engine)
    return states, record.losses, len(record.events)


def twin_case(dtype: str, start: jobs.Sizes, how: str, target: jobs.Sizes, sizes: dict[str, Any]) -> list[str]:
    """Train a model of `zero.Init` and its whole twin alike; what differs, in words."""
    config = settings(dtype, start)
    model = under_init(config, **sizes) if how == "context" else converted(config, **sizes)
    values = values_of(model)
    states, *seen = trained(config, model, {2: target})
    twins, *expected = trained(config, whole(values, **sizes), {2: target})
    found = [] if states.keys() == twins.keys() and seen == expected else [f"{seen} and {expected}"]
    for when in states:
        found += [f"{when}: {words}" for words in oracle.differences(states[when], twins[when])]
    return found


CHANGES: list[tuple[jobs.Sizes, jobs.Sizes]] = [
    ((2, 0), (4, 3)),
    ((2, 3), (4, 3)),
    ((3, 1), (2, 2)),
    ((1, 2), (3, 0)),
    ((4, 3), (2, 1)),
]
TWINS = [(dtype, *change) for change in CHANGES for dtype in ("fp32", "bf16")]
DAILY = [("bf16", *CHANGES[1])]


@pytest.mark.parametrize(
    ("dtype", "start", "target"),
    [twin if twin in DAILY else pytest.param(*twin, marks=pytest.mark.full) for twin in TWINS],
)
def test_equal_to_its_whole_twin(pool: RankPool, dtype: str, start: jobs.Sizes, target: jobs.Sizes) -> None:
    sizes = WIDE if start[0] == 2 else {}
    how = "context" if start[0] != 3 else "module"
    for differences in pool.run(twin_case, dtype=dtype, start=start, how=how, target=target, sizes=sizes):
        assert differences == []


class Adapted(nn.Module):
    """A frozen model of `zero.Init` and a whole low-rank part that was added afterwards."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(torch.distributed.get_rank())  # rank 0's values are to count
            self.low = nn.Parameter(torch.randn(3, 5))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.base(inputs, targets)
        return loss * (self.low.square().mean() + 1)


def adapted_case(start: jobs.Sizes, target: jobs.Sizes) -> tuple[list[str], bool]:
    """(what differs between a model that is partly from `zero.Init` and its twin, buffers are as they were)."""
    config = settings("fp32", start)
    results: list[Any] = []
    values: dict[str, torch.Tensor] = {}
    for base in (converted(config), small_gpt()):
        if values:
            base = whole(values)
        else:
            values = values_of(base)
        base.calls += 17
        model, record = Adapted(base), jobs.Record()
        optimizer = torch.optim.AdamW([{"params": [model.low]}], lr=1e-2)
        with jobs.job(config, model=model, optimizer=optimizer) as made:
            kept = int(base.calls) == 17
            jobs.train(made, STEPS, {2: target}, record)
            results.append((oracle.gather(made.engine), record.losses))
    if len(results) < 2:
        return [], kept
    (one, losses), (other, expected) = results
    return oracle.differences(one, other) + ([] if losses == expected else ["losses"]), kept


def test_whole_parameters_beside_those_of_init(pool: RankPool) -> None:
    for differences, kept in pool.run(adapted_case, start=(2, 3), target=(4, 1)):
        assert differences == [] and kept


class Rows(nn.Sequential):
    """Eight matrices of 9 MB."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1536, 1536, bias=False) for _ in range(8)))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (super().forward(inputs[:, :1].float().expand(-1, 1536)) - targets[:, :1]).square().mean()


def peak_case(start: jobs.Sizes) -> tuple[bool, int, dict[str, int], int]:
    """(idle, bytes that `initialize` had at its peak beyond what was there before it, holdings, bytes of the parts)."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)  # what is freed goes back to the system at once
    jobs.run(settings("fp32", start), 1)  # imports
    config = settings("fp32", start)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Rows()
    parts = sum(held.ds_tensor.untyped_storage().nbytes() for held in model.parameters())
    before = jobs.resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    with jobs.job(config, model=model) as made:
        status = Path("/proc/self/status").read_text()
        peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        return made.engine.idle, peak - before, holdings(made.engine, 100_000), parts


@pytest.mark.parametrize("start", [pytest.param((2, 1), marks=pytest.mark.full), (3, 3)])
def test_no_more_than_the_shard_and_one_parameter(pool: RankPool, start: jobs.Sizes) -> None:
    one = 4 * 1536 * 1536
    shard = {1: 8 * one + 4 * one, 3: 2 * 8 * one // 3}[start[1]]  # weights and masters; weights and last gradients
    pool.renew()
    try:
        for idle, peak, held, parts in pool.run(peak_case, start=start):
            assert parts == 2 * one
            assert peak < (0 if idle else shard) + 4 * one, "gloo has copies of its own of what it gathers"
            if idle:
                assert held["parameters"] == held["states"] == 0 and not held["large"]
    finally:
        pool.renew()


def refused_case() -> list[str]:
    """What `initialize` says of models that it cannot take in."""
    config = settings("fp32", (2, 1))
    said: list[str] = []

    def start(model: nn.Module) -> None:
        with pytest.raises(ConfigError) as caught:
            ds_dynatrain.initialize(model=model, config=config)
        said.append(str(caught.value))

    alone = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
    model = small_gpt()
    deepspeed.zero.Init(module=model, data_parallel_group=alone[torch.distributed.get_rank()])
    start(model)
    model = converted(config)
    with deepspeed.zero.GatheredParameters([model.words.weight]):
        start(model)
    model.places.ds_tensor.ds_quant_scale = torch.ones(1)
    start(model)
    with deepspeed.zero.Init(config_dict_or_path=config):
        start(small_gpt())
    start(under_init({**config, "bf16": {"enabled": True}}))
    return said


def test_refusals(pool: RankPool) -> None:
    for said in pool.run(refused_case):
        assert len(said) == 5
        for words, sentence in zip(
            [
                "'places' was cut by deepspeed.zero.Init over a group of its own; leave data_parallel_group out",
                "'words.weight' is gathered now; end the `with GatheredParameters` block",
                "'places' is quantized",
                "inside of `with deepspeed.zero.Init",
                "'places' was built as torch.bfloat16 under deepspeed.zero.Init and the configuration says float32",
            ],
            said,
            strict=True,
        ):
            assert words in sentence
