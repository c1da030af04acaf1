"""Replicas that tensor ranks or stages computed each for itself: small drift is settled, more is refused."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from ds_dynatrain.errors import CertificateError
from ds_dynatrain.reshard.replicas import distance, furthest, judge
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, faults, jobs, pipeline_walks, subjects
from tests.engine.pool import RankPool

KINDS = ("weight", "master", "exp_avg")


def at(stage: int = 1, **sizes: int) -> Layout:
    """A layout."""
    return Layout(**sizes, zero_stage=stage)


def job(case: str) -> AbstractContextManager[jobs.Job]:
    """A job in the first layout of a case."""
    start = CASES[case][1]
    if start.pipe > 1:
        return pipeline_walks.job(pipeline_walks.settings(start), "tied")
    return axis_walks.started(subjects.language_model("llama of 4 kv"), "fp32", start)


CASES: dict[str, tuple[str, Layout, Layout]] = {
    "norms of tensor ranks": ("model.norm.weight", at(data=2, tensor=2), at(2, tensor=4)),
    "norms in stage 3": ("model.norm.weight", at(3, data=2, tensor=2), at(0, data=3)),
    "tied stages": ("tied_modules.words.weight", at(data=2, pipe=2), at(pipe=4)),
}
"""Name of a tensor, and the layouts before and after the switch."""


def daily(*names: str) -> list[Any]:
    """Return all cases; those that are not named are of the full set."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.full) for name in CASES]


def views(engine: Any, name: str) -> dict[str, list[torch.Tensor]]:
    """Kind -> this rank's memory of a logical tensor."""
    vps, buffers = engine._parts.vps, engine._host.state_buffers()[0]
    number = [tensor.name for tensor in vps.tensors].index(name)
    found: dict[str, list[torch.Tensor]] = {}
    for kind in KINDS:
        of, pieces = vps.split_by_tensor(vps.holding(vps.layout, engine.rank, kind))
        held = [piece for which, piece in zip(of.tolist(), pieces, strict=True) if which == number]
        found[kind] = [buffers[kind, p.buffer].detach()[p.offset :][: p.stop - p.start] for p in held]
    return found


def drift(engine: Any, name: str, share: float) -> None:
    """Make a tensor's replicas on all places but the first of the pipe and tensor axes larger by a share."""
    place = engine.layout.coordinate(engine.rank)
    done = set()
    for held in (view for each in views(engine, name).values() for view in each):
        if place["pipe"] + place["tensor"] and held.data_ptr() not in done:
            done.add(held.data_ptr())
            held.mul_(1 + share)


def values(engine: Any, name: str) -> dict[str, list[list[float]]]:
    return {kind: [view.tolist() for view in each] for kind, each in views(engine, name).items()}


def drifted(case: str, share: float, failing: list[str]) -> tuple[Any, Any, list[Any]] | None:
    """(values before and after a switch over replicas that have drifted, how it ended); None where it went idle."""
    name, _, target = CASES[case]
    with job(case) as made, faults.injected(failing, {}):
        engine, batches = made.engine, iter(made.loader)
        if engine.layout.pipe > 1:
            engine.train_batch()
        else:
            subjects.named_step(engine, next(batches))
        drift(engine, name, share)
        before = values(engine, name)
        engine.switch(target, at=engine.global_steps)
        engine.boundary()
        event = engine.last_switch
        return before, values(engine, name), [event.outcome, event.reason, event.warnings]
    return None


def flat(held: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    return {kind: [value for part in parts for value in part] for kind, parts in held.items()}


@pytest.mark.parametrize("case", daily("norms in stage 3", "tied stages"))
def test_small_drift_is_settled(pool: RankPool, case: str) -> None:
    name, start, target = CASES[case]
    found = pool.run(drifted, case=case, share=1e-6, failing=[])
    firsts = [rank for rank in range(4) if not {start.coordinate(rank)["pipe"], start.coordinate(rank)["tensor"]} - {0}]
    owners = [flat(found[rank][0]) for rank in firsts]
    for _, after, (outcome, reason, warnings) in found[: target.world_size]:
        assert outcome == "committed", reason
        (warning,) = warnings
        said = re.search(r"had drifted apart by up to (\S+) of", warning)
        assert repr(name) in warning and said and float(said[1]) == pytest.approx(1e-6, rel=0.1)
        for kind, held in flat(after).items():
            assert set(held) <= {value for owner in owners for value in owner[kind]}


@pytest.mark.parametrize("case", daily("norms of tensor ranks"))
def test_large_drift_is_refused(pool: RankPool, case: str) -> None:
    found = pool.run(drifted, case=case, share=1e-3, failing=[])
    for before, after, (outcome, reason, _) in found:
        assert outcome == "rolled_back"
        assert re.search(f"{CASES[case][0]}.* differ by .*e-0[34] of its largest value, and 1.0e-05 is allowed", reason)
        assert before == after


@pytest.mark.full
def test_a_roll_back_gives_every_rank_its_own_values_back(pool: RankPool) -> None:
    found = pool.run(drifted, case="norms of tensor ranks", share=1e-6, failing=["bit flip"])
    for before, after, (outcome, _, _) in found:
        assert outcome == "rolled_back" and before == after
    assert found[0][0] != found[1][0]


def test_distances() -> None:
    own = torch.tensor([1.0, 2.0, 4.0])
    assert distance(own, own) == 0
    assert distance(own, own + torch.tensor([0.0, 0.0, 1.0])) == pytest.approx(0.2)
    assert distance(own, torch.tensor([1.0, float("nan"), 4.0])) == float("inf")
    assert distance(own, torch.zeros(3)) > 1e6


def test_low_precision_may_be_off_by_its_own_step() -> None:
    types = {"weight": torch.bfloat16, "master": torch.float32}
    said = judge(furthest({"weight": {"a": 0.004}}, {"weight": {"a": 0.001}, "master": {"a": 1e-7}}), 1e-5, types)
    assert said.startswith("replicas of the master of 'a', weight of 'a' had drifted apart by up to 4.0e-03")
    with pytest.raises(CertificateError, match=r"replicas of the master of 'a' .* 4.0e-03 .* 1.0e-05 is allowed"):
        judge({"master": {"a": 0.004}}, 1e-5, types)
