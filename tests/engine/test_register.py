"""What is trained changes while the job runs: `engine.update_param_groups`, before, between and after switches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as td
from torch import nn

from ds_dynatrain.adapters.deepspeed.host import Host
from ds_dynatrain.adapters.groups.worlds import WorldSpec, build_world, drop
from ds_dynatrain.engine.checkpoints.restore import restore
from ds_dynatrain.errors import CheckpointError, SwitchFailed, SwitchRefused
from ds_dynatrain.space import Layout
from tests.engine import freezing, jobs, oracle
from tests.engine.freezing import trained, wrong_after
from tests.engine.models import Sequences, small_gpt
from tests.engine.pool import RankPool
from tests.sets import one_in

STEPS = 10
FIRST = ("blocks.0", "last_norm", "scale")
CHANGES: Mapping[int, tuple[tuple[str, ...], tuple[str, ...]]] = {
    4: (("blocks.1", "places"), ()),
    8: (("words",), ("blocks.0",)),
}
"""Steps done -> (what is trained from there on, what is frozen)."""


def partly_trained(**sizes: Any) -> nn.Module:
    """The small model, of which only `FIRST` is trained."""
    model = small_gpt(**sizes)
    for name, held in model.named_parameters():
        held.requires_grad_(name.startswith(FIRST))
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters listed, frozen ones too, in two groups."""
    named = list(model.named_parameters())
    return [
        {"params": [held for name, held in named if "norm" not in name], "weight_decay": 0.1},
        {"params": [held for name, held in named if "norm" in name], "weight_decay": 0.0},
    ]


def settings(dtype: str, start: jobs.Sizes, **more: Any) -> dict[str, Any]:
    return jobs.config(dtype, start, **{"gradient_clipping": 0.0, **more})


def flip(model: nn.Module, step: int) -> None:
    """Freeze and unfreeze as `CHANGES` has it."""
    freezing.flip(model, *CHANGES[step])


def change(made: jobs.Job) -> list[str]:
    """Change what is trained; what is not as it should be, in words."""
    engine = made.engine
    if engine.global_steps not in CHANGES:
        return []
    was = trained(engine.module)
    flip(engine.module, engine.global_steps)
    before = oracle.gather(engine)
    found = [] if "update_param_groups" in engine.plan(data=1).refusal + engine.plan(data=1).way_out else ["no refusal"]
    assert engine.update_param_groups()
    assert not engine.update_param_groups(), "nothing has changed since"
    return found + wrong_after(before, oracle.gather(engine), was, trained(engine.module))


def job_case(
    dtype: str, start: jobs.Sizes, schedule: jobs.Schedule, sizes: dict[str, Any]
) -> tuple[jobs.Record, list[str], list[Any]]:
    """A job that switches and registers; its losses, what is wrong, and the batches of a rank."""
    record, wrong, batches = jobs.Record(), list[str](), list[Any]()
    model = partly_trained(**sizes)

    def each(made: jobs.Job) -> None:
        wrong.extend(change(made))

    original = jobs.one_micro_batch

    def noting(engine: Any, batch: Any, into: jobs.Record) -> None:
        batches.append(batch)
        original(engine, batch, into)

    with jobs.job(settings(dtype, start), model=model, model_parameters=groups_of(model)) as made:
        with patch.object(jobs, "one_micro_batch", noting):
            jobs.train(made, STEPS, schedule, record, each)
        wrong.extend(f"{event.outcome}: {event.reason}" for event in record.events if event.outcome != "committed")
    return record, wrong, batches


def plain_losses(batches: list[Any]) -> list[float]:
    """The same in plain torch: a new group for what is trained anew."""
    model = partly_trained()
    optimizer = torch.optim.AdamW(groups_of(model), lr=2e-3)
    losses = []
    for step, batch in enumerate(batches):
        if step in CHANGES:
            was = {id(held) for held in model.parameters() if held.requires_grad}
            flip(model, step)
            for group in list(optimizer.param_groups):
                fresh = [held for held in group["params"] if held.requires_grad and id(held) not in was]
                group["params"] = [held for held in group["params"] if all(held is not each for each in fresh)]
                if fresh:
                    optimizer.add_param_group({**group, "params": fresh})
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        for held in model.parameters():
            if not held.requires_grad:
                held.grad = None
        optimizer.step()
    return losses


