"""Pipelines side by side that run different numbers of micro-batches: the losses of those that run as many."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from ds_dynatrain.errors import ConfigError, DataError, SwitchRefused
from ds_dynatrain.space import Layout
from tests.engine import jobs, pipelined_experts
from tests.engine.models import WORDS, Sequences
from tests.engine.pipeline_walks import STEPS, Path, job, layout, settings, walk, whole
from tests.engine.pipelines import WIDTH, Counted, Words, loss, pipeline
from tests.engine.pool import RankPool

FIVE: dict[str, Any] = {"train_batch_size": 15, "dataloader_drop_last": True}
"""Samples in micro-batches of 3."""
OFFLOAD: dict[str, Any] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def shared(pipe: int, shares: tuple[int, ...], stage: int = 1) -> Layout:
    """Pipelines with so many samples each."""
    return layout(pipe, len(shares), stage).replace(shares=shares)


WALKS: dict[str, tuple[str, str, dict[str, Any], Path]] = {
    "shares": ("tied", "fp32", {}, [layout(2, 2), shared(2, (3, 9)), shared(2, (9, 3), 0), layout(4, 1)]),
    "five micro-batches": ("inner tie", "fp32", FIVE, [layout(2, 2), layout(1, 4), layout(4, 1), layout(2, 2, 0)]),
    "bf16": ("tied", "bf16", FIVE, [layout(1, 2), layout(2, 2), shared(2, (3, 12)), layout(1, 4, 0), layout(2, 2)]),
    "bf16 in fp32": ("tied", "bf16 in fp32", FIVE, [layout(2, 2), shared(2, (3, 12)), layout(1, 4), layout(2, 1)]),
    "one more each": ("uneven", "fp32", {}, [shared(1, (2, 2, 4, 4)), shared(2, (8, 4)), layout(2, 1), layout(2, 2)]),
    "fp16": ("inner tie", "fp16", FIVE, [layout(2, 2), shared(2, (3, 12)), layout(1, 4), layout(4, 1)]),
    "offload": ("inner tie", "fp32", {**FIVE, **OFFLOAD}, [layout(2, 2), shared(2, (3, 12)), layout(1, 4)]),
}
FULL = ("five micro-batches", "bf16", "bf16 in fp32", "one more each", "fp16", "offload")


@pytest.mark.parametrize(
    "title", [pytest.param(each, marks=pytest.mark.full) if each in FULL else each for each in WALKS]
)
def test_walks(pool: RankPool, title: str) -> None:
    name, dtype, more, path = WALKS[title]
    found = pool.run(walk, path=path, name=name, dtype=dtype, more=more, seconds=120)
    static = pool.run(walk, path=[layout(1, 1)], name=name, dtype=dtype, more=more, steps=STEPS * len(path))
    bound = {"fp32": 1e-6 if title == "offload" else 5e-7}.get(dtype, 2e-3)
    assert jobs.furthest(whole(found), whole(static)) < bound
    pairs = {number: pair for rank in found if rank for number, pair in rank.sent.items()}
    assert set(pairs) == set(range(1, len(path)))
    if title == "shares":
        assert pairs[1] == (0, 0), "of shares alone nothing moves"


def trained(path: Path, name: str, frozen: int = 0) -> list[float]:
    """frozen: layers at the front that are not trained."""
    losses: list[float] = []
    # copies of one expert leave a router of two no gradient but rounding, of which Adam makes whole steps
    model = pipelined_experts.model() if name == "routed" else pipeline(name)
    for number in range(frozen):
        for held in model._modules[str(number)].parameters() if str(number) in model._modules else ():
            held.requires_grad = False
    with jobs.job(settings(path[0], **FIVE), model, groups=False) as made:
        engine = made.engine
        for number, target in enumerate(path):
            if number:
                engine.switch(target, at=engine.global_steps)
            losses += [engine.train_batch().item() for _ in range(STEPS)]
            assert engine.layout == target
    return losses


@pytest.mark.full
@pytest.mark.parametrize(("name", "frozen"), [("routed", 0), ("uneven", 4)])
def test_other_layers(pool: RankPool, name: str, frozen: int) -> None:
    """Experts that each rank has all of, which see the tokens of their own pipeline alone; a first stage without
    anything to train."""
    path = [layout(2, 2), shared(2, (3, 12)), layout(1, 4), layout(4, 1)]
    found = pool.run(trained, path=path, name=name, frozen=frozen)
    assert found[0] == found[3]
    static = pool.run(trained, path=[layout(4, 1)] * 4, name=name, frozen=frozen)
    assert jobs.furthest(found[0], static[0]) < 1e-6


def saved(folder: str, first: Layout, second: Layout) -> list[float]:
    """Two steps and a checkpoint in one layout, two more in another one, of a new job."""
    losses: list[float] = []
    with job(settings(first, **FIVE), "tied") as made:
        losses += [made.engine.train_batch().item() for _ in range(2)]
        made.engine.save(folder)
    with job(settings(second, **FIVE), "tied") as made:
        made.engine.load(folder)
        losses += [made.engine.train_batch().item() for _ in range(2)]
    return losses


@pytest.mark.full
def test_checkpoints(pool: RankPool, tmp_path: pathlib.Path) -> None:
    one = pool.run(saved, folder=str(tmp_path / "one"), first=layout(2, 2), second=shared(2, (3, 12)))
    other = pool.run(saved, folder=str(tmp_path / "other"), first=shared(1, (6, 3, 3, 3)), second=layout(2, 2))
    static = pool.run(walk, path=[layout(1, 1)], name="tied", more=FIVE, steps=4)
    for found in (one, other):
        assert found[0] == found[3] and jobs.furthest(found[0], whole(static)) < 5e-7


# ---- who runs what --------------------------------------------------------------------------------------------------

Read = dict[int, list[list[int]]]
"""Step -> the micro-batches that a rank read, by the numbers of their samples."""


class Numbered(Sequences):
    """Samples that begin with their number."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = super().__getitem__(index)
        return inputs.clone().index_fill_(0, torch.tensor([0]), index), targets


