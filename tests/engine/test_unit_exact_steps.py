"""Which global batches of an exact job are told of, on a member of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ds_dynatrain.exact.bits.bit_records import ExactStep
from ds_dynatrain.exact.bits.steps import ExactSteps
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.space.leaves import MicroStep


@pytest.fixture
def engine() -> Any:
    """Rank 1 of two, in the second micro-step of three leaves; digests come after step 100."""
    host = SimpleNamespace(micro_step=MicroStep(0, 2, 3), slot_is_borrowed=False)
    deepspeed = SimpleNamespace(get_global_grad_norm=lambda: torch.tensor(0.5))
    layout = SimpleNamespace(world_size=1)
    whole = {"host": host, "deepspeed": deepspeed, "layout": layout, "world": None, "place": lambda axis: 1}
    return SimpleNamespace(segment="1.0", global_steps=6, **whole)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[ExactStep]:
    found: list[ExactStep] = []
    monkeypatch.setattr(ExactSteps, "_tell", lambda steps, made: found.append(made))
    return found


def loss(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def train(steps: ExactSteps, engine: Any) -> None:
    """Leaf 1, and then a borrowed one."""
    engine.host.micro_step, engine.host.slot_is_borrowed = MicroStep(0, 2, 3), False
    steps.note_loss(loss(9.0))
    steps.note_loss(loss(0.25))
    steps.note_loss(torch.ones(2, requires_grad=True)), steps.note_loss("an output"), steps.note_loss(torch.tensor(3.0))
    engine.host.micro_step, engine.host.slot_is_borrowed = MicroStep(1, 2, 3), True
    steps.note_loss(loss(7.0))
    steps.finish_step()


def test_the_last_loss_of_a_leaf_counts(engine: Any, told: list[ExactStep]) -> None:
    steps = ExactSteps(cast("EngineCore", engine), 100)
    train(steps, engine)
    assert told == []
    steps.close_batch()
    steps.finish_step()
    steps.finish_step()
    assert told == [ExactStep(6, 0.5, (None, 0.25, None))]


def test_a_batch_that_is_discarded_leaves_no_loss(engine: Any, told: list[ExactStep]) -> None:
    steps = ExactSteps(cast("EngineCore", engine), 100)
    train(steps, engine)
    steps.forget_batch()
    steps.close_batch()
    steps.finish_step()
    assert told == [ExactStep(6, 0.5, (None, None, None))]


@pytest.mark.parametrize("change", [{"segment": "2.0"}, {"global_steps": 4}])
def test_nothing_is_told_of_a_world_that_has_ended(engine: Any, told: list[ExactStep], change: dict[str, Any]) -> None:
    """Some of its members may have told each other, and others not; in the next world all begin alike."""
    steps = ExactSteps(cast("EngineCore", engine), 100)
    train(steps, engine)
    steps.close_batch()
    vars(engine).update(change)
    steps.finish_step()
    vars(engine).update(segment="1.0", global_steps=6)
    steps.finish_step()
    assert told == []


def test_losses_of_a_pipeline(engine: Any, told: list[ExactStep]) -> None:
    steps = ExactSteps(cast("EngineCore", engine), 100)
    engine.host.micro_step = MicroStep(1, 2, 3)
    steps.note_losses([torch.tensor(0.5), torch.tensor(8.0)])
    steps.close_batch()
    steps.finish_step()
    assert told == [ExactStep(6, 0.5, (None, 0.5, None))]
