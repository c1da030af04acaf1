"""Pipelines through numbers of stages, boundaries, data sizes and ZeRO stages 0 and 1, in living ranks."""

from __future__ import annotations

import gc
import pathlib
import re
import threading
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as td
from deepspeed.utils import RepeatingLoader, groups
from torch.distributed import distributed_c10d as c10d

from ds_dynatrain.data import Cursor
from ds_dynatrain.errors import ConfigError, DataError, SwitchRefused
from ds_dynatrain.space import Layout
from tests.engine import faults, jobs
from tests.engine.models import Sequences, decay_groups
from tests.engine.pipeline_walks import STEPS, Path, job, layout, micro_batches, settings, walk, whole
from tests.engine.pipelines import pipeline
from tests.engine.pool import RankPool

WALKS: dict[str, tuple[str, str, Path]] = {
    "up and down": ("tied", "fp32", [layout(1, 4), layout(2, 2), layout(4, 1), layout(2, 2), layout(1, 4)]),
    "idle members": (
        "tied",
        "fp32",
        [layout(1, 1), layout(2, 1), layout(4, 1), layout(2, 1), layout(1, 2), layout(2, 2)],
    ),
    "boundaries alone": (
        "tied",
        "fp32",
        [layout(2, 2), layout(2, 2, 1, (0, 2, 7)), layout(2, 2, 1, (0, 5, 7)), layout(2, 2)],
    ),
    "stages 0 and 1": (
        "tied",
        "fp32",
        [layout(2, 1, 0), layout(4, 1), layout(4, 1, 0), layout(1, 2, 0), layout(2, 2), layout(2, 2, 0)],
    ),
    "groups that a stage has nothing of": (
        "inner tie",
        "fp32",
        [layout(4, 1), layout(2, 2), layout(4, 1, 0), layout(1, 1, 0), layout(4, 1, 1, (0, 1, 3, 7, 8)), layout(3, 1)],
    ),
    "layers of uneven sizes": (
        "uneven",
        "fp32",
        [layout(2, 2), layout(4, 1), layout(3, 1), layout(1, 4), layout(4, 1)],
    ),
    "bf16": ("tied", "bf16", [layout(1, 2), layout(2, 2), layout(4, 1), layout(2, 1)]),
    "bf16 in fp32": ("inner tie", "bf16 in fp32", [layout(1, 2), layout(2, 2), layout(4, 1), layout(2, 1)]),
}


@pytest.mark.full
@pytest.mark.parametrize("title", WALKS)
def test_walks(pool: RankPool, title: str) -> None:
    name, dtype, path = WALKS[title]
    given = {"name": name, "dtype": dtype}
    found = pool.run(walk, path=path, **given, seconds=120)
    expected = pool.run(walk, path=[layout(1, 1)], **given, steps=STEPS * len(path))
    losses = whole(found)
    assert len(losses) == STEPS * len(path)
    assert jobs.furthest(losses, whole(expected)) < (5e-7 if dtype == "fp32" else 2e-3)
    assert {number for rank in found if rank for number in rank.compared} == set(range(1, len(path)))


# ---- what is refused ------------------------------------------------------------------------------------------------


def refused_at_start() -> None:
    """Each start fails on all ranks alike, with the reason, and leaves nothing behind."""
    two = layout(2, 1)
    cannot = [
        (settings(layout(2, 1, 2)), "pipelines only in ZeRO stages 0 and 1; nearest: data=1 pipe=2 zero_stage=1"),
        (
            {**settings(two), "data_efficiency": {"enabled": True}},
            "^data_efficiency: .* not supported with a Pipeline",
        ),
        (settings(Layout(zero_stage=1, pipe=2, tensor=2)), "PipelineEngine has no tensor axis"),
        (settings(layout(2, 1, 1, (0, 3, 8))), r"dynatrain\.layout: boundaries=\(0, 3, 8\) end with layer 8"),
        (settings(layout(8, 1)), "needs 8 processes and this launch has 4"),
    ]
    for given, words in cannot:
        with pytest.raises(ConfigError, match=words), job(given, "tied"):
            pass


