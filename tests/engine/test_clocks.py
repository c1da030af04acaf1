"""Members that wait run at lower clocks, which all members choose alike."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from ds_dynatrain.clocks.clock_search import waiting
from tests.engine import jobs
from tests.engine.burning import burning
from tests.engine.clocks import clock
from tests.engine.pipeline_walks import layout, settings
from tests.engine.pool import RankPool
from tools import burning as burns
from tools.burning import Points
from tools.throttle import Throttle

SECONDS = (0.004, 0.004, 0.001, 0.001)
UNEVEN, EVEN = layout(2, 2, 1, (0, 2, 4)), layout(2, 2, 1, (0, 1, 4))
FOUND = (2000, 2000, 500, 500)
"""0.2 + 0.8 / share is at most 4, the ratio of the two stages, from 0.21 on: 500 is the next clock."""


def clocked(actuator: str) -> dict[str, Any]:
    given = settings(UNEVEN, train_batch_size=12)
    blocks = {"balance": {"every_steps": 4}, "clocks": {"actuator": actuator}}
    return {**given, "dynatrain": {**given["dynatrain"], **blocks}}


def clocks_of(search: Any) -> tuple[int, ...]:
    """The clock of each rank."""
    return tuple(search.clocks[place] for place in search.places)


def waiting_members(actuator: str) -> dict[str, Any]:
    """Search in one layout, give clocks back at a switch, and search in the next one."""
    slowed = patch.object(burns, "longer", Throttle.longer)
    with clock(True), slowed, jobs.job(clocked(actuator), burning(SECONDS), data=Points(), groups=False) as made:
        engine, found = made.engine, list[Any]()
        extension, losses = engine._parts.extension("clocks"), list[float]()
        waits = list[float]()
        while extension.search is None or not extension.search.is_over:
            losses.append(engine.train_batch().item())
            if engine.balancer.busy is not None:
                waits.append(waiting(engine.balancer.busy.seconds))
        found.append((engine.global_steps, clocks_of(extension.search), Throttle.share))
        for _ in range(4):
            losses.append(engine.train_batch().item())
        waits.append(waiting(engine.balancer.busy.seconds))
        engine.switch(EVEN, at=engine.global_steps)
        losses.append(engine.train_batch().item())
        found.append((extension.search, Throttle.share))
        while extension.search is None or not extension.search.is_over:
            losses.append(engine.train_batch().item())
        found.append(clocks_of(extension.search))
        watcher = extension._watcher
    return {"found": found, "losses": losses, "waits": waits, "end": (Throttle.share, watcher and watcher.returncode)}


@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
def test_members_that_wait_run_at_lower_clocks(pool: RankPool) -> None:
    ranks = pool.run(waiting_members, actuator="tools.throttle:Throttle", seconds=120)
    for number, rank in enumerate(ranks):
        (steps, clocks, share), (none, again), last = rank["found"]
        assert clocks == FOUND and share == FOUND[number] / 2000
        assert steps <= 22  # seven windows, each three steps after the one before
        assert none is None and again == 1.0
        assert last[2:] == (2000, 2000) and max(last[:2]) < 2000
        assert rank["end"] == (1.0, -9)
        assert rank["waits"][0] > 0.3 and rank["waits"][-1] < 0.2 * rank["waits"][0]
    dry = pool.run(waiting_members, actuator="dry", seconds=120)
    assert [rank["losses"][:10] for rank in dry] == [rank["losses"][:10] for rank in ranks]
    for rank in dry:
        (_, clocks, share), *_ = rank["found"]
        assert clocks in ((100, 100, 25, 25), (100, 100, 26, 26))
        assert share == 1.0 and rank["end"] == (1.0, None)
