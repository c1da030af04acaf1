"""Models on the meta device: drawn at the start, the same in every layout, and like any other from there on."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as td
from torch import nn

import ds_dynatrain
from ds_dynatrain.errors import ConfigError
from tests.engine import jobs, oracle
from tests.engine.models import SmallGPT, named_groups, small_gpt
from tests.engine.pool import RankPool
from tests.engine.test_members import holdings

STEPS = 5


class MetaGPT(SmallGPT):
    """The small model, whose own parameters can be drawn anew; its buffer is real."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.places, std=0.1)
        nn.init.ones_(self.scale)


def on_meta(**sizes: Any) -> MetaGPT:
    """The model without any memory, its table of places frozen."""
    with torch.device("meta"):
        model = MetaGPT(**sizes)
    model.calls = torch.zeros((), dtype=torch.int64)
    return model


def seeded() -> None:
    """Member 0's seed is the job's, whatever the others have."""
    torch.manual_seed(77 if td.get_rank() == 0 else 1000 + td.get_rank())


def trained(config: dict[str, Any], model: nn.Module, target: jobs.Sizes, **more: Any) -> tuple[dict[str, Any], Any]:
    """(states at the start and after the last step, where this member works; its losses)."""
    states: dict[str, Any] = {}
    record = jobs.Record()
    more = more or {"model_parameters": named_groups(model)}
    with jobs.job(config, model=model, **more) as made:
        if made.engine.idle:
            assert holdings(made.engine, 100_000)["parameters"] == 0
        else:
            states["start"] = oracle.gather(made.engine)
        jobs.train(made, STEPS, {2: target}, record)
        states["end"] = oracle.gather(made.engine)
    return states, record.losses


def twin_case(dtype: str, start: jobs.Sizes, target: jobs.Sizes, sizes: dict[str, Any]) -> tuple[list[str], Any]:
    """(what differs between the model and a real one with its values; the values at the start)."""
    config = jobs.config(dtype, start)
    seeded()
    before = torch.get_rng_state(), random.getstate()
    model = on_meta(**sizes)
    kept = [id(held) for held in model.parameters()]
    optimizer = torch.optim.AdamW(named_groups(model), lr=2e-3)
    states, losses = trained(config, model, target, optimizer=optimizer)
    assert model.out.weight is model.words.weight and [id(held) for held in model.parameters()] == kept
    values = td_broadcast(states["start"].tensors if "start" in states else None)
    real = small_gpt(**sizes)
    with torch.no_grad():
        for name, held in real.named_parameters():
            held.copy_(values[name, "weight"].view(held.shape))
    seeded()
    assert torch.equal(before[0], torch.get_rng_state())
    twins, expected = trained(config, real, target)
    found = [] if losses == expected and states.keys() == twins.keys() else ["losses"]
    for when in states:
        found += [f"{when}: {words}" for words in oracle.differences(states[when], twins[when])]
    return found, {key: held.sum().item() for key, held in values.items() if key[1] == "weight"}


def td_broadcast(value: Any) -> Any:
    """Rank 0's."""
    box = [value]
    td.broadcast_object_list(box, 0)
    return box[0]


CASES: list[Any] = [
    ("fp32", (2, 0), (4, 3)),
    pytest.param("fp32", (3, 3), (2, 1), marks=pytest.mark.full),
    pytest.param("bf16", (2, 1), (4, 2), marks=pytest.mark.full),
    pytest.param("bf16", (4, 3), (1, 0), marks=pytest.mark.full),
]


@pytest.mark.parametrize(("dtype", "start", "target"), CASES)
def test_equal_to_its_real_twin(pool: RankPool, dtype: str, start: jobs.Sizes, target: jobs.Sizes) -> None:
    sizes = {"width": 160, "hidden": 200} if start[0] == 2 else {}
    for differences, _ in filter(None, pool.run(twin_case, dtype=dtype, start=start, target=target, sizes=sizes)):
        assert differences == []


def values_case(start: jobs.Sizes) -> dict[Any, torch.Tensor] | None:
    seeded()
    with jobs.job(jobs.config("fp32", start), model=on_meta()) as made:
        return None if made.engine.idle else oracle.gather(made.engine).tensors
    return None


def test_the_same_values_in_every_layout(pool: RankPool) -> None:
    found = [pool.run(values_case, start=start)[0] for start in [(1, 0), (2, 2), (4, 3)]]
    assert found[0] is not None
    weights = {key: held for key, held in found[0].items() if key[1] == "weight"}
    for other in found[1:]:
        assert other is not None
        assert all(torch.equal(other[key], held) for key, held in weights.items())
    assert 0.05 < weights["places", "weight"].std() < 0.2
    assert weights["words.weight", "weight"].unique().numel() > 100


class Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        """Leaves the bias as it is."""
        nn.init.ones_(self.weight)


class Uneven(nn.Linear):
    def reset_parameters(self) -> None:
        """Another value on each rank."""
        nn.init.constant_(self.weight, td.get_rank() + 1)
        nn.init.zeros_(self.bias)


class Scaled(nn.Module):
    """A linear layer and a parameter of its own, without `reset_parameters`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs.float()) * self.scale.mean()
        return (outputs - targets).square().mean()


def refused_case() -> list[str]:
    """What `initialize` says of models that cannot be drawn."""
    said: list[str] = []

    def start(model: nn.Module, **more: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            ds_dynatrain.initialize(model=model, config=jobs.config("fp32", (2, 1)), **more)
        said.append(str(caught.value))

    with torch.device("meta"):
        scaled, normed, forgetful, uneven = Scaled(nn.Linear(6, 6)), nn.BatchNorm1d(6), Forgetful(6, 6), Uneven(6, 6)
        half = nn.Linear(6, 6)
    half.bias = nn.Parameter(torch.zeros(6))
    start(scaled)
    start(normed)
    start(half)
    start(forgetful)
    start(uneven)
    return said


def test_refusals(pool: RankPool) -> None:
    results = pool.run(refused_case)
    for said in results:
        for words, sentence in zip(
            [
                "'scale' is on the meta device, and Scaled has no reset_parameters: give its class",
                "buffer 'running_mean' is on the meta device: make it real",
                "'weight' is on the meta device and 'bias' beside it is not",
                "'bias' of Forgetful is on the meta device and was not set",
                "'weight' was drawn with other values on member 1 than on member 0",
            ],
            said,
            strict=True,
        ):
            assert words in sentence


def init_case() -> list[float]:
    """With `param_init_fn`, and a part of the model that is real."""

    def init(module: nn.Module) -> None:
        for held in module.parameters(recurse=False):
            nn.init.constant_(held, 0.5)

    with torch.device("meta"):
        model = Scaled(nn.Linear(6, 6))
    model.inner = nn.Linear(6, 6)
    with torch.no_grad():
        model.inner.weight.fill_(td.get_rank() + 3.0)  # member 0's counts
    with jobs.job(jobs.config("fp32", (2, 2)), model=model, groups=False, param_init_fn=init) as made:
        if not made.engine.idle:
            held = oracle.gather(made.engine).tensors
            return [held["scale", "weight"].mean().item(), held["inner.weight", "weight"].mean().item()]
    return []


def test_a_function_of_the_users_and_real_parts(pool: RankPool) -> None:
    assert pool.run(init_case)[:2] == [[0.5, 3.0]] * 2
