"""Actors of Ray are members of an elastic job, one a node, and workers of Ray Train start again with fewer. Skipped
without ray, which the tests do not install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
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


def variables_of(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {"OUT": str(folder), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    variables = variables_of(tmp_path)
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    yield ray
    ray.shutdown()


@dataclass
class Machines:
    """Two machines of Ray on this one, of a core each."""

    ray: Any
    cluster: Any
    second: Any

    def drain(self, seconds: int) -> None:
        """Announce that the second machine will be taken away, as a cloud does with a spot instance."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.cluster.address]
        command += ["--node-id", self.second.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message", "spot", f"--deadline-remaining-seconds={seconds}"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    for name, value in variables_of(tmp_path).items():  # processes of a raylet inherit them
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)
    yield Machines(ray, cluster, second)
    ray.shutdown()
    cluster.shutdown()


def coordinated(ray: Any, folder: Path, most: int) -> tuple[Any, Job]:
    """The coordinator's actor, and what it tells of the job."""
    coordinator = launcher.coordinate(NAME, 1, most)
    endpoint, token, _ = ray.get(coordinator.invitation.remote())
    (folder / "coordinator").mkdir()
    job = Job(folder, variables={"DYNATRAIN_TOKEN": token})
    job.address = launcher.Address.parse(endpoint)
    return coordinator, job


def test_an_actor_leaves_before_its_machine_is_taken_away(machines: Machines, tmp_path: Path) -> None:
    ray = machines.ray
    coordinator, job = coordinated(ray, tmp_path, 2)
    actors = [ray.remote(num_cpus=1)(Node).remote() for _ in range(2)]
    results = [actor.train.remote(name=NAME) for actor in actors]
    first = job.settled(2)
    machines.drain(120)
    second = job.settled(1, after=first.generation)
    assert second.changes[-1].change == "planned" and "leave" in second.changes[-1].reason
    job.end()
    assert len(ray.get(results, timeout=60)) == 2, "the one that left has ended well"
    check_history(job)


def trained(arguments: dict[str, Any]) -> None:
    """What a worker of Ray Train does: some hundreds of steps, from the newest checkpoint."""
    import time

    import ray.train
    import torch

    import ds_dynatrain
    from ds_dynatrain.integrations.ray import SaveWhenPreempted

    out, folder = Path(arguments["out"]), {"path": arguments["out"] + "/kept"}
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(4000, 16), torch.randint(0, 4, (4000,)))
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    config |= {"zero_optimization": {"stage": 1}, "dynatrain": {"fallback": folder, "resume": folder}}
    engine, _, loader, _ = ds_dynatrain.initialize(
        model=torch.nn.Linear(16, 4), config=config, training_data=data, extensions=[SaveWhenPreempted()]
    )
    size, begin = ray.train.get_context().get_world_size(), engine.global_steps
    for inputs, targets in loader:
        engine.backward(torch.nn.functional.cross_entropy(engine(inputs), targets))
        engine.step()
        (out / f"steps-{size}").touch()
        time.sleep(0.05)
        if size == 1 and engine.global_steps == begin + 20:
            break
    if engine.rank == 0:
        (out / "result").write_text(f"{size} worker from step {begin} to {engine.global_steps}")


def test_ray_train_goes_on_with_fewer_workers(machines: Machines, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def take_away() -> None:
        while not (tmp_path / "steps-2").exists():
            time.sleep(0.2)
        machines.drain(20)
        time.sleep(20)
        machines.cluster.remove_node(machines.second)

    trainer = TorchTrainer(
        trained,
        train_loop_config={"out": str(tmp_path)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    taking = threading.Thread(target=take_away)
    taking.start()
    trainer.fit()
    taking.join()
    said = (tmp_path / "result").read_text()
    found = re.fullmatch(r"1 worker from step (\d+) to (\d+)", said)
    assert found and 0 < int(found[1]) == int(found[2]) - 20, said


def test_actors_join_and_die(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, job = coordinated(ray, tmp_path, 3)
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
