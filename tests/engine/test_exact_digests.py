"""Digests of the steps of exact jobs: equal in every world, and a bit that flips is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynatrain.exact.bits.bit_records import ExactRun, read_exact
from ds_dynatrain.exact.bits.difference import BitComparison, compare
from ds_dynatrain.exact.bits.steps import ExactSteps
from ds_dynatrain.report import read_events
from ds_dynatrain.space import Layout
from tests.engine import exact_pipelines, exactly, jobs
from tests.engine.exactly import NOT_ON_DEVICE, Bits, together
from tests.engine.pipeline_walks import layout
from tests.engine.pool import RankPool
from tests.engine.test_exact_precision import KINDS

FULL = pytest.mark.full
STEPS = 4
WORLDS: tuple[jobs.Sizes, ...] = tuple((data, stage) for data in (1, 2, 3, 4) for stage in (1, 2, 3))
SWITCHES: dict[int, jobs.Sizes] = {1: (4, 2), 2: (3, 3), 3: (1, 1)}


def note_digest(engine: Any, bits: Bits) -> None:
    """What the engine says after each step."""
    bits.notes[engine.global_steps] = engine.exact.step, engine.exact.digest


def reported(pool: RankPool, file: Path, every: int = 1, steps: int = STEPS, **arguments: Any) -> ExactRun:
    """A run with a report file, which says what all ranks' engines do."""
    block = {"exact": {"digest_every_steps": every}, "report": {"jsonl": str(file)}, **arguments.pop("dynatrain", {})}
    ranks = pool.run(exactly.run, steps=steps, each=note_digest, dynatrain=block, **arguments)
    found = read_exact(file)
    seen = together(ranks)
    assert {(step, leaf): loss for step in found.steps for leaf, loss in enumerate(found.steps[step].losses)} == {
        (step + 1, leaf): loss for (step, leaf), loss in seen.losses.items()
    }
    assert {step - 1: found.steps[step].norm for step in found.steps} == seen.norms
    for bits in ranks:
        for step, said in (bits.notes if bits is not None else {}).items():
            newest = step - step % every
            assert said == ((newest, found.steps[newest].digest) if newest else (None, None))
    return found


def identical(one: ExactRun, other: ExactRun, steps: int = STEPS) -> bool:
    """Whether they are, in so many steps."""
    found = compare(one, other)
    return found == BitComparison(tuple(range(1, steps + 1)), tuple(range(1, steps + 1)))


@pytest.mark.full
@NOT_ON_DEVICE
def test_every_world_has_the_same_digests(pool: RankPool, tmp_path: Path) -> None:
    first = reported(pool, tmp_path / "first", start=(1, 1))
    assert len({step.digest for step in first.steps.values()}) == STEPS
    for start in ((3, 2), (4, 3)):
        assert identical(first, reported(pool, tmp_path / f"{start}", start=start)), start
    assert identical(first, reported(pool, tmp_path / "switches", start=(2, 3), schedule=SWITCHES))
    assert len(read_events(tmp_path / "switches")) == len(SWITCHES)


@NOT_ON_DEVICE
@FULL
def test_all_worlds_have_the_same_digests(pool: RankPool, tmp_path: Path) -> None:
    first = reported(pool, tmp_path / "first", start=(1, 1))
    for start in WORLDS[1:]:
        assert identical(first, reported(pool, tmp_path / f"{start}", start=start)), start
    late = {"late": True}
    assert identical(first, reported(pool, tmp_path / "late", start=(2, 3), schedule=SWITCHES, dynatrain=late))
    by_loss = reported(pool, tmp_path / "torch", start=(3, 1), torch_style=True)
    assert identical(first, by_loss)


@pytest.mark.full
@NOT_ON_DEVICE
def test_less_often(pool: RankPool, tmp_path: Path) -> None:
    """Losses and norms of all steps are there, and digests of some; a job that goes on is one with that before it."""
    folder, file = tmp_path / "saved", tmp_path / "lines"
    whole = reported(pool, tmp_path / "whole", every=2, start=(1, 1))
    block = {"exact": {"digest_every_steps": 2}, "report": {"jsonl": str(file)}}
    pool.run(exactly.run, start=(3, 3), steps=2, save=str(folder), dynatrain=block)
    pool.run(exactly.run, start=(2, 1), steps=STEPS, load=str(folder), dynatrain=block)
    assert compare(whole, read_exact(file)) == BitComparison((1, 2, 3, 4), (2, 4))


