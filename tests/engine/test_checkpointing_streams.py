"""Activation checkpointing over switches, and the random streams that DeepSpeed's tracker keeps for it."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_dynatrain.reshard.switch import Transaction
from tests.engine import faults, jobs
from tests.engine.models import WORDS, Block
from tests.engine.pool import RankPool

STREAM = "blocks"
STEPS = 8
SCHEDULE: jobs.Schedule = {1: (4, 3), 2: (3, 1), 4: (4, 0), 5: (2, 3), 6: (4, 2)}
"""Indices 2 and 3 come, go and come again, and ranks change members."""


class Checkpointed(nn.Module):
    """Blocks with dropout, each run by `style`; `tracked`: they draw from the tracker's stream."""

    def __init__(self, style: str, tracked: bool, width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        self.style, self.tracked = style, tracked
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Block(width, hidden, dropout=0.3) for _ in range(2)])
        self.out = nn.Linear(width, WORDS)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.words(inputs)
        for block in self.blocks:
            hidden = self._run(block, hidden)
        return F.cross_entropy(self.out(hidden).flatten(0, 1), targets.flatten())

    def _run(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        def inside(hidden: torch.Tensor) -> Any:
            with get_cuda_rng_tracker().fork(STREAM) if self.tracked else nullcontext():
                return block(hidden)

        if self.style == "deepspeed":
            return deepspeed.checkpointing.checkpoint(inside, hidden)
        if self.style == "torch":
            return checkpoint(inside, hidden, use_reentrant=False)
        return inside(hidden)


def model(style: str, tracked: bool, **sizes: int) -> Checkpointed:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return Checkpointed(style, tracked, **sizes)


def state_of(engine: Any) -> tuple[int, str, str]:
    """(rank, the tracker's stream, torch's) as hashes."""
    states = get_cuda_rng_tracker().get_states()
    assert list(states) == [STREAM]
    return engine.rank, *(hashlib.sha256(held.numpy()).hexdigest() for held in (states[STREAM], torch.get_rng_state()))


def checkpointing_case(style: str, tracked: bool, options: dict[str, Any], **sizes: int) -> jobs.Record:
    """Train over the schedule; per step the streams before and after it."""
    record = jobs.Record(notes={"before": {}, "after": {}})
    get_cuda_rng_tracker().reset()
    settings = jobs.config(start=(2, 1), train_micro_batch_size_per_gpu=3, activation_checkpointing={"profile": False})
    try:
        deepspeed.checkpointing.configure(None, **options)
        made: jobs.Job
        with jobs.job(settings, model=model(style, tracked, **sizes), groups=False) as made:
            torch.manual_seed(made.engine.member)
            get_cuda_rng_tracker().add(STREAM, 70 + made.engine.member)
            forward = made.engine.module.forward

            def noting(*inputs: torch.Tensor) -> Any:
                record.notes["before"].setdefault(made.engine.global_steps, state_of(made.engine))
                return forward(*inputs)

            def each(made: jobs.Job) -> None:
                record.notes["after"][made.engine.global_steps] = state_of(made.engine)

            made.engine.module.forward = noting
            jobs.train(made, STEPS, SCHEDULE, record, each)
    finally:
        get_cuda_rng_tracker().reset()
        checkpointing._configure_defaults()
    return record


PROFILED = {"profile": True, "synchronize": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "partitioned": {"partition_activations": True, "checkpoint_in_cpu": True},
    "contiguous": {
        "partition_activations": True,
        "contiguous_checkpointing": True,
        "num_checkpoints": 2,
        "profile": True,
        "synchronize": True,
    },
}


@pytest.mark.full
@pytest.mark.parametrize("tracked", [True, False])
def test_streams_stay_with_their_place_on_the_data_axis(pool: RankPool, tracked: bool) -> None:
    """Recomputed or not, the same masks; every rank that lives on goes on with the stream it had."""
    plain = pool.run(checkpointing_case, style="none", tracked=tracked, options={}, seconds=120)
    found = pool.run(
        checkpointing_case, style="deepspeed", tracked=tracked, options=OPTIONS["partitioned"], seconds=120
    )
    for mine, other in zip(found, plain, strict=True):
        assert mine.losses == other.losses and mine.notes["after"] == other.notes["after"]
    sizes = [2, *(sizes for step in range(1, STEPS) for sizes in [SCHEDULE.get(step, (0, 0))[0]])]
    for step in range(1, STEPS):
        sizes[step] = sizes[step] or sizes[step - 1]
    assert sizes == [2, 4, 3, 3, 4, 2, 4, 4]
    members = []
    for step in range(1, STEPS):
        after = {held[0]: held[1:] for record in found for held in [record.notes["after"].get(step)] if held}
        before = {held[0]: held[1:] for record in found for held in [record.notes["before"].get(step)] if held}
        assert sorted(before) == list(range(sizes[step])) and sorted(after) == list(range(sizes[step - 1]))
        for rank in set(before) & set(after):
            assert before[rank] == after[rank], (step, rank)
        assert len({held[0] for held in before.values()}) == len({held[1] for held in before.values()}) == len(before)
        members.append([record.notes["before"][step][0] for record in found if step in record.notes["before"]])
    assert any(ranks != sorted(ranks) for ranks in members), (
        "no rank has changed its member: the case proves too little"
    )


@pytest.mark.full
@pytest.mark.parametrize(("style", "options"), [("torch", "plain"), ("deepspeed", "contiguous")])
def test_kinds_of_checkpointing_agree(pool: RankPool, style: str, options: str) -> None:
    """The blocks are above the size that builds without memory treat apart. Torch's own knows of no tracker."""
    tracked = style == "deepspeed"
    sizes = {"width": 64, "hidden": 260}
    plain = pool.run(checkpointing_case, style="none", tracked=tracked, options={}, seconds=120, **sizes)
    found = pool.run(checkpointing_case, style=style, tracked=tracked, options=OPTIONS[options], seconds=120, **sizes)
    for mine, other in zip(found, plain, strict=True):
        assert mine.losses == other.losses and mine.notes["after"] == other.notes["after"]


def fault_case() -> Any:
    """A tracked stream that is reset in the switch."""
    own = Transaction._carry

    def wrong(self: Transaction) -> None:
        own(self)
        if self.control.member == 1 and self.proposal.generation == 2:
            with get_cuda_rng_tracker().fork(STREAM):
                torch.rand(1)

    get_cuda_rng_tracker().reset()
    record = jobs.Record(notes={"events": []})
    settings = jobs.config(start=(2, 3), train_micro_batch_size_per_gpu=6)
    with (
        jobs.job(settings, model=model("none", True), groups=False) as made,
        patch.object(Transaction, "_carry", wrong),
    ):
        get_cuda_rng_tracker().add(STREAM, 70 + made.engine.member)
        before: list[Any] = []

        def each(made: jobs.Job) -> None:
            before.append(state_of(made.engine))
            record.notes["events"].append(made.engine.last_switch)

        forward = made.engine.module.forward

        def noting(*inputs: torch.Tensor) -> Any:
            assert not before or state_of(made.engine) == before[-1]
            return forward(*inputs)

        made.engine.module.forward = noting
        faults.train(made, 4, {1: (4, 1), 2: (4, 1)}, record, each)
    get_cuda_rng_tracker().reset()
    return record


def test_a_wrong_tracked_stream_is_found_and_rolled_back(pool: RankPool) -> None:
    record = pool.run(fault_case)[0]
    outcomes = [event and event.outcome for event in record.notes["events"]]
    assert outcomes == [None, "rolled_back", "committed", "committed"]
    assert "random streams of rank 1" in record.notes["events"][1].reason
