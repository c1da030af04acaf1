"""Compiled modules keep running compiled code over more switches than dynamo would compile for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.callback import callback_handler

from ds_dynatrain.errors import ConfigError, SwitchFailed, SwitchRefused
from ds_dynatrain.report import read_events
from ds_dynatrain.reshard.switch import Transaction
from tests.engine import faults, jobs
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool

STAGES = ((2, 1), (4, 3), (2, 0), (3, 2), (4, 1), (2, 3), (4, 0), (1, 1), (4, 2), (3, 3), (2, 2), (4, 3), (2, 1))
"""Twelve switches: each stage, larger and smaller worlds, members that sleep and wake."""
WITHOUT_3 = tuple((data, stage if stage < 3 else 1) for data, stage in STAGES)
SHORT = (*WITHOUT_3[:6], (2, 3), *WITHOUT_3[7:])
"""With one visit to stage 3, where every submodule is a graph of its own."""


class Counting:
    """A backend that compiles nothing and counts: graphs that it was given, and calls of them."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*inputs: Any) -> Any:
            self.calls += 1
            return graph.forward(*inputs)

        return run


def compile_by(way: str, model: torch.nn.Module, backend: Any) -> torch.nn.Module:
    """The model, compiled before `initialize` in the given way ("engine": not yet)."""
    if way == "in place":
        model.compile(backend=backend)
    elif way == "wrapped":
        return torch.compile(model, backend=backend)  # type: ignore[return-value]
    elif way == "a wrapped part":
        model.blocks[0] = torch.compile(model.blocks[0], backend=backend)
    elif way == "a part in place":
        model.blocks[1].compile(backend=backend)
    return model


def compiled_case(
    way: str, path: tuple[jobs.Sizes, ...], jsonl: str | None = None, backend: Any = None, **sizes: int
) -> jobs.Record:
    """Two steps in each layout of the path; how many graphs were compiled and called in each forward."""
    record = jobs.Record(notes={"seen": [], "recompile_ms": []})
    counting = Counting() if backend is None else backend
    start, schedule = path[0], {2 * number: sizes for number, sizes in enumerate(path) if number}
    settings = jobs.config(start=start, train_micro_batch_size_per_gpu=12)
    settings["dynatrain"]["report"] = {"jsonl": jsonl}
    torch._dynamo.reset()
    model = compile_by(way, small_gpt(**sizes), counting)
    others = [callback_handler.start_callbacks.append(callback_of_another), len(callback_handler.start_callbacks)]
    with jobs.job(settings, model=model) as made:
        engine = made.engine
        if way == "engine":
            engine.compile(backend=counting)

        def each(made: jobs.Job) -> None:
            layout = (engine.data, engine.layout.zero_stage)
            if isinstance(counting, Counting):
                record.notes["seen"].append((engine.global_steps, layout, counting.graphs, counting.calls))
            if engine.last_switch is not None and engine.global_steps % 2 == 1:
                record.notes["recompile_ms"].append(engine.last_switch.recompile_ms)

        jobs.train(made, 2 * len(path), schedule, record, each)
    assert (
        len(callback_handler.start_callbacks) == others[1] and callback_of_another in callback_handler.start_callbacks
    )
    callback_handler.start_callbacks.remove(callback_of_another)
    torch._dynamo.reset()
    return record


def callback_of_another(_: Any) -> None:
    """A callback that a user has registered; it must outlive a switch."""


def check_compiled(records: list[Any], path: tuple[jobs.Sizes, ...]) -> None:
    """On each rank each forward called compiled code, and the first one after each switch compiled it."""
    for record in records:
        graphs = calls = 0
        per_stage: dict[int, set[tuple[int, int]]] = {}
        by_step = {step: (layout, *counts) for step, layout, *counts in record.notes["seen"]}
        for step, (layout, now_graphs, now_calls) in sorted(by_step.items()):
            assert layout == path[(step - 1) // 2]
            new, called = now_graphs - graphs, now_calls - calls
            first = step - 1 not in by_step or step % 2 == 1
            assert (new > 0) == first and called > 0, (step, layout, new, called)
            per_stage.setdefault(layout[1], set()).add((new if first else 0, called))
            graphs, calls = now_graphs, now_calls
        for stage, seen in per_stage.items():
            assert len({called for _, called in seen}) == 1, (stage, seen)
            assert len({new for new, _ in seen if new}) == 1, (stage, seen)
        assert all(spent is not None and spent > 0 for spent in record.notes["recompile_ms"])


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("way", "path"),
    [
        ("engine", SHORT),
        ("engine", STAGES),
        ("in place", STAGES),
        ("wrapped", WITHOUT_3),
    ],
    ids=["short", "engine", "in place", "wrapped"],
)
def test_twelve_switches(pool: RankPool, way: str, path: tuple[jobs.Sizes, ...], tmp_path: Path) -> None:
    lines = str(tmp_path / "switches.jsonl")
    plain = pool.run(compiled_case, way="not", path=path, depth=1, seconds=180)
    found = pool.run(compiled_case, way=way, path=path, jsonl=lines, depth=1, seconds=400)
    assert [record.losses for record in found] == [record.losses for record in plain]
    check_compiled(found, path)
    assert all(spent is None for record in plain for spent in record.notes["recompile_ms"])
    events = read_events(lines)
    assert [event.generation for event in events] == list(range(2, 14))
    assert all(event.recompile_ms and event.recompile_ms > 0 for event in events)
    raw = [json.loads(line) for line in Path(lines).read_text().splitlines()]
    assert [line["event"] for line in raw] == ["switch", "recompile"] * 12
    members = {event.target.members for event in events}
    assert any(list(ranks) != sorted(ranks) for ranks in members) or len(members) > 3


