"""A rebuilt module: put back as it was by whatever fails, and gone without a trace once another one is committed."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from ds_dynatrain.engine.transaction import Transaction
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, faults, oracle
from tests.engine.pool import RankPool
from tests.engine.test_tensor import subject as named

PHASES = ("_meet", "_drain", "_digest_source", "_rebuild", "_move", "_carry", "_verify")
CHANGES: dict[str, tuple[Layout, Layout]] = {
    "tensor 2 to data 2": (Layout(tensor=2, zero_stage=1), Layout(data=2, zero_stage=1)),
    "data 2 to tensor 2, stage 3": (Layout(data=2, zero_stage=3), Layout(tensor=2, data=2, zero_stage=3)),
    "tensor 4 to 3": (Layout(tensor=4, zero_stage=2), Layout(tensor=3, zero_stage=2)),
}


@contextmanager
def failing(by_generation: dict[int, str]) -> Iterator[None]:
    """Inside the block a switch fails on one member right after the phase that is named for its generation."""

    def wrap(method: str, own: Any) -> Any:
        def wrapped(self: Transaction, *arguments: Any) -> Any:
            result = own(self, *arguments)
            if by_generation.get(self.proposal.generation) == method and self.control.member == faults.WHERE:
                raise RuntimeError(f"{method} failed")
            return result

        return wrapped

    with ExitStack() as stack:
        for name in PHASES:
            stack.enter_context(patch.object(Transaction, name, wrap(name, getattr(Transaction, name))))
        yield


def objects(engine: Any) -> dict[str, list[int]]:
    """Which objects a module consists of, and hooks below the root: on it DeepSpeed checks the next batch once more."""
    parts = list(engine.module.modules())
    return {
        "modules": [id(part) for part in parts],
        "parameters": [id(held) for held in engine.module.parameters()],
        "hooks": [len(part._forward_pre_hooks) + len(part._forward_hooks) for part in parts[1:]],
    }


def phases_case(change: str, failures: bool) -> list[float]:
    """Losses of a job that asks for the same change after every step; it fails in one phase after the other."""
    (start, target), subject = CHANGES[change], named("llama of 4 kv")
    by_generation = {faults.FIRST_GENERATION + number: phase for number, phase in enumerate(PHASES)}
    losses: list[float] = []
    with axis_walks.started(subject, "fp32", start) as made, failing(by_generation if failures else {}):
        engine, batches = made.engine, iter(made.loader)
        batch = next(batches)
        for phase in PHASES:
            losses.append(subject.step(engine, batch))
            before, state = objects(engine), oracle.gather(engine, subject.places)
            if failures:
                engine.switch(target, at=engine.global_steps)
            batch = next(batches)
            if failures:
                event = engine.last_switch
                assert event.outcome == "rolled_back" and f"{phase} failed" in event.reason, (phase, event.reason)
                assert objects(engine) == before, phase
            assert oracle.differences(state, oracle.gather(engine, subject.places)) == [], phase
        losses.append(subject.step(engine, batch))
    return losses


@pytest.mark.parametrize("change", CHANGES)
def test_a_failure_in_any_phase_puts_the_old_module_back(pool: RankPool, change: str) -> None:
    expected = pool.run(phases_case, change=change, failures=False, seconds=120)
    found = pool.run(phases_case, change=change, failures=True, seconds=120)
    assert found[: CHANGES[change][0].world_size] == expected[: CHANGES[change][0].world_size]


def faults_case(change: str, names: list[str]) -> list[tuple[str, str]]:
    """(outcome, reason) of one switch after another, each with its fault, the last with none."""
    (start, target), subject = CHANGES[change], named("llama of 4 kv")
    found: list[tuple[str, str]] = []
    stale: faults.Stale = {}
    with axis_walks.started(subject, "fp32", start) as made, faults.injected(names, stale):
        engine, batches = made.engine, iter(made.loader)
        batch = next(batches)
        for name in [*names, ""]:
            if name == "stale moment" and engine.rank == faults.WHERE:
                held = engine.state_buffers()[0]
                stale.update({key: buffer.clone() for key, buffer in held.items() if key[0] == "exp_avg"})
            subject.step(engine, batch)
            state = oracle.gather(engine, subject.places)
            engine.switch(target, at=engine.global_steps)
            batch = next(batches)
            assert engine.last_switch is not None
            found.append((engine.last_switch.outcome, engine.last_switch.reason))
            different = oracle.differences(state, oracle.gather(engine, subject.places))
            assert different == [], (name, found[-1], different[:3])
    return found


@pytest.mark.parametrize("change", ["tensor 2 to data 2", "tensor 4 to 3"])
def test_faults_are_found_and_leave_the_old_module(pool: RankPool, change: str) -> None:
    names = [name for name in faults.REASONS if name not in ("diverged replica", "changed learning rate")]
    for found in pool.run(faults_case, change=change, names=names, seconds=120)[: CHANGES[change][1].world_size]:
        for name, (outcome, reason) in zip(names, found, strict=False):
            assert outcome == "rolled_back" and re.search(faults.REASONS[name], reason), (name, reason)
        assert found[-1][0] == "committed"


def held_now() -> dict[str, int]:
    """What must not grow from switch to switch."""
    gc.collect()
    return {
        "threads": threading.active_count(),
        "groups": len(c10d._world.pg_map),
        "modules": sum(isinstance(each, torch.nn.Module) for each in gc.get_objects()),
        "parameters": sum(isinstance(each, torch.nn.Parameter) for each in gc.get_objects()),
    }


def chain_case(path: list[Layout]) -> list[dict[str, int]]:
    """What this process holds whenever it is at the first layout of the path again, lap after lap."""
    subject, found = named("llama of 4 kv"), list[dict[str, int]]()
    old: list[weakref.ref[Any]] = []
    with axis_walks.started(subject, "fp32", path[0]) as made:
        engine, batches = made.engine, iter(made.loader)
        batch = next(batches)
        for target in [*path[1:], path[0]]:
            subject.step(engine, batch)
            if target.tensor != engine.layout.tensor:
                old = [weakref.ref(child) for child in engine.module.children()]
                old += [weakref.ref(held) for held in engine.module.parameters()]
            engine.switch(target, at=engine.global_steps)
            batch = next(batches)
            engine.control.see_buried()
            gc.collect()
            assert [each() for each in old if each() is not None] == []
            if engine.layout == path[0]:
                found.append(held_now())
    return found


LAP = [Layout(data=2, zero_stage=1), Layout(tensor=2, zero_stage=3), Layout(tensor=2, zero_stage=0)]


def test_nothing_of_an_old_module_stays(pool: RankPool) -> None:
    for found in pool.run(chain_case, path=LAP * 2, seconds=120)[:2]:
        assert found[-1] == found[0]


@pytest.mark.full
def test_fifty_switches_hold_what_one_holds(pool: RankPool) -> None:
    for found in pool.run(chain_case, path=LAP * 17, seconds=280)[:2]:
        assert found[-1] == found[1]
