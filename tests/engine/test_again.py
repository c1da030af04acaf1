"""A module that an engine has trained, given to `initialize` once more."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

import ds_dynatrain
from ds_dynatrain.adapters.deepspeed.host_engine import HostEngine
from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, jobs, oracle
from tests.engine.models import SmallGPT, named_groups, small_gpt
from tests.engine.pool import RankPool
from tests.engine.subjects import language_model


def weights(engine: object) -> dict[str, torch.Tensor]:
    return {name: held for (name, kind), held in oracle.gather(engine).tensors.items() if kind == "weight"}


def trained(model: SmallGPT, start: jobs.Sizes, schedule: jobs.Schedule) -> tuple[dict[str, torch.Tensor], ...]:
    """The weights that an engine begins with, and those after three steps; none on a member that is idle then."""
    found = []
    with jobs.job(jobs.config(start=start), model, model_parameters=named_groups(model)) as made:
        if not made.engine.idle:
            found.append(weights(made.engine))
        jobs.train(made, 3, schedule)
        found.append(weights(made.engine))
    return tuple(found)


def trained_twice(first: jobs.Sizes, schedule: jobs.Schedule, second: jobs.Sizes) -> list[str]:
    """Which weights the second engine does not begin with as the first one has left them."""
    model = small_gpt()
    before, after = trained(model, first, schedule)[-1], trained(model, second, {})[0]
    return [name for name, held in before.items() if not torch.equal(held, after[name])]


FULL = pytest.mark.full
TWICE = [
    pytest.param((1, 1), {1: (4, 3)}, (4, 2), id="others' ranks"),
    pytest.param((4, 3), {}, (4, 3), id="stage 3 again", marks=FULL),
    pytest.param((4, 3), {1: (4, 1)}, (4, 3), id="from whole ones", marks=FULL),
]


@pytest.mark.parametrize(("first", "schedule", "second"), TWICE)
def test_it_goes_on_from_its_weights(
    pool: RankPool, first: jobs.Sizes, schedule: jobs.Schedule, second: jobs.Sizes
) -> None:
    """Also after stage 3, which leaves each process a part, as in plain DeepSpeed."""
    assert pool.run(trained_twice, first=first, schedule=schedule, second=second) == [[]] * 4


def cut_over_fewer() -> str:
    """What is said of parts of each of which two processes have a copy."""
    subject = language_model("llama of 4 kv")
    with axis_walks.started(subject, "fp32", Layout(data=2, tensor=2, zero_stage=3)) as made:
        subject.step(made.engine, next(iter(made.loader)))
        model = made.engine.module
    with pytest.raises(UnsupportedError) as caught:
        trained(model, (4, 1), {})
    return str(caught.value)


def test_parts_over_fewer_ranks_are_refused(pool: RankPool) -> None:
    for said in pool.run(cut_over_fewer):
        assert "is cut over 2 of the 4 processes" in said and "before engine.destroy()" in said


def ended_while_another_is_made() -> int:
    """Steps of an engine, in whose making another one ends: as one that a script has dropped, once it is collected."""
    settings = jobs.config(start=(4, 1))
    dropped = ds_dynatrain.initialize(model=small_gpt(), config=settings)[0]
    configure = HostEngine._configure_distributed_model

    def ends(engine: HostEngine, model: torch.nn.Module) -> None:
        dropped.destroy()
        configure(engine, model)

    with patch.object(HostEngine, "_configure_distributed_model", ends), jobs.job(settings) as made:
        jobs.train(made, 2)
        return int(made.engine.global_steps)


def test_an_engine_that_ends_leaves_the_next_one_its_groups(pool: RankPool) -> None:
    assert pool.run(ended_while_another_is_made) == [2] * 4