@pytest.mark.full
@pytest.mark.parametrize("way", ["a wrapped part", "a part in place"])
def test_compiled_parts(pool: RankPool, way: str) -> None:
    """With tensors above the size that builds without memory treat apart."""
    path = ((2, 1), (4, 2), (3, 0))
    sizes = {"width": 64, "hidden": 260}
    plain = pool.run(compiled_case, way="not", path=path, **sizes)
    found = pool.run(compiled_case, way=way, path=path, **sizes)
    assert [record.losses for record in found] == [record.losses for record in plain]
    check_compiled(found, path)


def rolled_back_case() -> Any:
    """A switch that fails after the old optimizer is off: then the old layout's code is compiled anew too."""

    def fail(_: Transaction) -> None:
        raise SwitchFailed("on purpose")

    counting, seen = Counting(), []
    torch._dynamo.reset()
    model = compile_by("in place", small_gpt(), counting)
    settings = jobs.config(start=(2, 2), train_micro_batch_size_per_gpu=6)
    with jobs.job(settings, model=model) as made, patch.object(Transaction, "_move", fail):

        def each(made: jobs.Job) -> None:
            seen.append((counting.graphs, counting.calls, made.engine.last_switch))

        faults.train(made, 3, {1: (4, 1)}, jobs.Record(), each)
    torch._dynamo.reset()
    return seen


@pytest.mark.full
def test_a_roll_back(pool: RankPool) -> None:
    for seen in pool.run(rolled_back_case)[:2]:
        (graphs, calls, _), (again, more, event), (still, last, _) = seen
        assert event.outcome == "rolled_back" and "on purpose" in event.reason and event.recompile_ms > 0
        assert (again, more) == (2 * graphs, 2 * calls) and (still, last) == (again, 3 * calls)


def refused_case() -> None:
    """A wrapped module is refused at the start of stage 3, and later when a switch to it is asked for."""
    with pytest.raises(ConfigError, match=r"torch\.compile: 'the model' is wrapped, and this is ZeRO stage 3"):
        with jobs.job(jobs.config(start=(2, 3)), model=torch.compile(small_gpt())):
            pass
    with jobs.job(jobs.config(start=(4, 1)), model=torch.compile(small_gpt())) as made:
        with pytest.raises(SwitchRefused, match=r"torch\.compile: 'the model' is wrapped"):
            made.engine.switch(zero_stage=3)


def test_a_wrapped_module_is_refused_at_stage_3(pool: RankPool) -> None:
    pool.run(refused_case)


def partly_compiled_case() -> Any:
    """Compiled on the working members only: the one that would wake up would run eagerly."""
    with jobs.job(jobs.config(start=(2, 1), train_micro_batch_size_per_gpu=6)) as made:
        engine = made.engine
        if not engine.idle:
            engine.compile(backend=Counting())
        faults.train(made, 3, {1: (4, 1)}, jobs.Record())
        return engine.last_switch


def test_a_model_that_only_some_have_compiled(pool: RankPool) -> None:
    event = pool.run(partly_compiled_case)[0]
    assert event.outcome == "rolled_back"
    assert "differs from rank 0's before them in: compiled modules" in event.reason


@pytest.mark.not_on_device("inductor has no back-end for that device")
@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor(pool: RankPool) -> None:
    """Real code: the losses are those of eager steps, but for the last bits."""
    path = ((2, 1), (4, 2), (2, 3))
    plain = pool.run(compiled_case, way="not", path=path, seconds=120)
    found = pool.run(compiled_case, way="engine", path=path, backend="inductor", seconds=570)
    for mine, other in zip(found, plain, strict=True):
        assert mine.losses.keys() == other.losses.keys()
        for step, losses in mine.losses.items():
            pairs = zip(losses, other.losses[step], strict=True)
            assert all(abs(one[0] - two[0]) <= 1e-5 * abs(two[0]) for one, two in pairs), step
    assert all(spent > 10 for spent in found[0].notes["recompile_ms"])
