"""Each rule against arithmetic by hand: four members, a step of 1 s with all of them and of 4/3 s with three."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.plan import LinkClass, Topology
from ds_dynatrain.simulate.outcome import PolicyOutcome, SimulationOutcome
from ds_dynatrain.simulate.player import TIMES, play
from ds_dynatrain.simulate.simulated_job import Assumptions, SimulatedJob
from ds_dynatrain.simulate.trace import Distributions, TraceRow, draw
from ds_dynatrain.space.kind import WEIGHT
from tests.balance.profiles import profile

ASSUMED = {"start_seconds": 10, "detection_seconds": 0.5, "change_seconds": 1.5, "regroup_seconds": 2.5}
ASSUMED |= {"save_every_seconds": 100, "storage_bytes_per_second": 280, "slow_seconds": 20}
"""A checkpoint of the 1,400 bytes takes 5 s."""
BUDDIES, CHECKPOINTS, TORCHFT, RECYCLE, DEEPSPEED = range(5)
FAST = LinkClass(1e15)
END = {"seconds": 1000, "event": "end"}


def job(tmp_path: Path, layout: str | None = None, layers: int = 1, nodes: int = 4, **more: Any) -> SimulatedJob:
    """A job of 12 samples a step, each of which takes 1/3 s, on nodes of one member."""
    measured, cluster = tmp_path / "profile.json", tmp_path / "cluster.toml"
    profile([1 / 9 / layers] * layers, batch=12).save(measured)
    cluster.write_text(Topology.uniform(nodes, 1, node=FAST, network=more.pop("network", FAST)).to_toml())
    given = {"least": 1, "most": None, **more}
    return SimulatedJob.read(measured, cluster, layout, Assumptions.model_validate(ASSUMED), **given)


def played(of: SimulatedJob, *rows: dict[str, Any]) -> list[PolicyOutcome]:
    return whole(of, [TraceRow.model_validate(row) for row in (*rows, END)]).policies


def whole(of: SimulatedJob, rows: Sequence[TraceRow]) -> SimulationOutcome:
    """Play rows, and see that no second is lost or counted twice."""
    found = play(of, rows)
    for each in found.policies:
        times = [getattr(each, name) for name in TIMES]
        assert sum(times) == pytest.approx(found.seconds, abs=1e-6) and min(times) > -1e-6, each.policy
    return found


def loss(*members: int, at: float = 250.25, **more: Any) -> dict[str, Any]:
    return {"seconds": at, "event": "loss", "members": members, **more}


def test_without_events_all_time_counts(tmp_path: Path) -> None:
    for each in played(job(tmp_path))[:-1]:
        assert (each.goodput, each.ettr, each.steps, each.changes) == pytest.approx((1, 1, 1000, 0))
    stock = played(job(tmp_path))[DEEPSPEED]
    assert (stock.paused, stock.goodput) == pytest.approx((9 * 5, 0.955))  # checkpoints at 100, 200, ..., 900 s


def test_a_loss(tmp_path: Path) -> None:
    found = played(job(tmp_path), loss(3))
    assert [each.steps for each in found] == pytest.approx(
        [
            250 + (1000 - 252.25) * 3 / 4,  # the open step; noticed after 0.5 s, changed in 1.5 s
            200 + (1000 - 257.25) * 3 / 4,  # the checkpoint of 200 s, read in 5 s
            250 + (1000 - 253.25) * 3 / 4,  # 0.5 s and 2.5 s; three parts of four of the batch
            250 + (1000 - 253.25) * 3 / 4,
            195 + (1000 - 265.75 - 7 * 5) * 3 / 4,  # 0.5 s, 10 s to start, 5 s to read; training waits for saves
        ],
        abs=1e-3,
    )
    assert [each.lost for each in found] == pytest.approx([0.25, 50.25, 0.25, 0.25, 45.25], abs=1e-6)
    assert [each.changes for each in found] == [1] * 5
    assert found[BUDDIES].member_hours * 3600 == pytest.approx(4 * 250.25 + 3 * 749.75)
    assert played(job(tmp_path), loss(3, noticed_seconds=30))[BUDDIES].paused == pytest.approx(31.5, abs=1e-6)


def test_copies_that_are_not_complete_lose_their_step(tmp_path: Path) -> None:
    slow = job(tmp_path, network=LinkClass(1e3))
    step, copy = slow.reference_seconds, slow.copy_seconds(slow.layout)
    assert copy == pytest.approx(0.3)  # 1,200 bytes of masters and moments, on four ranks
    for into, lost in ((copy - 0.1, 1), (copy + 0.1, 0)):
        found = played(slow, loss(3, at=100 * step + into))[BUDDIES]
        assert found.lost == pytest.approx(lost * step + into)


def test_a_member_and_its_buddy(tmp_path: Path) -> None:
    """Nodes of equal size are pairs: 2 and 3 keep each other's copies, 1 and 2 do not."""
    assert played(job(tmp_path), loss(2, 3))[BUDDIES].lost == pytest.approx(50.25)
    assert played(job(tmp_path), loss(1, 2))[BUDDIES].lost == pytest.approx(0.25)
    assert played(job(tmp_path), loss(2), loss(3, at=251))[BUDDIES].lost == pytest.approx(50.25)  # in the pause
    assert played(job(tmp_path), loss(2), loss(3, at=260.25))[BUDDIES].lost < 2