def test_as_plain_torch(pool: RankPool) -> None:
    records = pool.once(job_case, dtype="fp32", start=(1, 0), schedule={}, sizes={})
    record, wrong, batches = records[0]
    assert wrong == []
    assert jobs.furthest(jobs.global_losses([record]), plain_losses(batches)) <= 1e-6


WALKS: list[tuple[jobs.Sizes, jobs.Schedule]] = [
    ((2, 1), {2: (4, 3), 6: (1, 0), 9: (3, 2)}),
    ((2, 3), {2: (2, 2), 6: (4, 1), 9: (2, 0)}),
    ((3, 0), {2: (3, 3), 6: (4, 3), 9: (2, 1)}),
]


@pytest.mark.full
@pytest.mark.parametrize(("start", "schedule"), WALKS)
def test_freeze_switch_unfreeze_switch(pool: RankPool, start: jobs.Sizes, schedule: jobs.Schedule) -> None:
    found = pool.run(job_case, dtype="fp32", start=start, schedule=schedule, sizes={})
    still = pool.once(job_case, dtype="fp32", start=(1, 0), schedule={}, sizes={})
    assert [wrong for _, wrong, _ in filter(None, found)] == [[]] * len([each for each in found if each])
    losses = jobs.global_losses([each and each[0] for each in found])
    assert len(losses) == STEPS
    assert jobs.furthest(losses, jobs.global_losses([still[0][0]])) <= 2e-6


@pytest.mark.full
@pytest.mark.parametrize(("start", "schedule"), WALKS[:2])
def test_in_low_precision(pool: RankPool, start: jobs.Sizes, schedule: jobs.Schedule) -> None:
    wide = {"width": 160, "hidden": 200}
    found = pool.run(job_case, dtype="bf16", start=start, schedule=schedule, sizes=wide)
    assert [wrong for _, wrong, _ in filter(None, found)] == [[]] * len([each for each in found if each])


# ---- what cannot be ------------------------------------------------------------------------------------------------


def _unfreeze_on_one(engine: Any) -> None:
    engine.module.places.requires_grad_(td.get_rank() == 1)


def _freeze(engine: Any) -> None:
    engine.module.scale.requires_grad_(False)


def _add_group(engine: Any) -> None:
    engine.basic_optimizer.add_param_group({"params": [engine.module.places]})


def _add_parameter(engine: Any) -> None:
    engine.module.more = nn.Parameter(torch.ones(3))


AT_SWITCH: dict[str, tuple[Callable[[Any], None], str]] = {
    "unfrozen on one": (_unfreeze_on_one, "member 1: 'places' requires a gradient now: it has changed .*update_param"),
    "frozen": (_freeze, "'scale' is frozen now: it has changed since it was registered"),
    "another group": (_add_group, "the optimizer has 3 groups and had 2: .*update_param_groups"),
    "a new parameter": (_add_parameter, "'more' is new in the model.*frozen if necessary"),
}


def asking_case(what: str) -> list[str]:
    """Change something and ask for a switch; ask first and change then. What was said."""
    said: list[str] = []

    def each(made: jobs.Job) -> None:
        engine = made.engine
        if engine.global_steps == 1:
            engine.switch(data=3, at=3)
        if engine.global_steps == 3:
            assert engine.last_switch is None
            AT_SWITCH[what][0](engine)
        if engine.global_steps == 4:
            said.append(f"{engine.last_switch.outcome}: {engine.last_switch.reason}")
            with pytest.raises(SwitchRefused) as caught:
                engine.switch(data=4)
            said.append(str(caught.value))
            del engine.basic_optimizer.param_groups[2:]  # DeepSpeed's destroy() relies on their number

    model = partly_trained()
    with jobs.job(settings("fp32", (2, 1)), model=model, model_parameters=groups_of(model)) as made:
        for batch in made.loader:
            jobs.one_micro_batch(made.engine, batch, jobs.Record())
            each(made)
            if made.engine.global_steps == 5:
                break
    return said


