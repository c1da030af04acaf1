"""Loops that draw a global batch before its first pass, in worlds that cut it unevenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ds_dynatrain.errors import DataError, UnsupportedError
from tests.engine import exactly, jobs, oracle
from tests.engine.models import Sequences, small_gpt
from tests.engine.pipeline_walks import job as pipeline_job
from tests.engine.pipeline_walks import layout, settings
from tests.engine.pool import RankPool

SIZES = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
SCHEDULE = {2: (2, 3), 4: (4, 2)}
"""From 3 ranks, whose shares are 3, 3 and 2."""


def train(engine: Any, loader: Any, steps: int, each: Callable[[Any, Any], None] | None = None) -> None:
    """Whole global batches, drawn at once; a switch is asked for by SCHEDULE."""
    schedule = dict(SCHEDULE)
    while engine.idle or engine.global_steps < steps:
        for window in loader.windows():
            for one in window:
                with engine.micro_batch(one):
                    if each is not None:
                        each(engine, one)
                    else:
                        engine.backward(engine(*one.data))
                    engine.step()
            if engine.global_steps in schedule:
                jobs.ask(engine, schedule.pop(engine.global_steps))
            if engine.global_steps >= steps:
                break


def drawn_case(at_once: bool) -> oracle.State | None:
    with jobs.job(jobs.config(start=(3, 1), **SIZES), data=Sequences(20)) as job:
        if at_once:
            train(job.engine, job.loader, 6)
        else:
            jobs.train(job, 6, SCHEDULE)
        return oracle.gather(job.engine)
    return None


def test_it_is_what_a_loop_over_micro_batches_trains(pool: RankPool) -> None:
    """Bit for bit, across two switches, a short last batch and the end of an epoch."""
    one_by_one, at_once = (pool.run(drawn_case, at_once=each)[0] for each in (False, True))
    assert one_by_one.counters == at_once.counters and at_once.counters["global_samples"] == 40
    for key, tensor in one_by_one.tensors.items():
        assert torch.equal(tensor, at_once.tensors[key]), key


# ---- micro-batches that are left out -----------------------------------------------------------------------------


def left_out_case(how: str) -> tuple[str, str, int]:
    """The first micro-batch of the third global batch of two counts nothing, on all ranks alike; a switch follows."""
    said, asked, last = "", None, -1
    with jobs.job(jobs.config(start=(2, 1), **SIZES), data=Sequences(64)) as job:
        engine, passes = job.engine, 0
        try:
            for batch in job.loader:
                if passes in BAD[how]:
                    if how == "weight 0":
                        engine.backward(0 * engine(*batch))
                        engine.step()
                    passes += 1
                    continue
                passes += 1
                engine.backward(engine(*batch))
                engine.step()
                last = passes
                if asked is None and engine.global_steps == 2:
                    asked = engine.switch(zero_stage=2, at=3)
        except DataError as error:
            said = str(error)
        return said, "" if asked is None or asked.event is None else asked.event.outcome, last
    return said, "", last


BAD = {"one": (4,), "the last": (5,), "all": (4, 5), "weight 0": (4,)}
"""Passes by how they are left out."""


@pytest.mark.parametrize("how", BAD)
def test_a_micro_batch_that_is_left_out(pool: RankPool, how: str) -> None:
    """One of two is an error before the next global batch; both, or a loss of weight 0, leave the loop as it is."""
    for said, outcome, last in pool.run(left_out_case, how=how)[:2]:
        if how in ("one", "the last"):
            assert "before global batch 3 of epoch 0, 1 of 2 micro-batches" in said and "`continue`" in said
            assert last == (6 if how == "one" else 5), "nothing was dealt after it"
        else:
            assert (said, outcome, last) == ("", "committed", 16)


def left_out_of_a_window_case() -> None:
    with jobs.job(jobs.config(start=(2, 1), **SIZES), data=Sequences(32)) as job:
        passed = iter(job.loader.windows())
        next(passed)  # all of it is left out
        first = next(passed)[0]
        with job.engine.micro_batch(first):
            job.engine.backward(job.engine(*first.data))
            job.engine.step()
        with pytest.raises(DataError, match=r"before global batch 2 of epoch 0, 1 of 2 micro-batches"):
            next(passed)


def test_a_micro_batch_that_is_left_out_of_a_window(pool: RankPool) -> None:
    pool.run(left_out_of_a_window_case)


# ---- losses that are divided by the tokens of the world ----------------------------------------------------------


def ragged(one: Any) -> torch.Tensor:
    """Labels of which each sample has another number."""
    inputs, labels = one.data
    keep = torch.arange(labels.shape[1]) < (1 + inputs[:, :1] % labels.shape[1])
    return torch.where(keep, labels, -100)


def divided_case(data: int, is_divided: bool) -> oracle.State | None:
    """The sum of the losses over the tokens of all ranks, as Trainer has it; or the same by counts."""
    model = small_gpt()
    with jobs.job(jobs.config(start=(data, 1), **SIZES), model=model, data=Sequences(16)) as job:
        engine = job.engine
        for window in job.loader.windows():
            labels = [ragged(one).masked_fill(torch.tensor(one.is_borrowed), -100) for one in window]
            mine = torch.tensor([sum(int((each != -100).sum()) for each in labels)], device=engine.device)
            torch.distributed.all_reduce(mine)
            for one, wanted in zip(window, labels, strict=True):
                count, total = int((wanted != -100).sum()), int(mine) / engine.data
                with engine.micro_batch(one, is_divided=is_divided):
                    losses = token_losses(engine, one, wanted)
                    if is_divided:
                        engine.backward(losses / total, scale_wrt_gas=False)
                    else:
                        engine.backward(losses / max(count, 1), tokens=count)
                    engine.step()
        return oracle.gather(engine)
    return None


def token_losses(engine: Any, one: Any, wanted: torch.Tensor) -> torch.Tensor:
    """Their sum."""
    logits: list[torch.Tensor] = []
    head = engine.module.get_submodule("out")
    hook = head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    engine(*one.data)
    hook.remove()
    wanted = wanted.to(logits[0].device)
    return F.cross_entropy(logits[0].flatten(0, -2), wanted.flatten(), ignore_index=-100, reduction="sum")


def test_a_loss_that_is_divided_already(pool: RankPool) -> None:
    """8 samples on 3 ranks: the same gradient as on one rank, and as by counts."""
    alone = pool.run(divided_case, data=1, is_divided=True)[0]
    for data, is_divided in ((3, True), (3, False)):
        state = pool.run(divided_case, data=data, is_divided=is_divided)[0]
        for key, tensor in alone.tensors.items():
            torch.testing.assert_close(state.tensors[key], tensor, rtol=2e-4, atol=2e-6)


def refusals_case() -> None:
    with jobs.job(jobs.config(start=(2, 1), **SIZES), data=Sequences(32)) as job:
        engine, passed = job.engine, iter(job.loader.windows())
        first = next(passed)
        with pytest.raises(DataError, match=r"a list is not one of a loader's windows"), engine.micro_batch([1]):
            pass
        with pytest.raises(DataError, match=r"divided by the tokens.*leave one of the two out"):
            with engine.micro_batch(first[0], is_divided=True):
                engine.backward(engine(*first[0].data), tokens=3)
        for one in first:
            with engine.micro_batch(one):
                engine.backward(engine(*one.data))
                engine.step()
        jobs.ask(engine, (2, 3))
        next(passed)
        with pytest.raises(DataError, match=r"generation 1 dealt it, and this is generation 2"):
            with engine.micro_batch(first[0]):
                pass


def test_what_cannot_be(pool: RankPool) -> None:
    pool.run(refusals_case)


def exact_refusal_case() -> None:
    with jobs.job(exactly.settings((2, 2)), small_gpt()) as job:
        one = next(iter(job.loader.windows()))[0]
        with pytest.raises(UnsupportedError, match=r"exact jobs multiply each micro-batch's mean loss"):
            with job.engine.micro_batch(one, is_divided=True):
                pass


@exactly.NOT_ON_DEVICE
def test_an_exact_job_divides_by_leaves(pool: RankPool) -> None:
    pool.run(exact_refusal_case)


def exact_case(at_once: bool) -> oracle.State | None:
    torch.manual_seed(5)
    with jobs.job(exactly.settings((3, 1)), small_gpt(dropout=0.2)) as job:

        def each(engine: Any, one: Any) -> None:
            engine.backward(engine(*one.data))
            torch.rand(1)  # makes no difference to the next one

        if at_once:
            train(job.engine, job.loader, 6, each)
        else:
            jobs.train(job, 6, SCHEDULE)
        return oracle.gather(job.engine)
    return None


@pytest.mark.full
@exactly.NOT_ON_DEVICE
def test_an_exact_job_draws_for_the_leaf_that_is_trained(pool: RankPool) -> None:
    one_by_one, at_once = (pool.run(exact_case, at_once=each)[0] for each in (False, True))
    for key, tensor in one_by_one.tensors.items():
        assert torch.equal(tensor, at_once.tensors[key]), key


def pipeline_case() -> None:
    with pipeline_job(settings(layout(2, 2)), "tied") as job:
        with pytest.raises(UnsupportedError, match=r"train_batch draws the micro-batches"):
            job.engine.micro_batch(next(iter(job.loader.windows()))[0])


def test_a_pipeline_draws_for_itself(pool: RankPool) -> None:
    pool.run(pipeline_case)