def test_a_preemption(tmp_path: Path) -> None:
    notice = {"seconds": 250.25, "event": "preemption", "members": [3]}
    found = played(job(tmp_path), notice)
    assert [each.lost for each in found] == pytest.approx([0, 0, 0.25, 0.25, 45.25], abs=1e-6)
    assert found[BUDDIES].paused == pytest.approx(1.5, abs=1e-6)
    assert played(job(tmp_path), {**notice, "notice_seconds": 1})[BUDDIES].lost == pytest.approx(0.25)


def test_all_leave_and_come_back(tmp_path: Path) -> None:
    gone, back = ({"seconds": at, "event": event, "members": range(4)} for at, event in GONE_AND_BACK)
    found = played(job(tmp_path), gone, back)
    assert found[BUDDIES].lost == 0 and found[CHECKPOINTS].lost == 0  # they save when they have notice
    assert found[TORCHFT].lost == pytest.approx(50.25)
    live = found[BUDDIES]
    assert (live.waiting, live.starting) == pytest.approx((49.75, 10 + 1.5 + 5))
    assert live.ettr == pytest.approx((950.25 - 16.5) / 950.25) and live.ettr_without_starts == pytest.approx(1)


GONE_AND_BACK = ((250.25, "preemption"), (300, "join"))


def test_a_slow_member(tmp_path: Path) -> None:
    found = played(job(tmp_path), {"seconds": 100, "event": "slow", "members": [3], "speed": 0.5})
    assert found[BUDDIES].steps == pytest.approx(100 + 20 / 2 + (1000 - 121.5) * 3 / 4, abs=1e-3)
    assert [each.steps for each in found[TORCHFT:DEEPSPEED]] == pytest.approx([100 + 900 / 2] * 2)


def test_a_spare_takes_the_place(tmp_path: Path) -> None:
    found = played(job(tmp_path, nodes=5, most=4), loss(3))
    assert [each.steps for each in found[:DEEPSPEED]] == pytest.approx([997.75, 942.75, 996.75, 996.75], abs=1e-3)


def test_a_member_joins(tmp_path: Path) -> None:
    """Others train while it starts; only stock torchrun starts all processes anew, and loses steps."""
    found = played(job(tmp_path), {"seconds": 250.25, "event": "join", "members": [3]})
    before, after = 260.25 * 3 / 4, 1000 - 260.25
    assert found[BUDDIES].steps == pytest.approx(before + after - 1.5, abs=1e-3)
    assert found[TORCHFT].steps == pytest.approx(before + after - 2.5, abs=1e-3)
    assert [each.lost for each in found] == pytest.approx([0, 0, 0, 0, 45.25])