@pytest.mark.parametrize("what", AT_SWITCH)
def test_refused_at_a_switch(pool: RankPool, what: str) -> None:
    for said in filter(None, pool.run(asking_case, what=what)[:2]):
        words = AT_SWITCH[what][1]
        assert said[0].startswith("rolled_back")
        for sentence in said:
            expected = words.removeprefix("member 1: ") if sentence is said[0] else words
            assert re.search(expected, sentence), sentence


def refusals_case() -> list[str]:
    """Calls of `update_param_groups` that cannot be carried out; what was said, and whether nothing has changed."""
    said: list[str] = []

    def refused(engine: Any, *groups: Any) -> None:
        with pytest.raises(SwitchRefused) as caught:
            engine.update_param_groups(*groups)
        said.append(str(caught.value))

    model = partly_trained()
    data = Sequences(12 * 8)
    unlisted = [group for group in groups_of(model)]
    unlisted[0]["params"] = [held for held in unlisted[0]["params"] if held is not model.places]
    record = jobs.Record()
    with jobs.job(settings("fp32", (2, 2)), model=model, data=data, model_parameters=unlisted) as made:
        engine = made.engine
        for batch in made.loader:
            if engine.global_steps == 1:
                refused(engine)
            jobs.one_micro_batch(engine, batch, record)
            if engine.global_steps == 2:
                before = oracle.gather(engine)
                model.places.requires_grad_(True)
                refused(engine)
                refused(engine, [{"params": [model.places]}])
                refused(engine, [{"params": [model.places], "like": 0, "speed": 3}])
                refused(engine, [{"params": [model.words.weight], "like": 0}])
                refused(engine, [{"params": [model.scale], "like": 0}])
                if engine.rank == 0:
                    refused(engine, [{"params": model.places, "like": 1}])
                else:
                    refused(engine, [{"params": model.places, "like": 0}])
                flags = [held.requires_grad for held in model.parameters()]
                for held in model.parameters():
                    held.requires_grad_(False)
                refused(engine)
                for held, flag in zip(model.parameters(), flags, strict=True):
                    held.requires_grad_(flag)
                assert oracle.differences(before, oracle.gather(engine)) == []
                engine.update_param_groups([{"params": model.places, "like": 1, "weight_decay": 0.25}])
                assert [group["weight_decay"] for group in engine.basic_optimizer.param_groups] == [0.1, 0.0, 0.25]
                said.append("registered")
            if engine.global_steps == 4:
                break
    return said


def test_refusals(pool: RankPool) -> None:
    for said in filter(None, pool.run(refusals_case)):
        for words, sentence in zip(
            [
                "an accumulation window is open; call it after",
                "'places' requires a gradient now and is listed in no optimizer group",
                "does not say which present group",
                "has no 'speed'",
                "'words.weight' is frozen",
                "'scale' is trained already",
                "members 0 and 1 register different parameters or groups",
                "no parameter requires a gradient any more",
                "registered",
            ],
            said,
            strict=True,
        ):
            assert words in sentence


def failing_case(stage: int) -> tuple[list[str], str, jobs.Record]:
    """A registration that fails on one member: the old engine goes on, bit for bit; the next one succeeds."""
    record, found, said = jobs.Record(), list[str](), list[str]()

    def each(made: jobs.Job) -> None:
        engine = made.engine
        if engine.global_steps != 3:
            return
        was = trained(engine.module)
        before = oracle.gather(engine)
        flip(engine.module, 4)
        with patch.object(Host, "attach", _flipping(Host.attach)), pytest.raises(SwitchFailed) as caught:
            engine.update_param_groups()
        said.append(str(caught.value))
        found.extend(oracle.differences(before, oracle.gather(engine)))
        found.extend(["flags"] * (trained(engine.module) != was))
        flip(engine.module, 4)
        engine.update_param_groups()
        found.extend(wrong_after(before, oracle.gather(engine), was, trained(engine.module)))

    model = partly_trained()
    with jobs.job(settings("fp32", (2, stage)), model=model, model_parameters=groups_of(model)) as made:
        jobs.train(made, 6, {4: (3, 1)}, record, each)
    return found, said[0] if said else "", record


