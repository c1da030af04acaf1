"""Actors of Ray are members of an elastic job, one a node. Skipped without ray, which the tests do not install."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.integrations import ray as launcher
from tests.elastic.agents import ROOT, Job, check_history

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]
NAME = "run-7"


class Node:
    """What an actor does."""

    def train(self, **arguments: str) -> str:
        """The script of `tests/elastic/summing.py`, with one line before it."""
        place = launcher.join(**arguments)
        from tests.elastic.summing import Script

        Script().run()
        return place.node


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    variables = {"OUT": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    yield ray
    ray.shutdown()


def test_actors_join_and_die(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = launcher.coordinate(NAME, 1, 3)
    endpoint, token, _ = ray.get(coordinator.invitation.remote())
    (tmp_path / "coordinator").mkdir()
    job = Job(tmp_path, variables={"DYNATRAIN_TOKEN": token})
    job.address = launcher.Address.parse(endpoint)
    kind = ray.remote(num_cpus=1)(Node)
    actors = [kind.remote() for _ in range(3)]
    results = [actor.train.remote(name=NAME) for actor in actors[:2]]
    first = job.settled(2)
    assert first.job == NAME
    results.append(actors[2].train.remote(name=NAME))
    second = job.settled(3, after=first.generation)
    ray.kill(actors[1])
    third = job.settled(2, after=second.generation)
    left = {one.pid for one in third.members}
    assert left < {one.pid for one in second.members}, "the others are who they were"
    job.end()
    nodes = ray.get([results[0], results[2]], timeout=60)
    assert len(set(nodes)) == 2
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(results[1])
    check_history(job)


def test_what_is_wrong_is_said(ray: Any) -> None:
    for arguments in ({}, {"name": NAME, "endpoint": "a:1"}, {"endpoint": "a:b"}):
        with pytest.raises(ConfigError):
            launcher.join(**arguments, variables={})
    with pytest.raises(ConfigError, match="nodes=3:2"):
        launcher.coordinate(NAME, 3, 2)
    with pytest.raises(ValueError, match=NAME):
        launcher.join(NAME, variables={})