@NOT_ON_DEVICE
@FULL
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision(pool: RankPool, tmp_path: Path, name: str) -> None:
    """Weights are cast from masters; in fp16 steps overflow, and are skipped."""
    kind = KINDS[name]
    first = reported(pool, tmp_path / "first", start=(1, 1), **kind)
    for start in ((3, 2), (2, 3), (4, 1)):
        assert identical(first, reported(pool, tmp_path / f"{start}", start=start, **kind)), start
    assert identical(first, reported(pool, tmp_path / "switches", start=(2, 3), schedule=SWITCHES, **kind))


PIPELINES = (layout(2, 2, boundaries=(0, 5, 9)), layout(4, 1))


@pytest.mark.full
@NOT_ON_DEVICE
@pytest.mark.parametrize("start", [PIPELINES[0], pytest.param(PIPELINES[1], marks=FULL)])
def test_pipelines_have_the_same_digests(pool: RankPool, tmp_path: Path, start: Layout) -> None:
    """With ties between stages; and through a switch of their number."""
    runs = []
    for place, (first, schedule) in enumerate(((layout(1, 1), {}), (start, {2: layout(3, 1)}))):
        block = {"exact": {"digest_every_steps": 2}, "report": {"jsonl": str(tmp_path / f"{place}")}}
        ranks = pool.run(exact_pipelines.run, start=first, schedule=schedule, steps=STEPS, dynatrain=block, seconds=120)
        runs.append(read_exact(tmp_path / f"{place}"))
        seen = together(ranks).losses
        assert {
            (at - 1, leaf): loss for at, step in runs[-1].steps.items() for leaf, loss in enumerate(step.losses)
        } == {key: loss for key, loss in seen.items() if key[1] >= 0}
    assert compare(*runs) == BitComparison((1, 2, 3, 4), (2, 4))


# ---- a bit that flips --------------------------------------------------------------------------------------------


def first_of(engine: Any, kind: str) -> torch.Tensor:
    """A buffer of a state kind."""
    buffers = engine.host.state_buffers()[0]
    held: torch.Tensor = next(buffers[key] for key in sorted(buffers, key=str) if key[0] == kind)
    return held


def tied(engine: Any, kind: str) -> torch.Tensor:
    """The weight of a tie of stages."""
    weight: torch.Tensor = next(engine.host.module.tied_modules["words"].parameters())
    return weight.data.view(-1)


def flipping(
    where: str, step: int, rank: int, at: Callable[[Any, str], torch.Tensor], run: Callable[..., Bits], **arguments: Any
) -> Bits:
    """As `run`; one bit of what `at` gives flips on one rank, right after the optimizer has made a step."""
    own = ExactSteps.close_batch

    def close(steps: ExactSteps) -> None:
        if steps._engine.global_steps == step and steps._engine.rank == rank:
            at(steps._engine, where).view(torch.int32)[0] ^= 1
        own(steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExactSteps, "close_batch", close)
        return run(**arguments)


@NOT_ON_DEVICE
@pytest.mark.parametrize("where", ["weight", pytest.param("exp_avg", marks=FULL)])
def test_a_bit_that_flips_is_named(pool: RankPool, tmp_path: Path, where: str) -> None:
    """On rank 1, which at stage 1 holds all weights, and whose copy is not the one that counts."""
    first = reported(pool, tmp_path / "first", start=(1, 1))
    block = {"exact": {"digest_every_steps": 1}, "report": {"jsonl": str(tmp_path / "flipped")}}
    bit = {"where": where, "step": 3, "rank": 1, "at": first_of, "run": exactly.run}
    pool.run(flipping, **bit, start=(3, 1), steps=STEPS, dynatrain=block)
    found = compare(first, read_exact(tmp_path / "flipped"))
    assert (found.steps, found.step) == ((1, 2), 3)
    (only,) = found.differences
    assert only.kind == where and only.name in {repr(name) for name, _ in first.job.tensors}


@NOT_ON_DEVICE
@FULL
def test_a_bit_that_flips_in_a_tie_is_named(pool: RankPool, tmp_path: Path) -> None:
    """On the last stage; what the first one has of it counts."""
    block = {"exact": {"digest_every_steps": 1}, "report": {"jsonl": str(tmp_path / "sound")}}
    pool.run(exact_pipelines.run, start=layout(1, 1), steps=STEPS, dynatrain=block)
    block["report"] = {"jsonl": str(tmp_path / "flipped")}
    bit = {"where": "weight", "step": 3, "rank": 1, "at": tied, "run": exact_pipelines.run}
    pool.run(flipping, **bit, start=layout(2, 1), steps=STEPS, dynatrain=block)
    sound = read_exact(tmp_path / "sound")
    found = compare(sound, read_exact(tmp_path / "flipped"))
    assert found.step == 3 and [each.kind for each in found.differences] == ["weight"]
    assert "tied" in found.differences[0].name
