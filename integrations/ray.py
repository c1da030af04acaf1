"""Ray actors as members of an elastic job: each actor is a node with one worker, and comes, goes and dies by itself.

Ray starts the processes and carries the coordinator's address and token, once, at the start. No tensor ever travels
over it. The coordinator is an actor, too. Ray Train is not supported: it starts its own processes, and restarts all of
them when their number changes; use this in your own actors.
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
"""How long a coordinator's actor may take to start and to report its address."""


class Coordinator:
    """Class of the coordinator's actor."""

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
    """Start the coordinator of a job as an actor of that name; return its handle. ConfigError for impossible numbers.

    The coordinator lives as long as the returned handle, and needs no core.
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
    """Find this actor's place in the job; call it first, in a method of the actor, before `ds_dynatrain.initialize`.

    name: that of `coordinate`. endpoint: instead of it HOST:PORT or file:FILE of a `ds-dynatrain coordinator`, whose
    token is in the environment. The method has to run in the actor's main thread, as those without `async` and
    `max_concurrency` do, since SIGTERM is handled there.

    ImportError without ray; ConfigError for both or neither, and for an invalid endpoint; ValueError, of Ray's, if
    there is no actor of that name.
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
