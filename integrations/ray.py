"""Ray actors as members of an elastic job. Each actor is a node with one worker, and joins, leaves and dies by itself.

Ray starts the processes and carries the coordinator's address and token, once, at the start. No tensor is ever sent
over Ray. The coordinator is also an actor. An actor whose machine is about to be taken away leaves before that.

Ray Train starts its own processes, and restarts all of them when their number changes. There, `SaveWhenPreempted` saves
a checkpoint from which they continue.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import MutableMapping
from typing import Any

from ds_dynatrain.elastic.address import Address, read_endpoint
from ds_dynatrain.elastic.connection import ask_to_leave
from ds_dynatrain.elastic.environment import LOCAL_RANK, LOCAL_SIZE, TOKEN, WorkerPlace, hand_over, job_token, new_node
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.errors import ConfigError, ElasticError, SwitchRefused
from ds_dynatrain.extension import BACKUP_KEY, Extension

ANSWER_SECONDS = 60.0
"""Maximum number of seconds that a coordinator's actor may take to start and to report its address."""

LOOK_SECONDS = 1.0
"""Interval between two looks at whether this machine is about to be taken away."""


class Coordinator:
    """The class of which the coordinator's actor is an instance."""

    def __init__(self, job: str, min_nodes: int, max_nodes: int) -> None:
        import ray

        from ds_dynatrain.elastic.hosting import CoordinatorHost  # imports torch

        self._token = secrets.token_hex(32)
        self._job = job
        address = Address(ray.util.get_node_ip_address(), 0)
        self._host = CoordinatorHost(address, Settings(min_nodes, max_nodes), self._token, job)
        self._host.start()

    def invitation(self) -> tuple[str, str, str]:
        """Return the address, the token and the job, which a member needs to join."""
        return str(self._host.address), self._token, self._job


def coordinate(name: str, min_nodes: int, max_nodes: int) -> Any:
    """Start the coordinator of a job as an actor named `name`, and return the actor's handle.

    The coordinator lives as long as the returned handle, and needs no core. Raises ConfigError if the numbers are
    invalid.
    """
    import ray

    Settings(min_nodes, max_nodes)
    actor = ray.remote(num_cpus=0, max_concurrency=8)(Coordinator).options(name=name)
    coordinator = actor.remote(name, min_nodes, max_nodes)
    ray.get(coordinator.invitation.remote(), timeout=ANSWER_SECONDS)
    return coordinator


def join(
    name: str | None = None, endpoint: str | None = None, variables: MutableMapping[str, str] = os.environ
) -> WorkerPlace:
    """Return this actor's place in the job.

    Call this first, in a method of the actor, before `ds_dynatrain.initialize`.

    name: the name that was given to `coordinate`.

    endpoint: HOST:PORT or file:FILE of a `ds-dynatrain coordinator`, whose token is in the environment. Give either
    this or `name`.

    variables: the environment variables.

    From this call on the actor's node leaves, as with `ds-dynatrain leave`, once Ray is told that its machine will be
    taken away (drained).

    The calling method must run in the actor's main thread, which handles SIGTERM. Methods without `async` and
    `max_concurrency` do.

    Raises ImportError without ray. Raises ConfigError if both or neither of `name` and `endpoint` are given, or if the
    endpoint is invalid. Raises Ray's ValueError if there is no actor of that name.
    """
    if (name is None) == (endpoint is None):
        raise ConfigError(
            f"join(name={name!r}, endpoint={endpoint!r}); give one of the two, a coordinator's actor or its address"
        )
    job = ""
    if endpoint is None:
        import ray

        coordinator = ray.get_actor(name)
        endpoint, variables[TOKEN], job = ray.get(coordinator.invitation.remote(), timeout=ANSWER_SECONDS)
    place = WorkerPlace(new_node(), 0, 1, read_endpoint(endpoint), job)
    hand_over(place, variables)
    variables[LOCAL_RANK], variables[LOCAL_SIZE] = "0", "1"
    threading.Thread(
        target=_leave_when_drained, args=(place, job_token(place.coordinator, variables)[0]), daemon=True
    ).start()
    return place


def _leave_when_drained(place: WorkerPlace, token: str) -> None:
    """Wait until Ray drains this machine, then ask the coordinator to let this node leave, until it does so."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    while here not in ray._private.state.state.get_draining_nodes():
        time.sleep(LOOK_SECONDS)
    while True:
        try:
            ask_to_leave(place.coordinator, place.node, token)
            return
        except (OSError, ElasticError):  # it has not joined yet, or the coordinator is away
            time.sleep(LOOK_SECONDS)


class SaveWhenPreempted(Extension):
    """Extension for the workers of Ray Train: saves a fallback checkpoint once Ray announces a pre-emption.

    Ray Train then restarts all workers, on the machines that are left, and `dynatrain.resume` continues from that step.
    `ray.train.get_preemption_info` is a barrier, so all workers have to work; layouts with idle ones are refused.
    """

    name = "save_when_preempted"

    def __init__(self) -> None:
        self._saved: Any = None

    def attach(self, engine: Any) -> None:
        """Attach to the engine. Raises ConfigError for a job without fallback checkpoints."""
        super().attach(engine)
        self._fallback = engine._parts.extension("fallback")
        if self._fallback is None:
            raise ConfigError(f"SaveWhenPreempted saves fallback checkpoints: name a folder for them in {BACKUP_KEY}")

    def check_layout(self, layout: Any, batch: Any, has_stages: bool) -> None:
        """Raise SwitchRefused for a layout with idle workers, which would not take part in Ray's barrier."""
        import ray.train

        workers = ray.train.get_context().get_world_size()
        if layout.world_size < workers:
            raise SwitchRefused(f"{layout} leaves workers of Ray Train idle", f"use all {workers} of them")

    def save_if_due(self) -> None:
        """Save a checkpoint at the first boundary after each announcement."""
        import ray.train

        found = ray.train.get_preemption_info()
        if found is not None and found != self._saved:
            self._saved = found
            self._fallback.save_now()