def refused_later() -> None:
    """A running job says no, and goes on."""
    with job(settings(layout(2, 2)), "tied") as made:
        engine = made.engine
        losses = [engine.train_batch().item()]
        cannot = [
            ({"zero_stage": 2}, "pipelines only in ZeRO stages 0 and 1; nearest: data=2 pipe=2 zero_stage=1"),
            ({"boundaries": (0, 3, 8)}, "boundaries=.* end with layer 8"),
            ({"boundaries": (0, 3)}, "cut 1 stages and pipe is 2"),
            ({"pipe": 4, "data": 1, "boundaries": (0, 2, 4, 5, 5)}, "give stage 3 no layer"),
            ({"data": 1, "tensor": 2}, "no tensor axis"),
            ({"pipe": 8}, "needs 16 members"),
        ]
        for changes, words in cannot:
            with pytest.raises(SwitchRefused, match=words):
                engine.switch(**changes)
            assert engine.plan(**changes).refusal
        with pytest.raises(DataError, match=r"has 2 of 12 samples.*dataloader_drop_last"):
            engine.loader(Sequences(50))
        losses.append(engine.train_batch().item())
        assert losses[1] < losses[0]


def test_what_cannot_be_is_refused(pool: RankPool) -> None:
    pool.run(refused_at_start, seconds=120)
    pool.run(refused_later)


# ---- what goes wrong ------------------------------------------------------------------------------------------------

FAULTS = ("permuted block", "bit flip", "lost step counter", "changed learning rate", "random stream reset")
FAULTS += ("dropped piece", "corrupted message", "swapped parameters")


def with_faults(source: Layout, target: Layout, names: list[str]) -> list[float]:
    """Ask for one change again and again, each time with another fault; then without one."""
    with job(settings(source), "tied") as made, faults.injected(names, {}):
        engine = made.engine
        losses = [engine.train_batch().item() for _ in range(2)]
        for name in names:
            layers = [*engine.module.forward_funcs]
            engine.switch(target, at=engine.global_steps)
            losses += [engine.train_batch().item()]
            event = engine.last_switch
            assert event.outcome == "rolled_back" and engine.layout == source, (name, event.outcome, event.reason)
            assert re.search(faults.REASONS[name], event.reason), (name, event.reason)
            assert [*map(id, layers)] == [*map(id, engine.module.forward_funcs)], "the old layers are back"
        engine.switch(target, at=engine.global_steps)
        losses += [engine.train_batch().item() for _ in range(2)]
        assert engine.last_switch.outcome == "committed" and engine.layout == target
        return losses


@pytest.mark.parametrize(
    ("source", "target", "faults_of"),
    [
        (layout(2, 2), layout(4, 1), FAULTS[:3]),
        pytest.param(layout(2, 2), layout(4, 1), FAULTS, marks=pytest.mark.full),
        pytest.param(layout(4, 1), layout(1, 4, 0), FAULTS, marks=pytest.mark.full),
    ],
)
def test_a_change_that_goes_wrong_is_rolled_back(
    pool: RankPool, source: Layout, target: Layout, faults_of: tuple[str, ...]
) -> None:
    names = [name for name in faults_of if target.zero_stage or name not in ("lost step counter",)]
    found = pool.run(with_faults, source=source, target=target, names=names, seconds=120)
    expected = pool.run(walk, path=[source], name="tied", steps=len(names) + 2)
    assert all(losses == found[0] for losses in found)
    assert found[0][: len(names) + 2] == expected[0].losses[0], "as if nobody had asked"


# ---- data, and the rest of the loop ---------------------------------------------------------------------------------


def stock(stage: int, steps: int) -> list[float]:
    """Losses of DeepSpeed itself, without a block: one stage, on every rank."""
    given = {key: value for key, value in settings(layout(1, 1, stage)).items() if key != "dynatrain"}
    given["gradient_accumulation_steps"] = 12 // 3 // td.get_world_size()
    model = pipeline("tied")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=decay_groups(model), config=given)
    found = []
    for step in range(steps):
        found.append(engine.train_batch(micro_batches(step, td.get_world_size(), td.get_rank())).item())
    engine.destroy()
    groups._release_process_group_references()
    return found


