"""Models of `deepspeed.zero.Init` where members come and go: cut over those that start, without memory on who joins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import ROOT, Job, Row, processes
from tests.elastic.cut_models import MEGABYTE, digests, layers, save_pretrained
from tests.elastic.runs import finish, on_device

SCRIPT = ROOT / "tests" / "elastic" / "cutting.py"
BF16 = {"bf16": {"enabled": True}}
LARGEST, SLACK = 4 * MEGABYTE, 3 * MEGABYTE
"""Of a parameter, and for whatever else is done meanwhile."""


def cut(job: Job) -> tuple[list[Row], list[Row]]:
    """What those said that started the job, and those that joined it."""
    rows = job.rows("cut")
    return [row for row in rows if not row["joins"]], [row for row in rows if row["joins"]]


def check_peak(row: Row, most: float) -> None:
    """In bytes; not with `--on-device`, whose memory is given back when its queue comes to that."""
    assert on_device.get() or row["peak"] < most


def check_joined(rows: list[Row], buffers: Any, cast: int = 0) -> None:
    """They had no memory for parameters, and have the buffers of the others.

    cast: bytes of the one parameter that DeepSpeed has in the configuration's type before it goes to the meta device.
    """
    for row in rows:
        assert row["meta"] and row["buffers"] == buffers, row
        check_peak(row, cast + SLACK)


def run(train: Callable[..., Job], how: str, workers: int, own: dict[str, Any]) -> Job:
    """A node, or two of one worker each, start a job; another one joins it in the middle."""
    first = ("a", "b") if workers == 1 else ("a",)
    job = train(nodes=f"{len(first)}:4", workers=workers, stage=3, own=own, script=SCRIPT, variables={"HOW": how})
    job.coordinator("coordinator")
    for node in first:
        job.node(node, is_host=0)
    began = job.settled(len(first) * workers)
    job.node("later", is_host=0)
    joined = job.settled((len(first) + 1) * workers, began.generation)
    assert processes(joined)[: len(first) * workers] == processes(began)
    finish(job, *first, "later", "coordinator")
    return job


@pytest.mark.full
def test_from_pretrained(train: Callable[..., Job], tmp_path: Path) -> None:
    """Transformers' own call at stage 3: the values of the files, to the bit."""
    save_pretrained(tmp_path / "small", num_hidden_layers=0)
    weights = save_pretrained(tmp_path / "pretrained")
    size = sum(held.nbytes for held in weights.values())
    started, joined = cut(run(train, "pretrained", 1, BF16))
    assert len(started) == 2 and len(joined) == 1
    for row in started:
        assert row["weight"] == digests(weights)
        assert row["master"] == digests({name: held.float() for name, held in weights.items()})
        check_peak(row, size / 2 + LARGEST + SLACK)  # its part, and what is gathered
    check_joined(joined, started[0]["buffers"])
    assert on_device.get() or joined[0]["files"] < size / 10, "it has read none of them"


@pytest.mark.full
def test_under_init(train: Callable[..., Job]) -> None:
    """A script's own `with deepspeed.zero.Init(...)`: the values of the same lines without it."""
    started, joined = cut(run(train, "init", 3, {}))
    assert len(started) == len(joined) == 3
    weights = dict(layers().named_parameters())
    size = sum(held.nbytes for held in weights.values())
    assert size > 70 * MEGABYTE
    for row in started:
        assert row["weight"] == row["master"] == digests(weights)
        check_peak(row, size / 3 + 2 * LARGEST + SLACK)
        assert "build all models before the first initialize" in row["refused"]
    check_joined(joined, started[0]["buffers"])


@pytest.mark.full
def test_from_config(train: Callable[..., Job]) -> None:
    """Transformers draws what is in no file."""
    started, joined = cut(run(train, "config", 1, BF16))
    assert len(started) == 2 and started[0]["weight"] == started[1]["weight"] != {}
    check_joined(joined, started[0]["buffers"], cast=LARGEST // 2)


@pytest.mark.full
def test_two_models(train: Callable[..., Job]) -> None:
    """Both are cut before the first engine is there, whose start the second one outlives."""
    job = train(nodes="2:4", stage=3, script=SCRIPT, variables={"HOW": "two"})
    job.coordinator("coordinator")
    for node in ("a", "b"):
        job.node(node, is_host=0)
    assert job.code("a") == job.code("b") == 0
    weights = digests(dict(layers(width=64, depth=3).named_parameters()))
    assert [row["weight"] for row in job.rows("other")] == [weights] * 2


def test_it_needs_the_world_of_the_job(train: Callable[..., Job]) -> None:
    job = train(nodes="1:2", stage=3, script=SCRIPT, variables={"HOW": "late"})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    assert job.code("a") != 0
    said = job.logs()
    assert "was built under deepspeed.zero.Init, over the world of this node alone" in said
    assert "call ds_dynatrain.init_distributed() first" in said


@pytest.mark.full
def test_a_death_while_it_is_cut(train: Callable[..., Job]) -> None:
    """Nobody waits for the dead, also on a device, and nobody goes on with what an abort has left."""
    job = train(nodes="2:4", stage=3, script=SCRIPT, variables={"HOW": "killed"})
    job.coordinator("coordinator")
    for node in ("a", "b"):
        job.node(node, is_host=0)
    assert job.code("a") != 0 and job.code("b") != 0
    assert "WorldChanged: " in job.logs() and not job.rows("cut")