def _flipping(own: Callable[..., Any]) -> Callable[..., Any]:
    """`attach`, after whose first call a bit of a moment of member 1 is another one."""
    calls: list[int] = []

    def attach(self: Any, *arguments: Any) -> None:
        own(self, *arguments)
        calls.append(1)
        if len(calls) == 1 and td.get_rank() == 1:
            state = next(iter(self.basic_optimizer.state.values()))
            flat = state["exp_avg"].view(-1)
            flat[flat.numel() // 2 :][:1].view(torch.int32)[0] ^= 1

    return attach


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_failure_leaves_the_old_engine(pool: RankPool, stage: int) -> None:
    for result in filter(None, pool.run(failing_case, stage=stage)[:2]):
        assert result[0] == []
        assert "exp_avg of" in result[1] and "the engine goes on as before" in result[1]


# ---- schedulers ----------------------------------------------------------------------------------------------------


class Own(torch.optim.lr_scheduler.LRScheduler):
    """A user's class."""

    def get_lr(self) -> list[float]:
        return list(self.base_lrs)


def scheduled_case(kind: str) -> tuple[list[list[float]], str]:
    """The learning rates of all groups, step by step, and what was said against it."""
    model = partly_trained()
    more: dict[str, Any] = {"model_parameters": groups_of(model)}
    config = settings("fp32", (2, 1))
    optimizer = torch.optim.AdamW(groups_of(model), lr=2e-3)
    if kind == "WarmupLR":
        config["scheduler"] = {
            "type": kind,
            "params": {"warmup_max_lr": [1e-2, 2e-2], "warmup_num_steps": 20, "warmup_min_lr": 0.0},
        }
    elif kind == "LambdaLR":
        functions = [lambda step: 1 / (step + 1), lambda step: 2 / (step + 1)]
        more = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, functions)}
    elif kind == "CosineAnnealingLR":
        more = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)}
    else:
        more = {"optimizer": optimizer, "lr_scheduler": Own(optimizer)}
    rates: list[list[float]] = []
    said: list[str] = []

    def each(made: jobs.Job) -> None:
        if made.engine.global_steps == 4:
            flip(model, 4)
            try:
                made.engine.update_param_groups()
            except SwitchRefused as refused:
                said.append(str(refused))
                for name, held in model.named_parameters():
                    held.requires_grad_(name.startswith(FIRST))
        rates.append([group["lr"] for group in made.engine.basic_optimizer.param_groups])

    with jobs.job(config, model=model, **more) as made:
        jobs.train(made, 8, {6: (3, 3)}, None, each)
    return rates, "".join(said)


@pytest.mark.parametrize("kind", one_in(3, ["WarmupLR", "LambdaLR", "CosineAnnealingLR"]))
def test_schedules_go_on(pool: RankPool, kind: str) -> None:
    for result in filter(None, pool.run(scheduled_case, kind=kind)):
        rates = result[0]
        if not rates:
            continue  # never woken
        assert all(len(row) == 4 for row in rates[-5:])
        assert all(row[2:] == row[:2] for row in rates[-5:]) and rates[-1] != rates[-2]
        assert len(rates) == 8 or len(rates) == 2, "a woken member has the same groups"


