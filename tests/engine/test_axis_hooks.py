"""What users hang on a model across changes that make new parameters: an average, a hook, their own references."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

import ds_dynatrain
from tests.engine import axis_walks, jobs, oracle
from tests.engine.pool import RankPool
from tests.engine.subjects import CHANGES
from tests.engine.transitions import layout

PAGE = Path(__file__).parents[2] / "docs" / "axes.md"
SHARE = 0.1


class Averaging(torch.optim.AdamW):
    """AdamW that keeps an average of the weights beside its moments."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for held in group["params"]:
                if held.grad is not None:
                    self.state[held].setdefault("average", held.detach().clone()).lerp_(held.detach(), SHARE)
        return loss


ds_dynatrain.register_optimizer(
    Averaging, moments=["exp_avg", "exp_avg_sq", "average"], scalars={"step": torch.tensor(0.0)}
)


def followed(change: str, layer: str) -> list[int]:
    """Steps in which a hook on a layer was called, in a run that goes there and back; the rest is checked here."""
    wanted, called, events = CHANGES[change], list[int](), list[Any]()
    subject, path = wanted.find(), [layout(wanted.source), layout(wanted.target), layout(wanted.source)]
    settings = {**axis_walks.configured(subject, "fp32", path[0]), "zero_allow_untested_optimizer": True}
    del settings["optimizer"]

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        named = {"params": parameters, "name": "all"}
        return Averaging(split(named) if subject.probe else parameters, lr=2e-3)  # experts apart

    with jobs.job(settings, subject.build(), subject.data(120), groups=False, optimizer=optimizer) as made:
        engine, batches = made.engine, iter(made.loader)
        held = dict(engine.module.named_parameters())
        if layer in dict(engine.module.named_modules()):
            hooked = engine.module.get_submodule(layer)
            hooked.register_forward_hook(lambda *_: called.append(engine.global_steps))

        @engine.on_switch
        def take_new_parameters(event: Any) -> None:
            events.append(event)
            new = dict(engine.module.named_parameters())
            assert all(new[name] is not old for name, old in held.items() if name in new)
            held.clear()
            held.update(new)

        before = None
        for number in range(9):
            subject.step(engine, next(batches))
            assert engine.layout == path[number // 3] and len(events) == number // 3
            assert all(held[name] is now for name, now in engine.module.named_parameters())
            before = checked(oracle.gather(engine, subject.places), before)
            if number % 3 == 2 and number < 8:
                engine.switch(path[number // 3 + 1], at=engine.global_steps)
    return called


def checked(state: oracle.State, before: oracle.State | None) -> oracle.State:
    """The average of every parameter is that of the step before and of the weights that are there now."""
    averages = {name: held for (name, kind), held in state.tensors.items() if kind == "average"}
    assert averages.keys() == {name for name, kind in state.tensors if kind == "exp_avg"} and averages
    for name, held in averages.items() if before else ():
        expected = before.tensors[name, "average"].lerp(state.tensors[name, "master"], SHARE)
        assert torch.allclose(held, expected, rtol=1e-6, atol=1e-9), name
        assert not torch.equal(held, state.tensors[name, "master"]), name
    return state


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "layer"),
    [
        ("tensor", "model.layers.0.self_attn.q_proj"),
        ("AutoEP", "model.layers.1.mlp"),
        ("deepspeed.moe", "first"),
        ("pipe", "1"),
    ],
)
def test_an_average_and_a_hook(pool: RankPool, change: str, layer: str) -> None:
    """In a pipeline the layer leaves some members and comes back to them, without the hook that it had there."""
    found = pool.run(followed, change=change, layer=layer)
    assert found[0] == list(range(9))
    if change != "pipe":
        assert all(called == found[0] for called in found)


def pasted(script: str) -> tuple[list[int], list[tuple[int, ...]]]:
    """Run a script of the docs as it stands: steps that its hook saw, and shapes of what it held after each switch."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shapes: list[tuple[int, ...]] = []
    exec(script, names)
    engine = names["engine"]
    try:
        now = dict(engine.module.named_parameters())
        assert names["held"].keys() == now.keys() and all(names["held"][name] is held for name, held in now.items())
        shapes.append(tuple(now["model.layers.0.self_attn.q_proj.weight"].shape))
        assert engine.layout == layout("t4z1") and engine.generation == 3
        return names["seen"], shapes
    finally:
        engine.destroy()


@pytest.mark.full
def test_the_script_of_the_docs(pool: RankPool) -> None:
    found = re.search(r"```python\n(# tensor\.py\n.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    for seen, shapes in pool.run(pasted, script=found[1]):
        assert seen == [0, 1, 2, 2, 3, 3, *(step for step in range(4, 8) for _ in range(4))]
        assert shapes == [(16, 64)]
