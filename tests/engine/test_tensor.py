"""Tensor parallel sizes change live: walks of language models under AutoTP, with data, every stage, idle members."""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from deepspeed.module_inject.layers import TensorParallel_Layer
from torch.distributed import distributed_c10d as c10d

from ds_dynatrain.adapters.model.auto_tp import TensorShaper
from ds_dynatrain.errors import ConfigError, SwitchRefused
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, jobs, oracle
from tests.engine.language_models import MODELS, WORDS, places
from tests.engine.pool import RankPool
from tests.engine.subjects import SUBJECTS, Texts, language_model, named_step
from tests.engine.transitions import TABLE, pairs, path
from tests.sets import one_in


def at(data: int, tensor: int, stage: int) -> Layout:
    """A layout."""
    return Layout(data=data, tensor=tensor, zero_stage=stage)


WALKS = {
    "llama tied": [at(2, 1, 1), at(1, 4, 1), at(2, 2, 0), at(1, 3, 2), at(2, 2, 3), at(2, 1, 3), at(1, 2, 3)],
    "qwen3": [at(2, 1, 0), at(2, 2, 3), at(1, 4, 2), at(1, 3, 1), at(1, 2, 0), at(2, 2, 0)],
    "llama": [at(1, 4, 0), at(1, 3, 1), at(2, 2, 2), at(1, 4, 2), at(2, 1, 1)],
    "neox": [at(1, 4, 0), at(1, 3, 1), at(2, 2, 2)],
}


@pytest.mark.full
@pytest.mark.parametrize("name", WALKS)
def test_models(pool: RankPool, name: str) -> None:
    """Tied to a vocabulary in parts and a loss of its own; norms of heads; fewer heads than ranks; fused QKV."""
    axis_walks.compare(pool, partial(language_model, name), WALKS[name])


@pytest.mark.full
def test_sub_groups_of_stage_3(pool: RankPool) -> None:
    walk = [at(2, 2, 3), at(1, 4, 3), at(2, 1, 3), at(1, 2, 3), at(2, 2, 1)]
    axis_walks.compare(pool, partial(language_model, "llama of 4 kv", 700), walk)


STAGE_1 = ("d2t2z1 > t4z1 > d2z1 > t3z1 > d2t2z1",)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "rows"), [("bf16", TABLE["AutoTP"].first), ("fp16", STAGE_1), ("bf16 in fp32", STAGE_1)]
)
def test_precisions(pool: RankPool, dtype: str, rows: tuple[str, ...]) -> None:
    axis_walks.compare(pool, SUBJECTS["AutoTP"], path(pairs(rows)), dtype)


@pytest.mark.full
def test_autocast(pool: RankPool) -> None:
    """Parameters of new layers have their gradients added up in the low type, too, where DeepSpeed does so."""
    given = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    modules = ["torch.nn.Linear", "deepspeed.module_inject.layers.LinearLayer"]
    for block in (given["torch_autocast"], {**given["torch_autocast"], "lower_precision_safe_modules": modules}):
        find = partial(language_model, "llama of 4 kv", torch_autocast=block)
        axis_walks.compare(pool, find, [at(2, 2, 1), at(1, 4, 2), at(4, 1, 1), at(2, 2, 1)])


# ---- one run --------------------------------------------------------------------------------------------------------


@dataclass
class Story:
    """What a rank saw of a run: losses by step, events, and what a test asks of a step."""

    losses: dict[int, float] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    notes: dict[int, Any] = field(default_factory=dict)


Each = Callable[[Any, Story], None]


def told(
    name: str,
    start: Layout,
    schedule: Mapping[int, Layout],
    steps: int,
    each: Each | None = None,
    dtype: str = "fp32",
    **settings: Any,
) -> Story:
    """A run that switches by schedule. each: called after every optimizer step. settings: DeepSpeed's, over the usual
    ones.
    """
    made = language_model(name, **settings)
    story, asked = Story(), set[int]()
    with axis_walks.started(made, dtype, start) as job:
        engine = job.engine
        engine.on_switch(story.events.append)
        while engine.idle or engine.global_steps < steps:
            for batch in job.loader:
                number = engine.global_steps
                story.losses[number] = named_step(engine, batch)
                if each is not None:
                    each(engine, story)
                done = engine.global_steps
                if done in schedule and done < steps and done not in asked:
                    asked.add(done)
                    engine.switch(schedule[done], at=done)
                if done >= steps:
                    break
    return story


def losses(stories: Sequence[Story]) -> list[float]:
    """The mean loss of each step over the ranks that took it."""
    count = max(max(story.losses, default=-1) for story in stories) + 1
    held = [[story.losses[number] for story in stories if number in story.losses] for number in range(count)]
    return [sum(found) / len(found) for found in held]


OF_THE_MLP = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.mlp\.(up|gate)_proj\.weight$"], "partition_type": "column", "partition_dim": 0},
        {"patterns": [r".*\.mlp\.down_proj\.weight$"], "partition_type": "row", "model_types": None},
    ],
}


