"""Jobs of `training.py`, and what they are held against."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import Job
from tests.elastic.deaths import Undisturbed
from tests.elastic.runs import Static, on_device, training


@pytest.fixture(autouse=True, scope="session")
def jobs_on_device(request: pytest.FixtureRequest) -> None:
    """With `--on-device` jobs compute there."""
    if request.config.option.on_device:
        request.getfixturevalue("lab_built")
        on_device.set(True)


@functools.cache
def made_once(folder: Path) -> Static:
    """Return the runs of a session, also to files that import the fixture, which pytest takes for another one."""
    return Static(folder)


@pytest.fixture(scope="session")
def static(tmp_path_factory: pytest.TempPathFactory) -> Static:
    """The same training in worlds that never change."""
    return made_once(tmp_path_factory.getbasetemp() / "static")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The same in each layout that is asked for, to the bit."""
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job of `training.py`, see `runs.training`, and leaves nothing of it behind."""
    jobs: list[Job] = []

    def make(**given: Any) -> Job:
        jobs.append(training(tmp_path, **given))
        return jobs[-1]

    yield make
    for job in jobs:
        job.clean_up()
