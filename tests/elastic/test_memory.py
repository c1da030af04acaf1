"""A node joins whose memory the whole state does not fit into."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.elastic.agents import Job, processes
from tests.elastic.runs import finish_together, variables, worker

LIMIT = 290
"""Megabytes. The state of the model has 378: weights, masters, moments and gradients; a third of it 126. What is
imported and started after the limit is set takes nearly as much."""
SMALL_STACKS = ("bash", "-c", 'ulimit -s 512; exec "$@"', "bash")
"""A thread's stack counts with its whole size, though little of it is ever used."""


@pytest.mark.full
def test_a_joiner_holds_its_shard_and_no_more(train: Callable[..., Job]) -> None:
    """Until it is in: the kernel would refuse more. The model is on the meta device, as everywhere in this job."""
    zero = {"stage": 3, "reduce_bucket_size": 1 << 19, "stage3_prefetch_bucket_size": 1 << 19}
    zero |= {"stage3_param_persistence_threshold": 1000, "stage3_max_live_parameters": 1 << 20}
    job = train(
        nodes="2:3",
        stage=3,
        own={"zero_optimization": zero, "gradient_clipping": 0.0},
        block={"memory_budget_bytes": 8 << 20},
        variables={"KIND": "meta", "MALLOC_ARENA_MAX": "2"},
        kind=Job,
    )
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    job.node("b", is_host=0)
    first = job.settled(2)
    with variables(job, LIMIT=str(LIMIT)):
        job.node("limited", is_host=0, host=SMALL_STACKS)
    joined = job.settled(3, first.generation)
    assert processes(joined)[:2] == processes(first)
    limited = worker(job, "limited")
    job.wait(lambda: [row for row in job.rows("step") if row["pid"] == limited], "its steps")
    finish_together(job)
