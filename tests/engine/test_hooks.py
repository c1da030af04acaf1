"""What users hang on parameters and modules stays: objects, attributes, hooks, an average of the weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import ds_dynatrain
from ds_dynatrain import Extension
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.extension import BUILT_IN
from ds_dynatrain.space import Layout
from tests.engine import jobs, oracle
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool

PATH: tuple[jobs.Sizes, ...] = ((2, 1), (4, 3), (2, 0), (3, 2), (4, 3), (2, 3), (1, 1), (4, 0))


def hooks_case(**sizes: int) -> dict[str, Any]:
    """Hooks of every sort count their calls; what they see is kept per step."""
    model = small_gpt(**sizes)
    named = dict(model.named_parameters())
    objects = {name: id(parameter) for name, parameter in named.items()}
    calls: dict[str, int] = dict.fromkeys(("gradient", "accumulated", "before", "after", "backward"), 0)
    weight = model.blocks[0].up.weight
    for name, parameter in named.items():
        parameter.my_name = name  # type: ignore[attr-defined]

    def count(what: str) -> Any:
        def hook(*_: Any) -> None:
            calls[what] += 1

        return hook

    handles = [
        weight.register_hook(count("gradient")),
        weight.register_post_accumulate_grad_hook(count("accumulated")),
        model.blocks[0].up.register_forward_pre_hook(count("before")),
        model.blocks[0].register_forward_hook(count("after")),
        model.blocks[0].up.register_full_backward_hook(count("backward")),
    ]
    schedule = {2 * number: sizes for number, sizes in enumerate(PATH) if number}
    steps = [0]
    settings = jobs.config(train_micro_batch_size_per_gpu=12)
    with jobs.job(settings, model=model) as made:
        modules = {name: id(part) for name, part in made.engine.module.named_modules()}

        def each(made: jobs.Job) -> None:
            steps[0] += 1
            assert made.engine.module is model
            assert {name: id(parameter) for name, parameter in model.named_parameters()} == objects
            assert {name: id(part) for name, part in model.named_modules()} == modules
            assert all(parameter.my_name == name for name, parameter in model.named_parameters())
            assert set(calls.values()) == {steps[0]}, (made.engine.layout, calls, steps[0])

        jobs.train(made, 2 * len(PATH), schedule, each=each)
    for handle in handles:
        handle.remove()
    return {"steps": steps[0], **calls}


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({}, id="small", marks=pytest.mark.full), pytest.param({"width": 64, "hidden": 260}, id="large")],
)
def test_objects_attributes_and_hooks_stay(pool: RankPool, sizes: dict[str, int]) -> None:
    found = pool.run(hooks_case, seconds=120, **sizes)
    assert found[0] == {**dict.fromkeys(found[0], 2 * len(PATH))}


class Ema(Extension):
    """The average of docs/extensions.md: whole on every rank, right at every stage."""

    name = "ema"

    def __init__(self, model: nn.Module) -> None:
        self.average = {name: held.detach().clone() for name, held in model.named_parameters()}
        self.updates = 0

    def after_step(self) -> None:
        model = self.engine.module
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            for name, held in model.named_parameters():
                self.average[name].lerp_(held.detach().to(self.average[name]), 0.1)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.updates = dict(state["average"]), state["updates"]


def ema_case(dtype: str) -> dict[str, Any]:
    """The average on each rank against one that is computed from what the oracle gathers after each step."""
    model = small_gpt().to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    ema = Ema(model)
    ema.average = {name: held.float() for name, held in ema.average.items()}
    weights: dict[int, dict[str, torch.Tensor]] = {}
    schedule = {2 * number: sizes for number, sizes in enumerate(PATH) if number}
    with jobs.job(jobs.config(dtype, train_micro_batch_size_per_gpu=12), model=model, extensions=[ema]) as made:
        switches: list[int] = []
        made.engine.on_switch(lambda event: switches.append(event.generation))

        def each(made: jobs.Job) -> None:
            assert ema.updates == made.engine.global_steps
            state = oracle.gather(made.engine)
            weights[ema.updates] = {name: flat for (name, kind), flat in state.tensors.items() if kind == "weight"}

        jobs.train(made, 2 * len(PATH), schedule, each=each)
    return {"average": ema.average, "updates": ema.updates, "weights": weights, "switches": switches}


@pytest.mark.full
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_an_average_of_the_weights(pool: RankPool, dtype: str) -> None:
    found = pool.run(ema_case, dtype=dtype, seconds=120)
    assert found[0]["switches"] == list(range(2, 2 + len(PATH) - 1))
    start = small_gpt().to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    for record in found:
        average = {name: held.detach().float().view(-1).clone() for name, held in start.named_parameters()}
        for step in range(1, record["updates"] + 1):
            for name, held in average.items():
                held.lerp_(found[0]["weights"][step][name].float(), 0.1)
        for name, held in average.items():
            assert torch.equal(held, record["average"][name].view(-1)), name
    assert found[0]["updates"] == found[3]["updates"] == 2 * len(PATH)


class Calls(Extension):
    """What is called, in order."""

    name = "calls"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def step_ms(self, layout: Layout, members: Sequence[int]) -> dict[str, float]:
        return {"total": 100.0 * layout.data + len(members)}

    def around_forward(self) -> AbstractContextManager[None]:
        return self._around("forward")

    def after_forward(self, output: Any) -> None:
        self.seen.append("output")

    def around_backward(self) -> AbstractContextManager[None]:
        return self._around("backward")

    def after_backward(self, loss: Any) -> None:
        self.seen.append("loss")

    def around_update(self) -> AbstractContextManager[None]:
        return self._around("update")

    def after_batch(self) -> None:
        self.seen.append("batch")

    def after_step(self) -> None:
        self.seen.append(f"step {self.engine.global_steps}")

    def on_batch_forgotten(self) -> None:
        self.seen.append("forgotten")

    def on_change(self, change: Any) -> None:
        self.seen.append(f"change to {change.after.layout.data}")

    @contextmanager
    def _around(self, what: str) -> Iterator[None]:
        self.seen.append(f"({what}")
        yield
        self.seen.append(f"{what})")


def hooks_of_extensions_case() -> dict[str, Any]:
    """A global batch of two micro-batches, a switch, and one more."""
    found = Calls()
    with jobs.job(jobs.config(train_micro_batch_size_per_gpu=3), extensions=[found]) as made:
        jobs.train(made, 2, {1: (4, 2)})
        packages = tuple(path.rpartition(".extension:")[0] for path in BUILT_IN.values())
        modules = sorted(name for name in sys.modules if name.startswith(packages))
        predicted = made.engine.plan(data=3, zero_stage=1).step_ms
    return {"seen": found.seen, "modules": modules, "predicted": predicted}


class Nameless(Extension):
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("extensions", "words"),
    [
        ([object()], r"extensions\[0\] is a object; derive its class from ds_dynatrain.Extension"),
        ([Nameless()], r"extensions\[0\], a Nameless, has a state_dict and no name for it"),
        ([Calls(), Calls()], r"extensions\[1\], a Calls: the name 'calls' is taken"),
        ([Calls()], "1 extensions were given, and the configuration has no dynatrain block"),
    ],
)
def test_extensions_that_cannot_be(extensions: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ds_dynatrain.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 2}, extensions=extensions)


def differing_extensions_case() -> str:
    """One process has an extension that the others have not."""
    extensions = [Calls()] if torch.distributed.get_rank() == 1 else []
    with pytest.raises(ConfigError) as caught, jobs.job(jobs.config(), extensions=extensions):
        pass
    return str(caught.value)


def test_all_processes_have_the_same_extensions(pool: RankPool) -> None:
    said = pool.run(differing_extensions_case)
    assert said == ["extensions is none on member 0 and Calls on member 1: make them equal"] * 4


PASS = ["(forward", "forward)", "output", "(backward", "backward)", "loss"]


def test_hooks_of_extensions(pool: RankPool) -> None:
    """Hooks come in their order; a job without the extensions of the package imports none of their modules."""
    pool.renew()  # earlier tests have imported them
    found = pool.run(hooks_of_extensions_case)
    end = ["(update", "update)", "batch", "forgotten"]
    second = [*PASS, *end, "step 2"]
    assert [record["seen"] for record in found] == [
        *[[*PASS, *PASS, *end, "step 1", "change to 4", *second]] * 2,
        *[["change to 4", *second]] * 2,
    ]
    assert [record["modules"] for record in found] == [[]] * 4
    assert [record["predicted"] for record in found] == [{"total": 303.0}] * 4
