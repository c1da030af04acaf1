"""Layers of living pipelines are timed, all members have one profile, and boundaries are proposed from it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_dynatrain.balance.balancer import Balancer
from ds_dynatrain.balance.decision import Answer
from ds_dynatrain.balance.profile import BESIDE, Profile
from ds_dynatrain.errors import ConfigError, ProfileError
from tests.engine import jobs
from tests.engine.burning import burning
from tests.engine.clocks import CLOCKS, TICK, clock
from tests.engine.pipeline_walks import job, layout, settings
from tests.engine.pool import ROOT, RankPool, free_port
from tools.burning import Points, busy

SECONDS = (0.008, 0.004, 0.002, 0.002, 0.001, 0.001)
"""Forward; the first layer weighs almost as much as all others."""
LONGER = 10
"""Times as long, by the clock: so what comes with each pass, almost 1 ms on a busy machine, is within bounds."""
EVEN = layout(2, 2, 1, (0, 3, 6))


def close(seconds: Sequence[float], said: bool) -> Any:
    """Measured, by a clock that has nothing else in it, or one that has what comes with each pass."""
    return pytest.approx(list(seconds), rel=0.1, abs=10 * TICK if said else 8e-4)


def lasting(seconds: Sequence[float], said: bool) -> list[float]:
    """Of layers, forward."""
    return [each if said else LONGER * each for each in seconds]


def balanced(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    """With a block that times two steps of every four, and moves nothing, which is the default."""
    block = {"every_steps": 4, "window_steps": 2, **more}
    return {**given, "dynatrain": {**given["dynatrain"], "balance": block}}


def measuring(folder: str, said: bool) -> dict[str, Any]:
    """Two windows in the first layout, a switch to what is proposed, and one window there."""
    by_the_clock = {"least_gain": 0.005}  # where four ranks share two cores, and these with others, a step takes longer
    given = balanced(settings(EVEN, train_batch_size=24), safety=0.0, **by_the_clock)
    model = burning(lasting(SECONDS, said))
    with clock(said), jobs.job(given, model, data=Points(), groups=False) as made:
        engine = made.engine
        with pytest.raises(ProfileError, match="the first window begins at step"):
            engine.balancer.advise()
        for _ in range(4):
            assert engine.balancer.profile is None
            engine.train_batch()
        first = engine.balancer.profile
        with busy(engine) as apart:
            engine.train_batch()
        passes = engine.gradient_accumulation_steps()
        advice = engine.balancer.advise()
        assert advice.proposed != engine.layout
        if engine.rank == 0:
            first.save(f"{folder}/profile.json")
        engine.switch(advice.proposed, at=engine.global_steps)
        for _ in range(4):
            engine.train_batch()
        assert engine.layout.boundaries == advice.proposed.boundaries
        second = engine.balancer.profile
        stays = engine.balancer.advise()
        stage = engine.layout.coordinate(engine.rank)["pipe"]
        return {
            "first": first,
            "second": second,
            "advice": advice,
            "stays": stays,
            "stage": stage,
            "busy": apart[0] / passes,
        }


@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
@pytest.mark.parametrize("said", CLOCKS)
def test_all_members_have_one_profile(pool: RankPool, tmp_path: Path, said: bool) -> None:
    ranks = pool.run(measuring, folder=str(tmp_path), said=said, seconds=240)
    forward = lasting(SECONDS, said)
    first, advice = ranks[0]["first"], ranks[0]["advice"]
    for name in ("first", "second", "advice", "stays"):
        assert all(rank[name] == ranks[0][name] for rank in ranks), name
    assert first == Profile.load(tmp_path / "profile.json")
    assert (first.train_batch_size, first.micro_batch_size) == (24, 3)
    assert first.names == tuple(f"{place}.Burning" for place in range(6)) and first.trained.all()
    assert first.seconds("forward_seconds") == close(forward, said)
    assert first.seconds("backward_seconds") == close([2 * each for each in forward], said)
    assert 0 < first.seconds("optimizer_seconds").sum() < 0.05
    assert all(0 < getattr(first, name) < 0.05 for name in BESIDE)
    assert first.counts("output_bytes").tolist() == [4 * 3 * 4] * 6
    assert first.kind_bytes("weight").tolist() == first.kind_bytes("exp_avg").tolist() == [80] * 6
    for rank in ranks:
        layers = slice(*EVEN.boundaries[rank["stage"] : rank["stage"] + 2])
        summed = sum(first.seconds(name)[layers].sum() for name in ("forward_seconds", "backward_seconds"))
        assert summed == pytest.approx(rank["busy"], rel=0.05)
    assert advice.proposed.boundaries == (0, 1, 6) and advice.decision.answer is Answer.ACT
    assert advice.gain > 0.08 and advice.move.nbytes > 0
    assert ranks[0]["stays"].proposed == ranks[0]["stays"].present
    assert ranks[0]["second"].seconds("forward_seconds") == close(forward, said)


def freezing_first(count: int, said: bool) -> tuple[Any, ...]:
    """Profiles before and after the first layers are frozen, what is proposed then, and the profile there."""
    given = balanced(settings(EVEN, train_batch_size=12), every_steps=10**6, window_steps=2, safety=0.0)
    model = burning(lasting((0.002,) * 6, said))
    with clock(said), jobs.job(given, model, data=Points(), groups=False) as made:
        engine, found = made.engine, []

        def measured() -> Profile:
            for _ in range(5):
                engine.train_batch()
            return engine.balancer.profile

        found.append(measured())
        for name, held in engine.module.named_parameters():
            held.requires_grad_(int(name.split(".")[0]) >= count)
        assert engine.update_param_groups()
        found.append(measured())
        advice = engine.balancer.advise()
        engine.switch(advice.proposed, at=engine.global_steps)
        engine.balancer.note("moved")
        found.append(measured())
        return *found, advice


@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
@pytest.mark.parametrize("said", CLOCKS)
def test_layers_of_a_frozen_prefix_take_no_backward_pass(pool: RankPool, said: bool) -> None:
    """Also those behind the first boundary; so a stage of them alone is proposed."""
    first, second, third, advice = pool.run(freezing_first, count=4, said=said, seconds=120)[0]
    forward, backward = (lasting([each] * 6, said) for each in (0.002, 0.004))
    assert first.seconds("backward_seconds") == close(backward, said)
    for profile in (second, third):
        assert profile.trained.tolist() == [False] * 4 + [True] * 2
        assert profile.seconds("forward_seconds") == close(forward, said)
        assert profile.seconds("backward_seconds") == close([0.0] * 4 + backward[4:], said)
        assert (profile.counts("activation_bytes") > 0).tolist() == profile.trained.tolist()
        assert not profile.seconds("optimizer_seconds")[:4].any()
    assert advice.proposed.boundaries == (0, 4, 6)


def losses(block: bool, name: str, interval: int = 0) -> list[float]:
    """Through a change of stages and of boundaries, windows open in each."""
    more = {"pipeline": {"activation_checkpoint_interval": interval, "use_reentrant": False}} if interval else {}
    given = settings(layout(2, 2), **more)
    with job(balanced(given) if block else given, name) as made:
        found = []
        for step in range(15):
            if step in (5, 10):
                target = {5: layout(4, 1), 10: layout(2, 2, 1, (0, 2, 7))}[step]
                made.engine.switch(target, at=step)
            found.append(made.engine.train_batch().item())
        assert (made.engine.balancer is not None) == block
        if block:
            assert len(made.engine.balancer.profile.layers) == 7
            str(made.engine.balancer.advise())
        return found


@pytest.mark.full
@pytest.mark.parametrize(("name", "interval"), [("tied", 0), ("uneven", 2)])
def test_losses_are_bit_equal_with_and_without_it(pool: RankPool, name: str, interval: int) -> None:
    plain = pool.run(losses, block=False, name=name, interval=interval)
    assert pool.run(losses, block=True, name=name, interval=interval) == plain


def noting() -> None:
    """A note of all is followed by a window; one of some is an error that names the others."""
    given = balanced(settings(EVEN, train_batch_size=12), every_steps=1000, window_steps=1)
    given["dynatrain"]["timeout_seconds"] = 4
    with jobs.job(given, burning((0.001,) * 6), data=Points(), groups=False) as made:
        engine = made.engine
        for _ in range(4):
            engine.train_batch()
        first = engine.balancer.profile
        engine.train_batch()
        assert engine.balancer.profile is first
        engine.balancer.note("other costs")
        engine.train_batch()
        assert engine.balancer.profile is not first
        if engine.rank < 2:
            with pytest.raises(ConfigError, match=r"note\('half of them'\).*member 2, 3 within"):
                engine.balancer.note("half of them")
        engine.train_batch()
        engine.balancer.note("all again")
        second = engine.balancer.profile
        engine.train_batch()
        assert engine.balancer.profile is not second


def test_notes_are_of_all_or_of_nobody(pool: RankPool) -> None:
    pool.run(noting)


SCRIPT = """
import sys, deepspeed
import ds_dynatrain
from deepspeed.pipe import LayerSpec, PipelineModule
from torch.nn import MSELoss
from tools.burning import Burning, Points
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nobody has to wait for a compiler
deepspeed.init_distributed("gloo", verbose=False)
config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
          "zero_optimization": {"stage": 1}, "steps_per_print": 10**9, "dynatrain": {}}