def layers_cut(engine: Any, story: Story) -> None:
    """Notes the kinds of layers that AutoTP has put its own in place of."""
    layers = engine.module.named_modules()
    story.notes[engine.global_steps] = {
        name.rpartition(".")[2] for name, layer in layers if isinstance(layer, TensorParallel_Layer)
    }


def test_rules_in_the_configuration_hold_in_every_layout(pool: RankPool) -> None:
    """`partition_config`, with keys below it, as DeepSpeed documents it."""
    rules = {"tensor_parallel": {"partition_config": OF_THE_MLP}}
    run = {"name": "llama of 4 kv", "start": at(2, 1, 1), "steps": 3, **rules}
    static = losses(pool.run(told, schedule={}, **run))
    stories = pool.run(told, schedule={1: at(2, 2, 3)}, each=layers_cut, **run)
    assert jobs.furthest(losses(stories), static) <= 1e-6
    cut = {"up_proj", "gate_proj", "down_proj"}
    assert stories[0].notes == {1: set(), 2: cut, 3: cut}


CHANGES = {2: at(2, 2, 3), 4: at(1, 4, 1), 6: at(1, 3, 0), 8: at(4, 1, 2), 10: at(1, 2, 1), 12: at(1, 1, 0)}


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama of 4 kv", "qwen3"])
def test_a_run_has_the_losses_of_one_without_changes(pool: RankPool, name: str) -> None:
    static = losses(pool.run(told, name=name, start=at(2, 1, 1), schedule={}, steps=14))
    stories = pool.run(told, name=name, start=at(2, 1, 1), schedule=CHANGES, steps=14)
    assert [event.outcome for event in stories[0].events] == ["committed"] * len(CHANGES)
    assert all(event.bytes_sent == event.bytes_minimum for event in stories[0].events)
    assert jobs.furthest(losses(stories), static) <= 2e-6


def watched(start: Layout, schedule: Mapping[int, Layout]) -> Story:
    """What of an old shape, and of its groups, is left; and that the first batch of each shape was compared."""
    held: list[weakref.ref[Any]] = []

    def each(engine: Any, story: Story) -> None:
        layers = [part for part in engine.module.modules() if isinstance(part, TensorParallel_Layer)]
        alive = [type(reference()).__name__ for reference in held if reference() is not None]
        groups = {part.mp_group for part in layers}
        sizes = {group.size() for group in groups} if groups else {1}
        checks = len(engine.module._forward_pre_hooks)
        story.notes[engine.global_steps] = (alive, len(groups), sizes, len(c10d._world.pg_map), checks)
        if engine.global_steps in schedule:
            gc.collect()
            held[:] = [weakref.ref(part) for part in engine.module.model.modules()]
            held.extend(weakref.ref(part) for part in engine.module.parameters())

    return told("llama tied", start, schedule, 9, each)


@pytest.mark.full
def test_nothing_of_an_old_shape_is_left(pool: RankPool) -> None:
    schedule = {2: at(2, 2, 1), 4: at(1, 4, 1), 6: at(2, 2, 1)}
    notes = pool.run(watched, start=at(1, 4, 1), schedule=schedule)[0].notes
    assert notes[2][1:3] == notes[6][1:3] == (1, {4}) and notes[4][1:3] == notes[8][1:3] == (1, {2})
    assert [notes[done][0] for done in (4, 6, 8)] == [[], [], []]
    assert notes[4][3] == notes[8][3] and notes[2][3] == notes[6][3], "as many groups as the first time"
    assert len({note[4] for note in notes.values()}) == 1, "the check of the first batch takes itself off"


def other_samples() -> list[str]:
    """What DeepSpeed says of other samples than those of the tensor peers, in the first step after a switch."""
    with axis_walks.started(language_model("llama"), "fp32", at(2, 1, 1)) as job:
        engine, batches = job.engine, iter(job.loader)
        named_step(engine, next(batches))
        engine.switch(at(1, 2, 1), at=engine.global_steps)
        batch = next(batches)
        try:
            named_step(engine, {name: (part + engine.rank) % WORDS for name, part in batch.items()})
        except AssertionError as error:
            return [str(error)]
    return []


def test_other_samples_on_a_tensor_rank_are_found(pool: RankPool) -> None:
    found = pool.run(other_samples)
    assert all("Data inconsistency within the TP group" in said for said in (*found[0], *found[1])) and found[0]


# ---- failures -------------------------------------------------------------------------------------------------------


def torn(method: str) -> Story:
    """One member fails in the preparation or inside of the rebuild, the first time."""
    own, failed = getattr(TensorShaper, method), []

    def wrapped(self: TensorShaper, *arguments: Any) -> Any:
        result = own(self, *arguments)
        wanted = next(each for each in arguments if isinstance(each, Layout))
        if wanted.tensor == 4 and not failed:
            failed.append(True)
            if int(os.environ["RANK"]) == 1:
                raise RuntimeError("a test's failure")
        return result

    def each(engine: Any, story: Story) -> None:
        story.notes[engine.global_steps] = engine.last_switch and engine.last_switch.outcome

    with patch.object(TensorShaper, method, wrapped):
        return told("llama", at(2, 2, 1), {2: at(1, 4, 1), 4: at(1, 4, 1)}, 6, each)


