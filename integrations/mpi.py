"""mpirun as a launcher of elastic jobs: its processes become members, like those of torchrun.

MPI reports where each process runs and carries the coordinator's address, once, at the start. No tensor is ever sent
over MPI. MPI is finalized at once, because a process can leave an MPI world only together with all others. If a process
fails, most versions of mpirun kill the others. To keep them running, start mpirun with `-disable-auto-cleanup` (MPICH)
or `--continuous` (Open MPI).
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from ds_dynatrain.elastic.address import Address, read_endpoint
from ds_dynatrain.elastic.environment import (
    LOCAL_RANK,
    LOCAL_SIZE,
    TOKEN,
    WorkerPlace,
    hand_over,
    new_node,
    token_from,
)
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.errors import ConfigError, ElasticError

LOOPBACK = "127.0.0.1"


def join(
    communicator: Any = None,
    endpoint: str | None = None,
    min_nodes: int = 1,
    max_nodes: int | None = None,
    variables: MutableMapping[str, str] = os.environ,
) -> WorkerPlace:
    """Return this process's place in the job.

    Call this first, on every process that mpirun has started, before `ds_dynatrain.initialize`.

    communicator: an mpi4py communicator over all processes. By default COMM_WORLD, in which case MPI is finalized
    before this call returns.

    endpoint: HOST:PORT of a running coordinator (`ds-dynatrain coordinator`), or file:FILE with its announcement.
    Without it, process 0 hosts a coordinator, and the job lives as long as process 0.

    min_nodes: minimum number of nodes for a coordinator on process 0.

    max_nodes: maximum number of nodes for a coordinator on process 0; by default the number of nodes of this launch.

    variables: the environment variables.

    A second mpirun joins the job of an `endpoint`. If there is no token and process 0 hosts the coordinator, process 0
    makes a token for this start.

    Raises ImportError without mpi4py. Raises ConfigError, on all processes, for an invalid endpoint or invalid numbers.
    Raises ElasticError if process 0 cannot host.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD if communicator is None else communicator
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    node = _spread(local, new_node())
    nodes = np.zeros(1, np.int64)
    world.Allreduce(np.array([local.rank == 0], np.int64), nodes)
    told = {} if world.rank else _invitation(endpoint, int(nodes[0]), min_nodes, max_nodes, variables)
    told = json.loads(_spread(world, json.dumps(told)))
    place = None if "error" in told else (node, local.rank, local.size)
    local.Free()
    if communicator is None:
        MPI.Finalize()
    if place is None:
        raise (ConfigError if told["is_wrong"] else ElasticError)(told["error"])
    found = WorkerPlace(*place, read_endpoint(told["endpoint"]), told["job"])
    hand_over(found, variables)
    variables[LOCAL_RANK], variables[LOCAL_SIZE] = str(found.local_rank), str(found.local_size)
    if told["token"] is not None:
        variables[TOKEN] = told["token"]
    return found


def _spread(communicator: Any, text: str) -> str:
    """Return the text given by the communicator's process 0, on all of its processes."""
    body = np.frombuffer(text.encode(), np.uint8)
    length = np.array([len(body)], np.int64)
    communicator.Bcast(length)
    if communicator.rank:
        body = np.empty(int(length[0]), np.uint8)
    communicator.Bcast(body)
    return body.tobytes().decode()


def _invitation(
    endpoint: str | None, nodes: int, least: int, most: int | None, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return, on process 0, the endpoint, job and token for all processes, or an error for all of them.

    Hosts a coordinator if there is none.
    """
    try:
        if endpoint is not None:
            return {"endpoint": str(read_endpoint(endpoint)), "job": "", "token": None}
        return _hosted(nodes, least, most, token_from(variables))
    except (ConfigError, ElasticError, OSError) as error:
        return {"error": str(error), "is_wrong": isinstance(error, ConfigError)}


def _hosted(nodes: int, least: int, most: int | None, token: str | None) -> dict[str, Any]:
    from ds_dynatrain.elastic.hosting import CoordinatorHost  # imports torch

    made = secrets.token_hex(32)
    address = Address(LOOPBACK if nodes == 1 else socket.gethostname(), 0)
    job = f"mpi-{secrets.token_hex(4)}"
    host = CoordinatorHost(address, Settings(least, max(least, nodes) if most is None else most), token or made, job)
    host.start()
    atexit.register(host.stop_when_finished)
    return {"endpoint": str(host.address), "job": job, "token": made if token is None else None}