def reading(path: Mapping[int, Layout], steps: int, **more: Any) -> tuple[Read, list[float], list[tuple[float, int]]]:
    """What a rank reads of each step; what evaluations return, of a step's micro-batches and of two each; and the mean
    of its column beside the number of passes that seeds count."""
    read: Read = {}
    evaluated: list[float] = []
    means: list[tuple[float, int]] = []
    with job(settings(path[0], **more), "tied", data=Numbered(12)) as made:
        engine = made.engine

        def note(batch: Any) -> Any:
            if engine.module.training:
                read.setdefault(engine.global_steps, []).append(batch[0][:, 0].tolist())
            return batch

        engine.set_batch_fn(note)
        for step in range(steps):
            if step in path and step:
                engine.switch(path[step], at=step)
            engine.train_batch()
            means.append((engine.dp_group_loss.item(), engine.module.micro_offset))
            slots = engine.batch.deal(engine.global_batch_size).rank(engine.data_rank)
            assert engine.micro_batches == len(slots) == len(read.get(step, slots))
            samples = [[made.loader.dataset[at] for at in slot.positions] for slot in slots]
            own = iter([torch.utils.data.default_collate(each) for each in samples])
            evaluated.append(engine.eval_batch(own).item())
            loader = engine.loader(Numbered(12), evaluation=True, batch_size=3)
            evaluated.append(engine.eval_batch(iter(loader), num_micro_batches=2).item())
    return read, evaluated, means


def of_step(ranks: Sequence[Any], step: int) -> list[list[list[int]]]:
    """What the ranks have read that read anything, in the order of ranks."""
    return [read[step] for read, *_ in ranks if step in read]


@pytest.mark.full
def test_each_pipeline_runs_its_own_micro_batches(pool: RankPool) -> None:
    path = {0: layout(2, 2), 1: shared(2, (3, 9)), 2: layout(2, 2)}
    found = pool.run(reading, path=path, steps=3)
    first, short, last = (of_step(found, step) for step in range(3))
    assert [len(each) for each in short] == [1, 3, 1, 3], "both the first stage and the last one read"
    assert [len(each) for each in first] == [len(each) for each in last] == [2, 2, 2, 2]
    for step in range(3):
        mine = of_step(found, step)
        assert mine[:2] == mine[2:], "the stages of a pipeline read the same"
        numbers = sorted(number for column in mine[:2] for each in column for number in each)
        assert numbers == list(range(12)), "no sample is read twice"
    static = pool.run(reading, path={0: layout(2, 2)}, steps=3)
    assert jobs.furthest(found[0][1], static[0][1]) < 5e-7, "evaluations are means over the same samples"
    columns = [found[rank][2][1] for rank in range(4)]
    assert columns[0][0] == columns[2][0] != columns[1][0] == columns[3][0], "the mean of a column is its own"
    assert {passes for _, passes in columns} == {2 + 2 + 2 + 3}, "and passes are counted alike on all"