def own_iterator(stage: int, steps: int) -> list[float]:
    """The same samples by an iterator of the user's own, through three layouts."""
    found: list[float] = []
    with job(settings(layout(2, 2, stage)), "tied") as made:
        engine = made.engine
        ahead = {2: layout(4, 1, stage), 4: layout(1, 4, stage), 6: layout(2, 1, stage)}
        while engine.idle or engine.global_steps < steps:
            step = engine.global_steps
            if not engine.idle and step in ahead and engine.layout != ahead[step]:
                engine.switch(ahead[step], at=step)
            engine.boundary()
            samples = micro_batches(engine.global_steps, engine.layout.data, engine.data_rank)
            found.append(engine.train_batch(samples).item())
    return found


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full)])
def test_it_is_what_deepspeed_computes(pool: RankPool, stage: int) -> None:
    expected = pool.run(stock, stage=stage, steps=8)[0]
    found = pool.run(own_iterator, stage=stage, steps=8)
    assert jobs.furthest(found[0], expected) < 5e-7


def feeding() -> dict[str, list[float]]:
    """A pass of a loader that ends with the epoch, DeepSpeed's RepeatingLoader, the engine's own: across a change."""
    found: dict[str, list[float]] = {"pass": [], "repeating": [], "own": []}
    for kind, losses in found.items():
        with job(settings(layout(2, 2)), "tied") as made:
            engine, feed = made.engine, None
            if kind != "own":
                feed = iter(made.loader) if kind == "pass" else RepeatingLoader(made.loader)
            for step in range(8):
                if step in (3, 6):
                    engine.switch(layout(4, 1) if step == 3 else layout(1, 4), at=step)
                losses.append(engine.train_batch(feed).item())
            assert made.loader.cursor == Cursor(0, 8)
            if kind == "pass":
                with pytest.raises(StopIteration):
                    engine.train_batch(feed)
                assert made.loader.cursor == Cursor(1, 0)
            else:
                losses.append(engine.train_batch(feed).item())
                assert engine.global_steps == 9 and engine.global_samples == 108
    return found


@pytest.mark.full
def test_where_samples_come_from(pool: RankPool) -> None:
    for found in pool.run(feeding, seconds=120):
        assert found["pass"] == found["own"][:8] and found["repeating"] == found["own"]


def evaluating() -> list[float]:
    """The evaluation loss before and after each change; it leaves the training as it is."""
    found = []
    with job(settings(layout(2, 2)), "uneven") as made:
        engine = made.engine
        loader = engine.loader(Sequences(24), evaluation=True, batch_size=3, num_workers=0)
        engine.train_batch()
        for target in (layout(4, 1), layout(1, 4), layout(2, 2)):
            for _ in range(2):
                count = len(loader)
                found.append(engine.eval_batch(loader, num_micro_batches=count).item())
                if engine.layout != target:
                    engine.switch(target, at=engine.global_steps)
                    engine.boundary()
    return found


@pytest.mark.full
def test_evaluation(pool: RankPool) -> None:
    for losses in pool.run(evaluating):
        assert losses == pytest.approx([losses[0]] * 6, rel=5e-7)


def counting(path: Path) -> dict[str, Any]:
    """Buffers that the training changes go with their layers, whoever gets them."""
    with job(settings(path[0]), "uneven") as made:
        engine = made.engine
        engine.boundary()
        while True:
            number = engine.generation - 1
            for _ in range(2):
                engine.train_batch()
            if number + 1 == len(path):
                return {name: held.clone() for name, held in engine.module.named_buffers()}
            engine.switch(path[number + 1], at=engine.global_steps)
            engine.boundary()


@pytest.mark.full
def test_buffers_go_with_their_layers(pool: RankPool) -> None:
    path = [layout(1, 1), layout(2, 1), layout(4, 1), layout(2, 1), layout(3, 1)]
    found: dict[str, Any] = {}
    for rank in pool.run(counting, path=path):
        found.update(rank or {})
    expected = pool.run(counting, path=[layout(1, 1)] * 1)[0]
    assert found.keys() == expected.keys()
    assert int(found["4.calls"]) == 4 * 2 * len(path), "micro-batches of one pipeline"
    assert torch.allclose(found["2.slope"], expected["2.slope"]) and found["4.mean"].abs().sum() > 0


def checkpointed(folder: str) -> list[float]:
    """Saved by four stages and loaded by four stages, after changes on both sides."""
    with job(settings(layout(1, 4)), "tied") as made:
        engine = made.engine
        engine.train_batch()
        engine.switch(layout(4, 1), at=1)
        engine.train_batch()
        engine.save_checkpoint(folder, "two")
        expected = [engine.train_batch().item() for _ in range(3)]
    with job(settings(layout(4, 1)), "tied") as made:
        engine = made.engine
        engine.train_batch()
        engine.load_checkpoint(folder, "two")
        made.loader.load_state_dict({**made.loader.state_dict(), "cursor": Cursor(0, 2).to_dict()})
        found = [engine.train_batch().item() for _ in range(2)]
        engine.switch(layout(2, 2), at=engine.global_steps)
        found.append(engine.train_batch().item())
    assert found[:2] == expected[:2] and found[2] == pytest.approx(expected[2], rel=5e-7)
    return found