model = PipelineModule([LayerSpec(Burning, 0.0, 0.0)] * 2, num_stages=1, loss_fn=MSELoss())
engine, *_ = ds_dynatrain.initialize(model=model, config=config, training_data=Points())
engine.train_batch()
assert engine.balancer is None
found = sorted(name for name in sys.modules if name.startswith("ds_dynatrain.balance") or "stage_timer" in name)
assert not found, found
"""


@pytest.mark.full
def test_nothing_is_imported_without_the_block() -> None:
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "LOCAL_RANK": "0"}
    names |= {"WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, **names},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr[-2000:]


def coming(dtype: str, stage: int) -> list[Any]:
    """Two members work, then four: what the profile is on each after each window. Tied layers, experts in none."""
    given = balanced(settings(layout(2, 1, stage), dtype), every_steps=2, window_steps=1)
    found = []
    with job(given, "tied") as made:
        engine = made.engine
        if engine.idle:
            with pytest.raises(ProfileError, match="this member is idle"):
                engine.balancer.advise()
            with pytest.raises(ConfigError, match="idle"):
                engine.balancer.note("nothing")
        while engine.idle or engine.global_steps < 10:
            if not engine.idle and engine.global_steps == 5 and engine.layout.data == 1:
                engine.switch(layout(2, 2, stage), at=5)
            engine.train_batch()
            found.append((engine.global_steps, engine.balancer.profile))
        assert engine.last_switch.outcome == "committed", engine.last_switch.reason
    return found


@pytest.mark.parametrize(
    ("dtype", "stage"),
    [
        ("fp32", 0),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("bf16", 1), ("fp16", 1), ("bf16 in fp32", 1), ("bf16", 0))
        ),
    ],
)
def test_who_comes_has_it_too(pool: RankPool, dtype: str, stage: int) -> None:
    ranks = pool.run(coming, dtype=dtype, stage=stage)
    steps = [dict(each) for each in ranks]
    assert [sorted(each) for each in steps] == [[*range(1, 11)]] * 2 + [[*range(6, 11)]] * 2
    for step in (8, 9, 10):
        assert len({repr(each[step]) for each in steps}) == 1 and steps[0][step] is not None
    assert steps[2][7] is None and len(steps[0][5].speeds) == 2 and len(steps[0][10].speeds) == 4
    found = steps[0][10]
    assert found.layers[0].kind_bytes == found.layers[6].kind_bytes, "a tied layer has its weight at both places"
    assert (found.seconds("optimizer_seconds") > 0).tolist() == found.trained.tolist()
    assert found.layers[0].backward_seconds > 0 and (found.counts("activation_bytes") > 0).any()


def compiled() -> tuple[int, int]:
    """Compilations before and after a window."""
    given = balanced(settings(layout(2, 2)), every_steps=10**6, window_steps=1)
    with job(given, "tied") as made:
        engine = made.engine
        engine.compile(backend="eager")
        engine.train_batch()
        engine.train_batch()
        before = engine._host.compilations.count
        engine.train_batch()
        assert engine.balancer.profile is not None
        engine.train_batch()
        return before, engine._host.compilations.count


@pytest.mark.full
def test_nothing_is_compiled_again(pool: RankPool) -> None:
    for before, after in pool.run(compiled):
        assert after == before > 0


@pytest.mark.parametrize(("step", "counted"), [(10, 2), (14, 6), (3, 2)])
def test_steps_since_a_window_that_is_doubted(step: int, counted: int) -> None:
    """It ended with step 10, of two steps; a load may have gone back behind it."""
    averaged = SimpleNamespace(doubted=SimpleNamespace(step=10))
    balancer: Any = SimpleNamespace(_averaged=averaged, _settings=SimpleNamespace(window_steps=2))
    assert Balancer._steps_if_changed(balancer, step) == counted