@pytest.mark.parametrize("method", one_in(3, ["reshape", "make", "enter"]))
def test_a_member_that_fails_inside_of_the_rebuild(pool: RankPool, method: str) -> None:
    expected = pool.once(told, name="llama", start=at(2, 2, 1), schedule={}, steps=6)
    found = pool.run(torn, method=method)
    for rank in range(4):
        assert [found[rank].notes[done] for done in (2, 3, 5)] == [None, "rolled_back", "committed"]
        assert [found[rank].losses[done] for done in range(4)] == [expected[rank].losses[done] for done in range(4)]


def refused(wanted: Layout, name: str, sub_group_size: int) -> tuple[str, str]:
    """What is said of a layout that is asked for, by `switch` and by `plan`."""
    with axis_walks.started(language_model(name, sub_group_size), "fp32", at(4, 1, 1)) as job:
        named_step(job.engine, next(iter(job.loader)))
        with pytest.raises(SwitchRefused) as caught:
            job.engine.switch(wanted)
        return str(caught.value), str(job.engine.plan(wanted).refusal)
    raise AssertionError("never idle")


@pytest.mark.parametrize(
    ("wanted", "name", "size", "words"),
    [
        (at(1, 4, 3), "llama", 1 << 20, r"tensor=4: .*16 \+ 16 \+ 0 \+ 0, and zero_stage=3 .*nearest: tensor=2"),
        (at(1, 3, 3), "llama of 4 kv", 700, r"sub_group_size 700 the tensor ranks have \d+, \d+, \d+ sub-groups"),
        (at(1, 2, 1), "gpt2", 1 << 20, "AutoTP cannot cut GPT2LMHeadModel: AutoTP not supported"),
        (at(1, 2, 1), "bloom", 1 << 20, "tensor parallelism of BloomForCausalLM: AutoTP cuts its fused"),
    ],
)
def test_what_cannot_be_is_refused(pool: RankPool, wanted: Layout, name: str, size: int, words: str) -> None:
    for said, planned in pool.run(refused, wanted=wanted, name=name, sub_group_size=size):
        assert re.search(words, said) and re.search(words, planned)


def started_by_deepspeed(block: dict[str, Any], layout: dict[str, int]) -> str:
    """The layout that a configuration with DeepSpeed's own size starts in, or what is said of it."""
    settings = {**jobs.config("fp32", (2, 1)), "tensor_parallel": block}
    settings["dynatrain"] = {"layout": layout, "timeout_seconds": 20} if layout else {"timeout_seconds": 20}
    try:
        with jobs.job(settings, MODELS["llama of 4 kv"](), Texts(24), groups=False) as job:
            return str(job.engine.layout)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("block", "layout", "words"),
    [
        ({"autotp_size": 2}, {}, "data=2 tensor=2 zero_stage=1"),
        ({"autotp_size": 2}, {"data": 1, "tensor": 2}, "data=1 tensor=2 zero_stage=1"),
        ({"autotp_size": 4}, {"data": 1}, "data=1 tensor=4 zero_stage=1"),
        (
            {"autotp_size": 2},
            {"data": 1, "tensor": 4},
            "layout.tensor is 4 and tensor_parallel.autotp_size is 2",
        ),
        ({"autotp_size": 3}, {}, "tensor=3 does not divide the 4 processes"),
    ],
)
def test_a_start_from_the_size_of_deepspeed(
    pool: RankPool, block: dict[str, Any], layout: dict[str, int], words: str
) -> None:
    assert all(words in said for said in pool.run(started_by_deepspeed, block=block, layout=layout))


def saved(folder: str, sides: list[Layout]) -> tuple[oracle.State, oracle.State] | None:
    """The state that a checkpoint was saved of after a switch, and the one that a new engine has loaded."""
    with axis_walks.started(language_model("llama tied"), "fp32", sides[0]) as job:
        batches = iter(job.loader)
        for number in range(3):
            batch = next(batches)
            named_step(job.engine, batch)
            if number == 1:
                job.engine.switch(sides[1], at=job.engine.global_steps)
        job.engine.save_checkpoint(folder)
        before = oracle.gather(job.engine, places)
    with axis_walks.started(language_model("llama tied"), "fp32", sides[1]) as job:
        assert job.engine.load_checkpoint(folder)[0] is not None
        return before, oracle.gather(job.engine, places)
    return None


@pytest.mark.full
@pytest.mark.parametrize("sides", [[at(4, 1, 1), at(2, 2, 1)], [at(4, 1, 3), at(2, 2, 3)], [at(1, 4, 1), at(4, 1, 0)]])
def test_checkpoints_after_a_switch(pool: RankPool, tmp_path: Path, sides: list[Layout]) -> None:
    for before, loaded in pool.run(saved, folder=str(tmp_path), sides=sides):
        assert oracle.differences(before, loaded) == []
