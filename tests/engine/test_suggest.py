"""What `engine.suggest` proposes: nothing that a switch refuses, and what a profile says is fast."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_dynatrain.balance.profile import LayerCost, Profile
from ds_dynatrain.errors import ConfigError, ProfileError
from ds_dynatrain.space import Layout
from tests.engine import jobs, pipeline_walks
from tests.engine.pool import RankPool

LAST_IS_SLOW = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 6.0)


def profile_of(seconds: tuple[float, ...], speeds: tuple[float, ...] = (1.0,), batch: int = 12) -> Profile:
    layers = tuple(
        LayerCost(name=str(place), forward_seconds=each, backward_seconds=2 * each, kind_bytes={"weight": 4})
        for place, each in enumerate(seconds)
    )
    return Profile(layers=layers, train_batch_size=batch, micro_batch_size=3, speeds=speeds)


def started_with_layers(file: str) -> str:
    settings = pipeline_walks.settings(Layout(pipe=2, data=2, zero_stage=1))
    settings["dynatrain"]["balance"] = {"mode": "off", "profile": file}
    with pytest.raises(ConfigError) as caught, pipeline_walks.job(settings, "tied"):
        pass
    return str(caught.value)


def test_a_profile_of_another_model_ends_the_start(pool: RankPool, tmp_path: Path) -> None:
    profile_of((1.0, 1.0)).save(tmp_path / "two")
    for said in pool.run(started_with_layers, file=str(tmp_path / "two")):
        assert "it has 2 layers, and this one has 7" in said


def cut_anew() -> tuple[Layout, list[str], float]:
    """(the layout after going to the best of two stages, what of all suggestions would be refused, the last loss)."""
    with pipeline_walks.job(pipeline_walks.settings(Layout(pipe=2, data=2, zero_stage=1)), "tied") as made:
        engine, profile = made.engine, profile_of(LAST_IS_SLOW)
        engine.train_batch()
        found = engine.suggest(profile)
        assert list(found) == sorted(found, key=lambda each: each.seconds)
        assert {each.layout.zero_stage for each in found} == {1} and len({each.layout for each in found}) == len(found)
        refusals = [engine.plan(each.layout).refusal for each in found]
        best = next(each.layout for each in found if each.layout.pipe == 2 and each.layout.data == 2)
        engine.switch(best, at=engine.global_steps)
        loss = engine.train_batch().item()
        return engine.layout, refusals, loss


@pytest.mark.full
def test_a_pipeline_is_cut_where_the_time_is(pool: RankPool) -> None:
    for layout, refusals, loss in pool.run(cut_anew):
        assert layout == Layout(pipe=2, data=2, zero_stage=1, boundaries=(0, 6, 7))
        assert refusals and not any(refusals) and loss > 0


def slow(file: str) -> tuple[tuple[int, ...] | None, list[int], str]:
    """(the best shares by a file's profile, ranks of the best for three members, what is said of other batches)."""
    settings = jobs.config(start=(4, 1), train_micro_batch_size_per_gpu=3)
    settings["dynatrain"]["balance"] = {"mode": "off", "profile": file}
    with jobs.job(settings) as made:
        engine = made.engine
        best = engine.suggest()[0].layout
        assert engine.plan(best).step_ms["total"] < engine.plan(zero_stage=2).step_ms["total"]
        three = [each.layout.world_size for each in engine.suggest(members=3)]
        with pytest.raises(ProfileError) as caught:
            engine.suggest(profile_of((1.0,), batch=24))
        jobs.train(made, 2)
        engine.switch(best, at=engine.global_steps)
        jobs.train(made, 3)
        assert engine.layout == best
        return best.shares, three, str(caught.value)


@pytest.mark.full
def test_a_slow_member_gets_fewer_samples(pool: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    profile_of((1.0,), (0.5, 1.0, 0.5, 1.0)).save(file)
    for shares, three, said in pool.run(slow, file=str(file)):
        assert shares == (2, 4, 2, 4)
        assert max(three) == 3
        assert "of a train_batch_size of 24, and this job has 12" in said


def slow_pipeline(file: str) -> tuple[Layout, list[str], list[float], float]:
    """(the best of two pipelines where one of four members is slow, what of all suggestions would be refused, what two
    layouts are predicted to take, the loss there)."""
    given = pipeline_walks.settings(Layout(pipe=2, data=2, zero_stage=1), train_batch_size=15)
    given["dynatrain"]["balance"] = {"mode": "off", "profile": file}
    with pipeline_walks.job({**given, "dataloader_drop_last": True}, "tied") as made:
        engine = made.engine
        found = engine.suggest()
        best = next(each for each in found if each.layout.pipe == 2 and each.layout.data == 2)
        refusals = [engine.plan(each.layout).refusal for each in found]
        engine.switch(best.layout, at=engine.global_steps)
        loss = engine.train_batch().item()
        predicted = [engine.plan(each).step_ms["total"] for each in (best.layout, best.layout.replace(shares=None))]
        assert predicted[0] == best.time.step_ms["total"]
        return engine.layout, refusals, predicted, loss


@pytest.mark.full
def test_a_slow_pipeline_runs_fewer_micro_batches(pool: RankPool, tmp_path: Path) -> None:
    """Of five the first pipeline would run three."""
    file = tmp_path / "profile.json"
    profile_of((1.0,) * 7, (0.5, 1.0, 1.0, 1.0), batch=15).save(file)
    for layout, refusals, predicted, loss in pool.run(slow_pipeline, file=str(file)):
        assert layout.shares == (6, 9) and predicted[0] < predicted[1]
        assert refusals and not any(refusals) and loss > 0


def ruled(profile: str | None) -> list[Layout]:
    """What `"layouts": "best"` has for three members, best first."""
    settings = pipeline_walks.settings(Layout(pipe=2, data=2, zero_stage=1))
    block = {"every_steps": 50} if profile is None else {"mode": "off", "profile": profile}
    settings["dynatrain"] |= {"layouts": "best", "balance": block}
    with pipeline_walks.job(settings, "tied") as made:
        return list(made.engine._parts.targets.rule(3, made.engine.layout))


def test_the_best_layouts_for_other_numbers_of_members(pool: RankPool, tmp_path: Path) -> None:
    profile_of(LAST_IS_SLOW).save(tmp_path / "profile.json")
    for found in pool.run(ruled, profile=str(tmp_path / "profile.json")):
        assert {each.zero_stage for each in found} == {1} and max(each.world_size for each in found) == 3
        assert Layout(pipe=2, zero_stage=1, boundaries=(0, 6, 7)) in found
    for found in pool.run(ruled, profile=None):
        assert found == [Layout(pipe=2, zero_stage=1)], "nothing was measured: as many data ranks as there can be"


def started_with(file: str) -> str:
    settings = jobs.config()
    settings["dynatrain"] |= {"layouts": "best", "balance": {"mode": "off", "profile": file}}
    with pytest.raises(ConfigError) as caught, jobs.job(settings):
        pass
    return str(caught.value)


def test_a_start_with_a_profile_that_is_none(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "cut").write_text(profile_of((1.0,)).to_json()[:-20])
    profile_of((1.0,), batch=24).save(tmp_path / "batches")
    cannot = {
        "missing": "No such file",
        "cut": "no JSON, or the end is missing",
        "batches": "of a train_batch_size of 24",
    }
    for name, words in cannot.items():
        for said in pool.run(started_with, file=str(tmp_path / name)):
            assert said.startswith("dynatrain.balance.profile: ") and words in said