@pytest.mark.full
def test_checkpoints_between_changes(pool: RankPool, tmp_path: pathlib.Path) -> None:
    pool.run(checkpointed, folder=str(tmp_path))


def activation_checkpointing(interval: int) -> list[float]:
    """Layers are recomputed in every layout alike."""
    more = {"pipeline": {"activation_checkpoint_interval": interval, "use_reentrant": False}}
    with job(settings(layout(2, 2), **more), "tied") as made:
        losses = []
        for step, target in enumerate((None, layout(4, 1), None, layout(1, 4), layout(2, 2, 1, (0, 5, 7)))):
            if target is not None:
                made.engine.switch(target, at=step)
            losses.append(made.engine.train_batch().item())
        assert made.engine.module.activation_checkpoint_interval == interval
        return losses


@pytest.mark.full
@pytest.mark.parametrize("interval", [1, 2])
def test_activation_checkpointing(pool: RankPool, interval: int) -> None:
    plain = pool.once(activation_checkpointing, interval=0)[0]
    assert pool.run(activation_checkpointing, interval=interval)[0] == plain


def many_changes(count: int) -> list[tuple[int, int, int]]:
    """(file descriptors, threads, process groups) of this process after each round of changes."""
    before = len(c10d._world.pg_map)
    found: list[tuple[int, int, int]] = []
    path = [layout(4, 1), layout(2, 2), layout(1, 4), layout(2, 2, 1, (0, 2, 7))]
    with job(settings(layout(2, 2)), "tied") as made:
        engine = made.engine
        for number in range(count * len(path)):
            engine.switch(path[number % len(path)], at=engine.global_steps)
            engine.train_batch()
            assert engine.last_switch.outcome == "committed"
            if (number + 1) % len(path) == 0:
                engine._parts.control.teardowns.finish(engine._parts.control.timeout_seconds)
                gc.collect()
                groups_held = len(c10d._world.pg_map) - before
                found.append((jobs.least("fd"), threading.active_count(), groups_held))
    assert len(c10d._world.pg_map) == before, "also those that the constructor of PipelineModule made are gone"
    return found


@pytest.mark.full
def test_nothing_is_left_behind(pool: RankPool) -> None:
    for found in pool.run(many_changes, count=4, seconds=120):
        assert all(now <= then for now, then in zip(found[-1], found[1], strict=True)), found


class Average:
    """An average of the weights by name, as users keep one: it follows the layers of its member."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.follow(None)
        engine.on_switch(self.follow)

    def follow(self, _: Any) -> None:
        self.held = {name: held.detach().clone() for name, held in self.engine.module.named_parameters()}

    def update(self) -> None:
        for name, held in self.engine.module.named_parameters():
            self.held[name].lerp_(held.detach(), 0.1)


def hooked() -> tuple[list[int], list[int]]:
    """The steps in which a hook was called on layer 1, if it was here at the start, and on the root."""
    on_layer, on_root = list[int](), list[int]()
    with job(settings(layout(2, 2)), "tied") as made:
        engine = made.engine
        average = Average(engine)
        if engine.grid.stage_id == 0:
            engine.module.forward_funcs[1].register_forward_hook(lambda *_: on_layer.append(engine.global_steps))
        engine.module.register_forward_pre_hook(lambda *_: on_root.append(engine.global_steps))
        for step, target in enumerate((layout(2, 2), layout(2, 2, 1, (0, 4, 7)), layout(1, 4), layout(2, 2))):
            if step:
                engine.switch(target, at=step)
            engine.train_batch()
            assert average.held.keys() == dict(engine.module.named_parameters()).keys()
            average.update()
    return on_layer, on_root


@pytest.mark.full
def test_hooks_and_averages(pool: RankPool) -> None:
    found = pool.run(hooked)
    assert all(on_root == [0, 0, 1, 1, 2, 3, 3] for _, on_root in found), "two micro-batches a step, or one"
    assert found[0][0] == [0, 0, 1, 1, 2, 3, 3], "member 0 keeps rank 0, and so layer 1"