def test_unknown_scheduler_is_refused_by_name(pool: RankPool) -> None:
    result = pool.run(scheduled_case, kind="own")[0]
    assert "test_register.Own: what it keeps per optimizer group is not known" in result[1]


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def _failing(own: Callable[..., Any]) -> Callable[..., Any]:
    """`attach`, whose first call fails on member 1."""
    calls: list[int] = []

    def attach(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1 and td.get_rank() == 1:
            raise RuntimeError("no memory")
        own(self, *arguments)

    return attach


Went = tuple[dict[str, oracle.State], list[dict[int, list[tuple[float, int]]]], list[list[float]]]
"""States by where they were looked at, losses of each step before loads and after, and the rates of each step."""


def scheduled(model: nn.Module) -> dict[str, Any]:
    """An optimizer of two groups, and a schedule whose functions no checkpoint has."""
    optimizer = torch.optim.AdamW(groups_of(model), lr=2e-3)
    rates = [lambda step: 1 / (step + 1), lambda step: 2 / (step + 1)]
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, rates)}


def resuming_case(folder: Path) -> Went | None:
    """A script that goes on from its newest checkpoint, if there is one; it saves before and after registrations."""
    config = settings("fp32", (2, 1))
    config["dynatrain"]["resume"] = {"path": str(folder)}
    model, states, wrong = partly_trained(), dict[str, oracle.State](), list[str]()

    def each(made: jobs.Job) -> None:
        wrong.extend(change(made))
        step = made.engine.global_steps
        if step in (2, 9):
            states[f"saved {step}"] = oracle.gather(made.engine)
            made.engine.save(folder)

    with jobs.job(config, model=model, **scheduled(model)) as made:
        engine = made.engine
        if not engine.idle:
            states[f"began {engine.global_steps}"] = oracle.gather(engine)
        record = jobs.train(made, 11, None, None, each)
        if engine.global_steps == 11:  # not on a member that has just come
            registered = trained(engine.module)
            for tag in ("step2", "step9"):
                engine.load(folder, tag)
                states[f"loaded {tag}"] = oracle.gather(engine)
                assert not engine.update_param_groups(), "nothing has changed since"
            assert trained(engine.module) == registered
            with patch.object(Host, "attach", _failing(Host.attach)), pytest.raises(CheckpointError, match="as before"):
                engine.load(folder, "step2")
            assert oracle.differences(states["loaded step9"], oracle.gather(engine)) == []
            assert trained(engine.module) == registered
        more = jobs.train(made, 12, {11: (3, 3)})
        states["end"] = oracle.gather(engine)
    assert wrong == []
    return (states, [record.losses, more.losses], list(record.rates.values())) if states else None


def restoring_case(folder: Path) -> tuple[oracle.State, set[str]]:
    """As after a failure: nothing that members hold is used, and those that were idle are called, too."""
    model, target, members = partly_trained(), Layout(data=4, zero_stage=3), (0, 1, 2, 3)
    with jobs.job(settings("fp32", (2, 1)), model=model, **scheduled(model)) as made:
        engine, parts = made.engine, made.engine._parts
        old, board = parts.world, parts.control
        spec = WorldSpec(9, board.member, members, members, target, parts.vps.ties(target))
        world = build_world(board.store, spec, board.timeout_seconds)
        world.connect(board.timeout_seconds)
        restore(parts, target, members, world, folder, [])
        if old is not None:
            board.teardowns.add(drop(old))
        return oracle.gather(engine), trained(engine.module)


@pytest.mark.full
def test_a_job_goes_on_from_its_own_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    """The script builds its model as at the start; groups and what is trained are those of the checkpoint."""
    first, again = pool.run(resuming_case, folder=tmp_path), pool.run(resuming_case, folder=tmp_path)
    for (states, losses, rates), (others, there, resumed) in zip(first[:2], again[:2], strict=True):
        assert oracle.differences(states["saved 9"], others["began 9"]) == []
        assert oracle.differences(states["end"], others["end"]) == []
        assert {step: losses[0][step] for step in (9, 10)} == there[0]
        assert losses[1] == there[1] and sorted(there[1]) == [9, 10, 11]
        assert rates[9:] == resumed
        for step, seen in itertools.product((2, 9), (states, others)):
            assert oracle.differences(states[f"saved {step}"], seen[f"loaded step{step}"]) == []
    for state, flags in pool.run(restoring_case, folder=tmp_path):
        assert oracle.differences(first[0][0]["saved 9"], state) == []
        assert any(name.startswith("words") for name in flags)