def test_a_loss_that_nobody_has_noticed_holds_up_other_changes(tmp_path: Path) -> None:
    leaves = {"seconds": 255, "event": "preemption", "members": [2]}
    found = played(job(tmp_path), loss(3, noticed_seconds=30), leaves)[BUDDIES]
    assert (found.paused, found.lost) == pytest.approx((31.5, 0.25), abs=1e-6)


def test_a_member_that_joins_displaces_nobody(tmp_path: Path) -> None:
    found = played(job(tmp_path, nodes=5, most=4), {"seconds": 250.25, "event": "join", "members": [0]})
    assert [(each.changes, each.lost) for each in found] == [(0, 0)] * 5


def test_too_few_members_wait(tmp_path: Path) -> None:
    found = played(job(tmp_path, least=4), loss(3), {"seconds": 300, "event": "join", "members": [3]})
    assert found[BUDDIES].waiting == pytest.approx(310 - 250.25)
    assert found[BUDDIES].lost == pytest.approx(0.25)


def test_pipelines(tmp_path: Path) -> None:
    """Two stages of two: a lost member costs torchft a pipeline, and ReCycle's peer takes its micro-batches."""
    shaped = job(tmp_path, "pipe=2,data=2", layers=12)
    found = played(shaped, loss(3, at=500), loss(0, at=510))
    whole_step = shaped.step(shaped.layout, None).seconds
    assert shaped.layout.boundaries == (0, 6, 12)
    assert found[TORCHFT].paused == pytest.approx(3 + 10.5 + shaped.storage_seconds)  # (0, 1) and (2, 3) have lost one
    assert found[TORCHFT].lost == pytest.approx(100 + 510 - 503)  # the checkpoint of 400 s
    rest = found[RECYCLE].useful - 500
    assert found[RECYCLE].steps * whole_step == pytest.approx(500 + rest * whole_step / 2, rel=0.02)
    assert found[BUDDIES].steps > found[RECYCLE].steps


def test_a_stage_without_members_starts_from_a_checkpoint(tmp_path: Path) -> None:
    shaped = job(tmp_path, "pipe=2,data=2", layers=2)
    found = played(shaped, loss(0, 2))[RECYCLE]
    assert found.lost == pytest.approx(50.25) and found.paused == pytest.approx(10.5 + shaped.storage_seconds)


def test_goodput_falls_with_more_losses(tmp_path: Path) -> None:
    of, before = job(tmp_path), [2.0] * 5
    for count in range(5):
        rows = [
            row
            for number in range(count)
            for row in (
                loss(number % 4, at=150.3 + 200 * number),
                {"seconds": 200.0 + 200 * number, "event": "join", "members": [number % 4]},
            )
        ]
        now = [each.goodput for each in played(of, *rows)]
        assert all(after < was for after, was in zip(now, before, strict=True))
        before = now


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", [None, "pipe=2,data=3"])
def test_drawn_traces(tmp_path: Path, seed: int, layout: str | None) -> None:
    """Time is conserved, shares are shares, and equal arguments give equal results."""
    of = job(tmp_path, layout, layers=3, nodes=6)
    said = Distributions(hours=0.5, loss=120, preemption=200, back=90, notice=seed, slow=300, slow_for=200, speed=0.6)
    rows = tuple(draw(said, of.topology, seed))
    found = whole(of, rows)
    assert found == whole(of, tuple(draw(said, of.topology, seed)))
    assert rows != tuple(draw(said, of.topology, seed + 1))
    assert found.events["loss"] == pytest.approx(15, abs=10)
    for each in found.policies:
        assert 0 <= each.goodput <= 1 + 1e-9 and each.ettr <= each.ettr_without_starts <= 1 + 1e-9
        assert each.steps >= 0 and all(steps >= -1e-6 for _, steps in each.course)


def test_a_cluster_with_little_memory_waits_rather_than_exceeds_it(tmp_path: Path) -> None:
    of = job(tmp_path)
    assert int(of.profile.kind_bytes(WEIGHT).sum()) == 200
    small = Topology.uniform(4, 1, node=FAST, network=FAST, device_memory_bytes=1)
    assert (
        SimulatedJob(of.profile, small, of.layout, of.assumed, 1, 4).best(range(4), dict.fromkeys(range(4), 1.0))
        is None
    )
