"""Environment variables of membership: their names, how they are read, and how an agent sets them for its workers."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from ds_dynatrain.elastic.address import Announced, Endpoint, read_endpoint
from ds_dynatrain.elastic.token import checked_token, made_token, read_token, users_file
from ds_dynatrain.errors import ConfigError

TOKEN = "DYNATRAIN_TOKEN"
TOKEN_FILE = "DYNATRAIN_TOKEN_FILE"

NODE = "DYNATRAIN_NODE"
COORDINATOR = "DYNATRAIN_COORDINATOR"
JOB = "DYNATRAIN_JOB"
AGENT = "DYNATRAIN_AGENT"
"""The four variables that an agent sets for its workers: their node, the coordinator's address, the job's name, and the
agent's process id."""
LOCAL_RANK, LOCAL_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Name of torchrun's variable that counts how often the workers were restarted.

torchrun also sets `LOCAL_RANK` and `LOCAL_SIZE`. Both describe the node's own world until a worker has joined.
"""
LONGEST_HOST = 64

WATCHDOG: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Values that disable torch's NCCL watchdog, which would end a process whose peer has died, or abort on one rank
only."""
OF_TORCHRUN: Mapping[str, str] = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""Values that torchrun sets by default. They do not count as set by the user."""


@dataclass(frozen=True)
class WorkerPlace:
    """The facts that a worker reads from its environment: its node, the job, and the coordinator's address."""

    node: str
    local_rank: int
    local_size: int
    coordinator: Endpoint
    job: str = ""
    agent: int | None = None
    """Process id of the agent that started the worker; None if another launcher started the worker."""
    restarts: int = 0
    """Number of times that torchrun's agent has restarted the workers of this node after a failure."""


def token_from(variables: Mapping[str, str] = os.environ, file: str | None = None) -> str | None:
    """Return the job's token; None if there is none.

    The token is read from `file` if given, else from the file that the environment names, else from the environment
    itself. Raises ConfigError if the file cannot be read or the token is too short.
    """
    file = file or variables.get(TOKEN_FILE)
    if file:
        return read_token(file)
    token = variables.get(TOKEN, "").strip()
    return checked_token(token, TOKEN) if token else None


def job_token(
    endpoint: Endpoint, variables: Mapping[str, str] = os.environ, file: str | None = None
) -> tuple[str, str]:
    """Return the token of the job whose coordinator is at `endpoint`, and the path of the file that holds the token (""
    if it was given as text).

    If no token is given, one is created and kept in a file. If the coordinator announces itself in a file, the token's
    file is placed beside it, so that the job has its own token. Otherwise the file is in the user's folder, and all
    jobs of the user share the token. Raises ConfigError under the same conditions as `token_from` and `made_token`.
    """
    given, named = token_from(variables, file), file or variables.get(TOKEN_FILE)
    if given is not None:
        return given, os.path.abspath(named) if named else ""
    if isinstance(endpoint, Announced):
        made = endpoint.file.with_name(f"{endpoint.file.name}.token")
    else:
        made = users_file("token", variables)
    return made_token(made), str(made)


def hand_over(place: WorkerPlace, variables: MutableMapping[str, str] = os.environ, token_file: str = "") -> None:
    """Set the environment variables that a node's workers will inherit. torchrun adds the local rank and the local
    world size.

    token_file: absolute path of the file with the agent's token, because a script may change its working directory; ""
        if there is none.
    """
    place_of = {NODE: place.node, COORDINATOR: str(place.coordinator), JOB: place.job, AGENT: str(place.agent or "")}
    variables.update(place_of)
    if token_file:
        variables[TOKEN_FILE] = token_file


def settle_watchdog(variables: MutableMapping[str, str] = os.environ) -> None:
    """Disable torch's NCCL watchdog for process groups made from now on. Raises ConfigError if the user has set its
    variables to other values."""
    for name, value in WATCHDOG.items():
        given = variables.get(name, value)
        if given not in (value, OF_TORCHRUN.get(name)):
            raise ConfigError(
                f"{name}={given}: where members come and go it has to be {value}, as torch's watchdog would end the "
                "living when a member has died, or abort where the others do not know of it; leave it out"
            )
    variables.update(WATCHDOG)


def new_node(host: str = "") -> str:
    """Return a new node id: the host's name, by which people recognize it, and a suffix that is unique to this start.

    host: the host's name; by default this machine's name.
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "-", host or socket.gethostname())[:LONGEST_HOST]
    return f"{host}-{os.getpid()}-{secrets.token_hex(2)}"


def worker_place(variables: Mapping[str, str] = os.environ) -> WorkerPlace | None:
    """Return the description of this worker; None if this process was not started for an elastic job.

    Raises ConfigError if a variable is malformed.
    """
    if COORDINATOR not in variables or NODE not in variables:
        return None
    return WorkerPlace(
        node=variables[NODE],
        local_rank=_number(variables, LOCAL_RANK, 0),
        local_size=_number(variables, LOCAL_SIZE, 1),
        coordinator=read_endpoint(variables[COORDINATOR]),
        job=variables.get(JOB, ""),
        agent=_number(variables, AGENT, 0) or None,
        restarts=_number(variables, RESTARTS, 0),
    )


def local_rank(variables: Mapping[str, str] = os.environ) -> int:
    """Return the local rank of this process under any launcher; 0 if the variable is missing or not a number."""
    text = variables.get(LOCAL_RANK, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name}={text!r} in the environment is no whole number; set it to one, or unset it")
    return int(text)
