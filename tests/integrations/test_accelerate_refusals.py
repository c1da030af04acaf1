"""What an Accelerator over a world that changes refuses, each by name and with a way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DataLoaderConfiguration, DeepSpeedPlugin
from torch.utils.data import DataLoader, WeightedRandomSampler

from ds_dynatrain.errors import ConfigError, DataError, UnsupportedError
from ds_dynatrain.integrations.huggingface.accelerators import GIVEN
from tests.engine.pool import RankPool
from tests.integrations import loops, trainers

LAYOUT = "a layout with pipe, tensor, expert or sequence"
ASKED: dict[str, dict[str, Any]] = {
    "split_batches and dispatch_batches": {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
    "tensor_parallel.autotp_size (tp_model_init)": {"config": {"tensor_parallel": {"autotp_size": 2}}},
    LAYOUT: {"block": {"layout": {"tensor": 2}}},
}
"""By the name of a refusal, what asks for it."""


def said_by(call: Callable[[], Any]) -> str:
    """The message of the error that it raises."""
    with pytest.raises((UnsupportedError, ConfigError, DataError)) as caught:
        call()
    return str(caught.value)


def given_case() -> dict[str, str]:
    """The message of each refusal of what an Accelerator is given."""
    found = {
        name: said_by(lambda asked=asked: loops.accelerator_of(**{"block": {}, **asked}))
        for name, asked in ASKED.items()
    }
    loops.begin()
    found["no block"] = said_by(lambda: loops.ours(DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}})))
    made = loops.accelerator_of({})
    for name, place, attribute, value in (  # their own constructors want more than there is here
        ("several DeepSpeed plug-ins", made.state, "deepspeed_plugins", {"one": None, "other": None}),
        ("ParallelismConfig", made.state, "parallelism_config", object()),
        ("use_stateful_dataloader", made.dataloader_config, "use_stateful_dataloader", True),
    ):
        was = getattr(place, attribute, None)
        setattr(place, attribute, value)
        (refusal,) = [each for each in GIVEN if each.name == name]
        assert refusal.is_wanted(made)
        setattr(place, attribute, was)
        found[name] = f"{refusal.name}: {refusal.why}; {refusal.instead}"
    return found


def test_what_it_is_given(alone: RankPool) -> None:
    said = alone.run(given_case)[0]
    assert "no 'dynatrain' block in its configuration" in said.pop("no block")
    assert set(said) == {refusal.name for refusal in GIVEN}
    for refusal in GIVEN:
        assert said[refusal.name] == f"{refusal.name}: {refusal.why}; {refusal.instead}"


def texts(batch_size: int = 3, **named: Any) -> DataLoader[Any]:
    """A DataLoader over samples with an index."""
    return DataLoader(trainers.Texts(24), batch_size=batch_size, **named)


def prepared_case() -> dict[str, str]:
    """What is prepared, before there is an engine."""
    model = trainers.model()
    optimizer = torch.optim.AdamW(model.parameters())
    steady = torch.optim.lr_scheduler.ConstantLR(optimizer)
    fresh: Callable[..., Any] = loops.accelerator_of
    found = {
        "no optimizer": said_by(lambda: fresh({}).prepare(model, texts())),
        "no model": said_by(lambda: fresh({}).prepare(optimizer, texts())),
        "a scheduler": said_by(lambda: fresh({}).prepare(steady, texts())),
        "prepare_scheduler": said_by(lambda: fresh({}).prepare_scheduler(steady)),
        "two shuffle": said_by(lambda: fresh({}).prepare(texts(shuffle=True), texts(shuffle=True))),
        "no loader": said_by(lambda: fresh({}).prepare(model, optimizer)),
        "sizes": said_by(
            lambda: fresh({}, config={"train_micro_batch_size_per_gpu": 2}).prepare(model, optimizer, texts())
        ),
        "a part of a process": said_by(
            lambda: fresh({}, config={"train_batch_size": 12}).prepare(model, optimizer, texts(8), steady)
        ),
    }
    return found


def test_what_it_prepares(alone: RankPool) -> None:
    said = alone.run(prepared_case)[0]
    assert "a model without its optimizer" in said["no optimizer"]
    assert "an optimizer without its model" in said["no model"]
    assert "a scheduler without its model" in said["a scheduler"]
    assert "in one call" in said["prepare_scheduler"]
    assert "a second DataLoader that trains" in said["two shuffle"] and "evaluation=True" in said["two shuffle"]
    assert "no training DataLoader is prepared" in said["no loader"]
    assert "is 2 and the training DataLoader has batches of 3" in said["sizes"]
    assert "train_batch_size is 1.50 times" in said["a part of a process"]


def used_case(folder: Path) -> dict[str, str]:
    """Loaders and calls, once there is an engine."""
    model = trainers.model()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = loops.accelerator_of({}, config={"train_batch_size": 6, "train_micro_batch_size_per_gpu": 3})
    found = {"save before prepare": said_by(lambda: accelerator.save_state(str(folder)))}
    engine, optimizer = accelerator.prepare(model, optimizer)
    found |= {
        "second model": said_by(lambda: accelerator.prepare(model, optimizer.optimizer)),
    }
    sampler = WeightedRandomSampler([1.0] * 24, 24)
    found["sampler"] = said_by(
        lambda: accelerator.prepare(DataLoader(trainers.Texts(24), batch_size=3, sampler=sampler))
    )
    training, evaluating = accelerator.prepare(texts(shuffle=True), texts())
    (inputs,) = list(evaluating)[:1]
    found["evaluating"] = said_by(lambda: accelerator.backward(engine(**inputs).loss))
    batches = iter(training)
    ahead = [next(batches), next(batches)]
    found["ahead"] = said_by(lambda: accelerator.backward(engine(**ahead[0]).loss))
    found["skip"] = said_by(lambda: accelerator.skip_first_batches(training, 2))
    found["save"] = said_by(lambda: accelerator.save_state(str(folder), client_state={}))
    accelerator.free_memory()
    return found


def test_how_it_is_used(alone: RankPool, tmp_path: Path) -> None:
    said = alone.run(used_case, folder=tmp_path)[0]
    assert "there is no engine yet" in said["save before prepare"]
    assert "a second model" in said["second model"]
    assert "WeightedRandomSampler" in said["sampler"]
    assert "outside of a loop over the training DataLoader" in said["evaluating"]
    assert "2 micro-batches of the global batch were drawn" in said["ahead"]
    assert "load_state goes to the next sample" in said["skip"]
    assert "client_state" in said["save"]


def seeds_case() -> str:
    """Each process has a generator of its own."""
    accelerator = loops.accelerator_of({"layout": {"data": 2}})
    model, generator = trainers.model(), torch.Generator().manual_seed(accelerator.process_index)
    made = model, torch.optim.AdamW(model.parameters()), texts(shuffle=True, generator=generator)
    try:
        accelerator.prepare(*made)
    except ConfigError as error:
        return str(error)
    finally:
        accelerator.free_memory()
    return ""


def test_seeds_of_their_own(four: RankPool) -> None:
    said = four.run(seeds_case)
    assert "different seeds on different processes: [0, 1]" in said[0] and said[0] == said[1]
