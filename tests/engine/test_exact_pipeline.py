"""Exact jobs of pipelines: the same bits for any number of stages, wherever they are cut, and of data ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.errors import SwitchRefused, UnsupportedError
from ds_dynatrain.exact.adapters.exact_pipeline import as_sent
from ds_dynatrain.exact.adapters.refusals import refuse_inexact_job
from ds_dynatrain.exact.adapters.tied import StageLines, Uses
from ds_dynatrain.exact.extension import Exact
from ds_dynatrain.reshard import streams
from ds_dynatrain.space import Layout
from tests.engine import exact_pipelines, jobs
from tests.engine.exact_pipelines import LEAVES, SAMPLES
from tests.engine.exactly import NOT_ON_DEVICE, STEPS, Bits, differences, together
from tests.engine.models import decay_groups
from tests.engine.pipeline_walks import layout
from tests.engine.pool import RankPool

FULL = pytest.mark.full
WORLDS = [layout(pipe, data) for pipe in (1, 2, 4) for data in (1, 2, 3)]
CUT = layout(2, 2, boundaries=(0, 5, 9))
SWITCHES = {1: layout(2, 2), 2: CUT, 3: layout(4, 1), 4: layout(1, 3), 5: layout(3, 1)}
SMALL = [world for world in WORLDS if world.world_size <= 4]


def alone(pool: RankPool, **arguments: Any) -> Bits:
    """The run that others are held against: one stage on one rank."""
    return together(pool.once(exact_pipelines.run, start=layout(1, 1), seconds=120, **arguments))


def hold_against(pool: RankPool, worlds: Iterable[Layout], steps: int = STEPS, **arguments: Any) -> None:
    first = alone(pool, steps=steps, **arguments)
    assert len(first.losses) == steps * (LEAVES + 1)
    assert all(norm > 0.4 for norm in first.norms.values()), "it clips"
    for start in worlds:
        found = together(pool.run(exact_pipelines.run, start=start, steps=steps, seconds=120, **arguments))
        assert differences(first, found) == [], start


@pytest.mark.full
@NOT_ON_DEVICE
def test_worlds_have_the_same_bits(pool: RankPool) -> None:
    hold_against(pool, (layout(2, 2), layout(4, 1)))


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """As many ranks as the largest world has."""
    ranks = RankPool(12, tmp_path_factory.mktemp("twelve"))
    yield ranks
    ranks.stop()


@NOT_ON_DEVICE
@FULL
def test_all_worlds_have_the_same_bits(twelve: RankPool) -> None:
    hold_against(twelve, WORLDS[1:])


@pytest.mark.full
@NOT_ON_DEVICE
def test_live_switches_change_no_bit(pool: RankPool) -> None:
    found = pool.run(exact_pipelines.run, start=layout(2, 1), schedule=SWITCHES, seconds=120)
    assert differences(alone(pool), together(found)) == []


@NOT_ON_DEVICE
@FULL
@pytest.mark.parametrize("seed", range(3))
def test_random_chains_of_all_worlds_change_no_bit(twelve: RankPool, seed: int) -> None:
    stream = random.Random(seed)
    chain = {2 * step + 1: stream.choice(WORLDS) for step in range(8)}
    found = twelve.run(exact_pipelines.run, start=stream.choice(WORLDS), schedule=chain, steps=18, seconds=300)
    assert differences(alone(twelve, steps=18), together(found)) == []


@NOT_ON_DEVICE
@FULL
@pytest.mark.parametrize("seed", range(4))
def test_random_chains_change_no_bit(pool: RankPool, seed: int) -> None:
    stream = random.Random(seed)
    worlds = [*SMALL, CUT, layout(3, 1, boundaries=(0, 1, 8, 9)), layout(4, 1, boundaries=(0, 3, 5, 6, 9))]
    chain = {2 * step + 1: stream.choice(worlds) for step in range(8)}
    found = pool.run(exact_pipelines.run, start=stream.choice(worlds), schedule=chain, steps=18, seconds=180)
    assert differences(alone(pool, steps=18), together(found)) == []


@NOT_ON_DEVICE
@FULL
def test_a_job_that_goes_on_in_another_world(pool: RankPool, tmp_path: Path) -> None:
    pool.run(exact_pipelines.run, start=layout(2, 2), steps=2, save=str(tmp_path))
    found = together(pool.run(exact_pipelines.run, start=layout(1, 3), load=str(tmp_path)))
    whole = alone(pool)
    whole.losses = {place: loss for place, loss in whole.losses.items() if place[0] >= 2}
    assert differences(whole, found) == []


def evaluate(engine: Any, bits: Bits) -> None:
    """Between two steps: a mean over a batch, which draws what it likes."""
    loader = engine.loader(exact_pipelines.Noisy(24), evaluation=True, batch_size=2, num_workers=0)
    torch.rand(1 + engine.layout.pipe)
    bits.notes.setdefault("evaluated", []).append(float(engine.eval_batch(iter(loader), num_micro_batches=2)))


KINDS: dict[str, dict[str, Any]] = {
    "evaluation": {"each": evaluate},
    "recomputed": {"arguments": {"activation_checkpoint_interval": 2}, "pipeline": {"use_reentrant": False}},
    "recomputed by configuration": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
    "small chunks": {"zero_optimization": {"reduce_bucket_size": 60}},
    "round robin": {"zero_optimization": {"round_robin_gradients": True}},
    "uniform cut": {"arguments": {"partition_method": "uniform"}},
    "SGD": {
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
    },
    "no clipping": {"gradient_clipping": 0.0},
    "seeded layers": {"arguments": {"seed_layers": True, "seed_fn": exact_pipelines.seed}},
}


@NOT_ON_DEVICE
@FULL
@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_jobs(pool: RankPool, name: str) -> None:
    hold_against(pool, (layout(2, 2), layout(4, 1), layout(1, 3), layout(3, 1)), steps=3, **KINDS[name])


@NOT_ON_DEVICE
@FULL
def test_stages_on_which_nothing_goes_backward(pool: RankPool) -> None:
    one, *others = (
        together(pool.run(exact_pipelines.run, start=start, make=exact_pipelines.half_frozen, schedule=schedule))
        for start, schedule in (
            (layout(1, 1), {}),
            (layout(2, 2), {}),
            (layout(4, 1), {}),
            (layout(2, 2), {2: layout(2, 2, boundaries=(0, 4, 6)), 4: layout(1, 3)}),
        )
    )
    for other in others:
        assert differences(one, other) == []


@NOT_ON_DEVICE
@FULL
def test_recomputing_changes_no_bit(pool: RankPool) -> None:
    recomputed = pool.run(exact_pipelines.run, start=layout(2, 2), seconds=120, **KINDS["recomputed"])
    assert differences(alone(pool), together(recomputed)) == []


@NOT_ON_DEVICE
@FULL
def test_a_module_that_was_built_in_stages(pool: RankPool) -> None:
    given = {"groups": decay_groups, "seconds": 120}
    found = pool.run(exact_pipelines.run, start=layout(2, 2), stages=2, schedule={3: layout(4, 1)}, **given)
    assert differences(alone(pool, groups=decay_groups), together(found)) == []


def freeze(engine: Any, bits: Bits) -> None:
    """Layer 1 after two steps, and not any more after four; each says it of what it holds."""
    if engine.global_steps in (2, 4):
        for name, parameter in engine.module.named_parameters():
            parameter.requires_grad_(parameter.requires_grad if name[:2] != "1." else engine.global_steps == 4)
        assert engine.update_param_groups()


@NOT_ON_DEVICE
@FULL
def test_layers_that_are_frozen_and_trained_again(pool: RankPool) -> None:
    changes = ((layout(1, 1), {}), (layout(2, 2), {3: layout(4, 1), 5: layout(1, 3)}), (layout(1, 3), {3: CUT}))
    one, *others = (
        together(pool.run(exact_pipelines.run, start=start, each=freeze, schedule=schedule, seconds=120))
        for start, schedule in changes
    )
    for other in others:
        assert differences(one, other) == []


@NOT_ON_DEVICE
@FULL
def test_borrowed_leaves_leave_no_trace(pool: RankPool) -> None:
    ranks = pool.run(exact_pipelines.run, start=layout(1, 3), steps=2)
    assert [rank.notes["calls"] for rank in ranks if "calls" in rank.notes] == [2 * 3, 2 * 2, 2 * 2]


# ---- what is refused ---------------------------------------------------------------------------------------------


def own_iterator_case() -> None:
    """What is no loader of the engine is no leaf; evaluation may read it."""
    given = exact_pipelines.settings(layout(2, 2))
    with jobs.job(given, exact_pipelines.model()) as job:
        batch = tuple(part[None] for part in exact_pipelines.Noisy()[0])
        assert job.engine.eval_batch(iter([batch] * 4)) > 0
        job.engine.set_dataiterator(iter([batch] * 4))
        with pytest.raises(UnsupportedError, match=r"^train_batch reads a list_iterator: only the micro-batches"):
            job.engine.train_batch()


def reentrant_case() -> None:
    """As the module was built, or as the configuration says it."""
    given = exact_pipelines.settings(layout(2, 2))
    module = exact_pipelines.model(activation_checkpoint_interval=1)
    with jobs.job(given, module) as job, pytest.raises(UnsupportedError, match=r"interval=1: .*use_reentrant.*false"):
        job.engine.train_batch()


@NOT_ON_DEVICE
def test_reentrant_checkpointing(pool: RankPool) -> None:
    pool.run(reentrant_case)


@NOT_ON_DEVICE
def test_a_loop_of_ones_own(pool: RankPool) -> None:
    pool.run(own_iterator_case)


def test_a_smaller_last_leaf() -> None:
    exact = Exact(DynatrainConfig(exact=True))
    with pytest.raises(SwitchRefused, match=r"train_batch_size 13 in leaves of 2 samples: .*divides$"):
        exact.check_layout(layout(2, 2), BatchSizes(13, 2, True), True)
    for world in (layout(2, 2), CUT):
        exact.check_layout(world, BatchSizes(SAMPLES, 2, True), True)
    for other in (layout(2, 1, 0), Layout(data=2, pipe=2, expert=2, zero_stage=1)):
        with pytest.raises(SwitchRefused, match="or pipelines at ZeRO stage 1; leave expert"):
            exact.check_layout(other, BatchSizes(SAMPLES, 2, True), True)


def test_several_gradients() -> None:
    hidden, mask = torch.ones(2, 3).t().requires_grad_(), torch.ones(2, dtype=torch.int64)
    sent, with_it = as_sent((hidden * 1, mask), 4)
    assert sent.is_contiguous() and with_it is mask
    sent.relu_().sum().backward()  # as a layer may do that works in place
    with pytest.raises(UnsupportedError, match=r"^exact: layer 4 gives 2 tensors: a stage runs a separate backward"):
        as_sent((hidden, hidden), 4)


def test_what_a_layer_gives_lies_as_a_message_does() -> None:
    """Its gradient, too: one that is expanded comes as one that was received."""
    seen: list[tuple[int, ...]] = []
    weight = torch.ones(3, 2, requires_grad=True)
    hidden = weight.t() * 1
    hidden.register_hook(lambda gradient: seen.append(gradient.stride()))
    sent = as_sent(hidden, 0)
    assert sent.stride() == (3, 1)
    sent.sum().backward()
    assert seen == [(3, 1)]


class Penalised(PipelineModule):  # type: ignore[misc]
    """Has a loss besides that of its micro-batches."""

    def get_additional_losses(self) -> dict[str, torch.Tensor]:
        """One."""
        return {"penalty": torch.ones(())}


def models_case() -> None:
    """On ranks, since DeepSpeed's module asks for them."""
    normed = [LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.BatchNorm1d, 2)]
    for module, words in (
        (Penalised(normed[:1], num_stages=1), "^exact: Penalised: its layers send"),
        (PipelineModule(normed, num_stages=1), "is a BatchNorm1d"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            refuse_inexact_job({}, module, None)
    with pytest.raises(UnsupportedError, match="'1' is a BatchNorm1d"):  # on the rank without that layer, too
        with jobs.job(exact_pipelines.settings(layout(2, 2)), PipelineModule(normed, num_stages=2)):
            pass


@NOT_ON_DEVICE
def test_models(pool: RankPool) -> None:
    pool.run(models_case)


# ---- mutations: each breaks one rule -----------------------------------------------------------------------------


def by_stage(seed: int, step: int, leaf: int, layer: int | None = None, own: Any = streams.begin_leaf) -> None:
    """Generators are set where a stage begins, and not before each layer."""
    if layer is None:
        own(seed, step, leaf)


def counting_all(lines: StageLines) -> list[torch.Tensor]:
    """Tied parameters count on each stage that has them."""
    return super(StageLines, lines).held()


BROKEN: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "seed": lambda: patch.object(streams, "begin_leaf", by_stage),
    "counted once": lambda: patch.object(StageLines, "held", counting_all),
    "tie": lambda: patch.object(Uses, "of_layer", lambda uses, layer: nullcontext()),
}


def broken_case(rule: str, start: Layout) -> Bits:
    with BROKEN[rule]():
        return exact_pipelines.run(start, steps=2)


@NOT_ON_DEVICE
@FULL
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_seen(pool: RankPool, rule: str) -> None:
    one, other = (together(pool.run(broken_case, rule=rule, start=start)) for start in (layout(1, 1), layout(2, 2)))
    assert (differences(one, other) == []) == (rule == "nothing")
