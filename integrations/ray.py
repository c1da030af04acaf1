"""Ray actors as members of an elastic job. Each actor is a node with one worker, and joins, leaves and dies by itself.

Ray starts the processes and carries the coordinator's address and token, once, at the start. No tensor is ever sent
over Ray. The coordinator is also an actor. Ray Train is not supported, because it starts its own processes, and
restarts all of them when their number changes. Use this module in your own actors.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import MutableMapping
from typing import Any

from ds_dynatrain.elastic.address import Address, read_endpoint
from ds_dynatrain.elastic.environment import LOCAL_RANK, LOCAL_SIZE, TOKEN, WorkerPlace, hand_over, new_node
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.errors import ConfigError

ANSWER_SECONDS = 60.0
"""Maximum number of seconds that a coordinator's actor may take to start and to report its address."""


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
    return place
