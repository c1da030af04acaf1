"""What cannot be done is refused on all members alike, by name and with numbers, and training goes on as if unasked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as td
from torch import nn

import ds_dynatrain
from ds_dynatrain.errors import ConfigError, DynatrainError, SwitchRefused
from ds_dynatrain.reshard import feasible
from tests.engine import faults, jobs
from tests.engine.models import Sequences, small_gpt
from tests.engine.pool import RankPool

ASK_AT, STEPS = 3, 8
Asking = Callable[[Any], object]

# ---- what a member asks for, by its number ------------------------------------------------------------------


def _same(**changes: Any) -> Asking:
    return lambda engine: engine.switch(**changes)


def _another_layout(engine: Any) -> object:
    return engine.switch(data=3 + engine.rank)


def _another_step(engine: Any) -> object:
    return engine.switch(data=4, at=ASK_AT + engine.rank)


def _not_everyone(engine: Any) -> object:
    return engine.switch(data=4) if engine.rank == 0 else None


def _second_while_pending(engine: Any) -> object:
    engine.switch(data=4, at=STEPS - 1)
    return engine.switch(data=3)


def _no_memory(engine: Any) -> object:
    with patch.object(feasible, "available_bytes", lambda: 1000 if engine.rank == 1 else 1 << 40):
        return engine.switch(data=4)


def _tensor_as_rate(engine: Any) -> object:
    group = engine.optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], torch.tensor(group["lr"])
    try:
        return engine.switch(data=4)
    finally:
        group["lr"] = rate


REFUSALS: dict[str, tuple[Asking, str]] = {
    "size 0": (_same(data=0), "data=0 is below 1"),
    "more than there are": (_same(data=5), r"needs 5 members and this launch has 4 processes; nearest: .*data=4"),
    "pipe": (
        _same(pipe=2),
        "data=2 pipe=2 .*: the model has no pipe axis: it is not a .*PipelineModule; nearest: data=4",
    ),
    "tensor": (_same(tensor=2), "AutoTP cannot cut SmallGPT: .*choose other sizes"),
    "sequence": (_same(sequence=2), "the model has no sequence axis: it has no DistributedAttention .*nearest: data=4"),
    "another type": (lambda engine: engine.switch({"data": 4}), "is no Layout"),
    "another layout on each": (
        _another_layout,
        "different switches: member 0 for .*data=3.*member 1 for .*data=4",
    ),
    "another step on each": (_another_step, "ask for different switches: .* at step 3 .* at step 4"),
    "one does not ask": (_not_everyone, "every working member has to ask for it: no answer from member 1"),
    "a second one": (_second_while_pending, "a switch to .*data=4.* is pending; ask again once"),
    "a tensor as a rate": (_tensor_as_rate, "'lr' of parameter group 0 is, or holds, a tensor .* use a number"),
    "no memory": (_no_memory, r"member 1: the members on node .* need \d+ bytes .* and 1000 are available"),
}


def asking(what: str | None, patience: float) -> dict[str, Any]:
    """Train; in the middle ask for what is refused. On an idle member nothing happens."""
    settings = jobs.config("fp32", (2, 1))
    settings["dynatrain"]["timeout_seconds"] = patience
    result: dict[str, Any] = {"record": jobs.Record(), "refusal": None}

    def each(made: jobs.Job) -> None:
        if what is None or made.engine.global_steps != ASK_AT:
            return
        begin = time.monotonic()
        try:
            REFUSALS[what][0](made.engine)
        except SwitchRefused as refusal:
            result["refusal"], result["way out"] = str(refusal), refusal.way_out
        result["seconds"] = time.monotonic() - begin

    with jobs.job(settings) as made:
        try:
            faults.train(made, STEPS, {}, result["record"], each)
        finally:
            result["last"] = made.engine.last_switch
    return result


@pytest.fixture(scope="module")
def quiet(pool: RankPool) -> list[Any]:
    """A run in which nobody asks."""
    return pool.run(asking, what=None, patience=20)


@pytest.mark.parametrize("what", REFUSALS)
def test_refusal(pool: RankPool, quiet: list[Any], what: str) -> None:
    found = pool.run(asking, what=what, patience=2 if what == "one does not ask" else 20)
    asked = [0] if what == "one does not ask" else [0, 1]
    for rank in asked:
        with pytest.raises(AssertionError, match=REFUSALS[what][1]):
            raise AssertionError(found[rank]["refusal"])
        assert found[rank]["way out"] or "differ" not in found[rank]["refusal"]
    assert len({found[rank]["refusal"] for rank in asked}) == 1 or what in ("another layout on each",)
    assert found[0]["seconds"] < 5
    for rank in (0, 1):
        steps = range(STEPS - 1 if what == "a second one" else STEPS)
        for step in steps:
            assert found[rank]["record"].losses[step] == quiet[rank]["record"].losses[step]
        assert found[rank]["last"] is None or what == "a second one"


def asking_late() -> dict[str, Any]:
    """Member 0 asks alone, a step later member 1 asks alone, and then both ask at one step."""
    settings = jobs.config("fp32", (2, 1))
    settings["dynatrain"]["timeout_seconds"] = 4.0
    result: dict[str, Any] = {"record": jobs.Record(), "refusals": []}

    def each(made: jobs.Job) -> None:
        engine = made.engine
        if engine.global_steps == ASK_AT + engine.rank:
            try:
                engine.switch(data=4)
            except SwitchRefused as refusal:
                result["refusals"].append(str(refusal))
        if engine.global_steps == ASK_AT + 3:
            jobs.ask(engine, (4, 1))

    with jobs.job(settings) as made:
        try:
            faults.train(made, STEPS, {}, result["record"], each)
        finally:
            result["last"] = made.engine.last_switch
    return result


def test_after_a_refusal_all_can_ask_again(pool: RankPool) -> None:
    found = pool.run(asking_late)
    for rank in (0, 1):
        (words,) = found[rank]["refusals"]
        assert f"no answer from member {1 - rank}" in words
    assert [each["last"].outcome for each in found] == ["committed"] * 4


# ---- what initialize refuses --------------------------------------------------------------------------------


class Renamed(nn.Module):
    """One parameter has another name, or another shape, on one rank."""

    def __init__(self, name: str, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        setattr(self, name, nn.Linear(3, width))


def initializing(how: str) -> str:
    """The error of `initialize`, with its class."""
    model: Any = small_gpt()
    settings = jobs.config("fp32", (2, 1))
    arguments: dict[str, Any] = {}
    if how == "names":
        model = Renamed("second" if td.get_rank() != 2 else "third")
    elif how == "shapes":
        model = Renamed("second", 3 + td.get_rank() // 3)
    elif how == "types":
        model = small_gpt().to(torch.bfloat16 if td.get_rank() == 1 else torch.float32)
    elif how == "batch below data":
        settings["train_batch_size"] = 1
    elif how == "two configurations":
        arguments["config_params"] = {"train_batch_size": 4}
    try:
        ds_dynatrain.initialize(model=model, config=settings, **arguments)
    except DynatrainError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("names", r"ConfigError: parameter 2 is .*second\.weight.* on member 0 and .*third\.weight.* on member 2"),
        ("shapes", r"ConfigError: parameter 2 is .*\[3, 3\].* on member 0 and .*\[4, 3\].* on member 3"),
        ("types", r"ConfigError: parameter 0 is .*float32.* on member 0 and .*bfloat16.* on member 1"),
        ("batch below data", "data=2 ranks share a train_batch_size of 1"),
        ("two configurations", "ConfigError: 2 DeepSpeed configurations"),
    ],
)
def test_initialize_refuses_on_all_members(pool: RankPool, how: str, words: str) -> None:
    found = pool.run(initializing, how=how)
    assert len(set(found)) == 1
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found[0])
    assert pool.run(initializing, how=how) == found, "nothing is left behind: it fails the same way again"


def after_an_error() -> int:
    """A job in the same processes, after `initialize` was refused."""
    settings = jobs.config("fp32", (2, 1))
    settings["dynatrain"]["layout"]["data"] = 5
    with pytest.raises(ConfigError):
        ds_dynatrain.initialize(model=small_gpt(), config=settings)
    with pytest.raises(ConfigError):
        ds_dynatrain.initialize(model=Renamed(f"rank{td.get_rank()}"), config=jobs.config("fp32", (2, 1)))
    record = jobs.Record()
    with jobs.job(jobs.config("fp32", (2, 1))) as made:
        jobs.train(made, 3, {}, record)
    return len(record.losses)


def test_a_job_after_a_refused_one(pool: RankPool) -> None:
    assert pool.run(after_an_error) == [3, 3, 0, 0]


class Stream(torch.utils.data.IterableDataset[Any]):
    """No length, no index."""

    def __iter__(self) -> Any:
        yield from range(3)


def loaders() -> list[str]:
    """The errors of `engine.loader` and `engine.register_for_checkpointing`."""
    found = []
    with jobs.job(jobs.config("fp32", (4, 1))) as made:
        batches = torch.utils.data.BatchSampler(range(9), 3, False)
        by_batches = torch.utils.data.DataLoader(Sequences(), batch_sampler=[[1, 2], [3]])
        weighted = torch.utils.data.WeightedRandomSampler([1.0] * 96, 96)
        attempts: list[Callable[[], object]] = [
            lambda: made.engine.loader(iter(range(3))),
            lambda: made.engine.loader(Stream(), shuffle=True),
            lambda: made.engine.loader(Stream(), evaluation=True),
            lambda: made.engine.loader(by_batches),
            lambda: made.engine.loader(torch.utils.data.DataLoader(Sequences(), batch_sampler=batches)),
            lambda: made.engine.loader(torch.utils.data.DataLoader(Sequences(), sampler=weighted)),
            lambda: made.engine.loader(Sequences(), name="train"),
            lambda: made.engine.register_for_checkpointing("x", object()),
        ]
        for attempt in attempts:
            try:
                attempt()
                found.append("no error")
            except DynatrainError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_loaders_and_carried_objects(pool: RankPool) -> None:
    found = pool.run(loaders)[0]
    for words, error in zip(
        [
            "is an iterator, which can be read only once",
            "cannot be shuffled",
            "cannot be evaluated",
            "batch",
            "batch",
            "ampler",
            "give another name",
            "has no state_dict and no load_state_dict",
        ],
        found,
        strict=True,
    ):
        assert words in error and not error.startswith("no error"), error