# ---- what is refused ------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A BatchNorm over words."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return normed


def with_norm() -> PipelineModule:
    """In the last of two stages."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        layers = [LayerSpec(Words, WIDTH), LayerSpec(Counted), LayerSpec(Normed), LayerSpec(nn.Linear, WIDTH, WORDS)]
        return PipelineModule(layers, num_stages=1, loss_fn=loss, partition_method="uniform")


def dropping() -> PipelineModule:
    """Experts of which the first layer drops tokens."""
    module = pipeline("routed")
    next(part for part in module.modules() if hasattr(part, "drop_tokens")).drop_tokens = True
    return module


MODELS = {"norm": with_norm, "dropping": dropping, "routed": lambda: pipeline("routed")}
REFUSED = [
    ("norm", shared(2, (3, 9)), r"shares \(3, 9\) gives pipelines of 1, 3 micro-batches, and '2.norm' is a BatchNorm"),
    ("norm", shared(2, (8, 4)), r"gives pipelines of 4, 2 micro-batches, and '2.norm' is a BatchNorm"),
    ("dropping", shared(2, (3, 9)), r"gives pipelines of 1, 3 micro-batches, and experts of '1.feed' drop tokens"),
    ("routed", shared(2, (3, 9)).replace(expert=2), "ranks that share experts exchange tokens in each of them"),
    ("routed", shared(2, (3, 8)), "are 11 samples over 2 ranks"),
]


def refused(rows: Sequence[tuple[str, Layout, str]], name: str) -> int:
    """The steps that are made after all refusals."""
    for _, target, words in rows:
        with pytest.raises(ConfigError, match=words), jobs.job(settings(target), MODELS[name](), groups=False):
            pass
    with jobs.job(settings(layout(2, 2)), MODELS[name](), groups=False) as made:
        for _, target, words in rows:
            with pytest.raises(SwitchRefused, match=words):
                made.engine.switch(target)
            assert made.engine.plan(target).refusal
        made.engine.train_batch()
        return int(made.engine.global_steps)


@pytest.mark.parametrize("name", ["norm", pytest.param("dropping", marks=pytest.mark.full), "routed"])
def test_what_cannot_be_is_refused(pool: RankPool, name: str) -> None:
    rows = [row for row in REFUSED if row[0] == name]
    assert pool.run(refused, rows=rows, name=name, seconds=120) == [1] * 4


def of_ones_own() -> int:
    """An iterator that was given for other shares."""
    with job(settings(layout(2, 2)), "tied") as made:
        engine = made.engine
        batch = torch.utils.data.default_collate([made.loader.dataset[at] for at in range(3)])
        engine.set_dataiterator(iter([batch] * 2))
        engine.train_batch()
        engine.switch(shares=(3, 9), at=1)
        with pytest.raises(DataError, match=r"given for .* pipe=2 data=2, and now it is .* data=2 shares=3,9"):
            engine.train_batch()
        engine.set_dataiterator(iter([batch] * engine.micro_batches))
        engine.train_batch()
        return int(engine.global_steps)


def test_an_iterator_for_other_shares_is_refused(pool: RankPool) -> None:
    assert pool.run(of_ones_own) == [2] * 4


def told() -> list[str]:
    """What is warned of a prime number of samples: at the start, and after changes that leave it as it is."""
    said: list[str] = []
    logger, handler = logging.getLogger("ds_dynatrain"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with job(settings(layout(2, 2), train_batch_size=7, dataloader_drop_last=True), "tied") as made:
            made.engine.train_batch()
            for target in (layout(4, 1), layout(2, 2)):
                made.engine.switch(target, at=made.engine.global_steps)
                made.engine.train_batch()
    finally:
        logger.removeHandler(handler)
    return said


@pytest.mark.full
def test_a_prime_number_of_samples_is_told_of_once(pool: RankPool) -> None:
    ranks = [[each for each in said if "micro-batches of 1 sample" in each] for said in pool.run(told)]
    assert [len(said) for said in ranks] == [1, 0, 0, 0]
    assert "divides train_batch_size (7)" in ranks[0][0] and "6 or 9" in ranks[0][0]
