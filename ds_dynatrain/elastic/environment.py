"""The environment variables of membership: names, and what is read from them or handed on."""

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
"""What an agent hands to its workers: their node, where the coordinator is, the job, and its own process id."""
LOCAL_RANK, LOCAL_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""What torchrun hands to them: the first two are the node's own world, until a worker has joined."""
LONGEST_HOST = 64

WATCHDOG: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""torch's watchdog of NCCL, which would end a process whose peer has died, or abort behind the back of the others."""
OF_TORCHRUN: Mapping[str, str] = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""What torchrun sets where nobody has."""


@dataclass(frozen=True)
class WorkerPlace:
    """The place of a worker that starts: its node, the job, and where the coordinator is."""

    node: str
    local_rank: int
    local_size: int
    coordinator: Endpoint
    job: str = ""
    agent: int | None = None
    """The process that has started it, if that is an agent of ours."""
    restarts: int = 0
    """How often that has started workers before."""


def token_from(variables: Mapping[str, str] = os.environ, file: str | None = None) -> str | None:
    """The job's token: of a file that is named here or in the environment, else the environment's own, else None.

    ConfigError if the file cannot be read or the token is too short.
    """
    file = file or variables.get(TOKEN_FILE)
    if file:
        return read_token(file)
    token = variables.get(TOKEN, "").strip()
    return checked_token(token, TOKEN) if token else None


def job_token(
    endpoint: Endpoint, variables: Mapping[str, str] = os.environ, file: str | None = None
) -> tuple[str, str]:
    """(the token of the job whose coordinator is there, the file that it is in; empty if it was given as text).

    A job that was given none has one of this user's: beside the file in which its coordinator announces itself, else in
    the user's own folder, the same for all jobs. ConfigError as of `token_from` and `made_token`.
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
    """Put what a node's workers have to know where they will inherit it; torchrun adds the two local numbers.

    token_file: the file that the agent has the token from, if from any; as an absolute path, since a script may change
    its folder.
    """
    variables[NODE] = place.node
    variables[COORDINATOR] = str(place.coordinator)
    variables[JOB] = place.job
    variables[AGENT] = "" if place.agent is None else str(place.agent)
    if token_file:
        variables[TOKEN_FILE] = token_file


def settle_watchdog(variables: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's watchdog do nothing in groups that are made from here on; ConfigError if the user wants otherwise."""
    for name, value in WATCHDOG.items():
        given = variables.get(name, value)
        if given not in (value, OF_TORCHRUN.get(name)):
            raise ConfigError(
                f"{name}={given}: where members come and go it has to be {value}, as torch's watchdog would end the "
                "living when a member has died, or abort where the others do not know of it; leave it out"
            )
    variables.update(WATCHDOG)


def new_node(host: str = "") -> str:
    """An id that no node has had: the host for people, this machine's if none is given; the rest tells starts apart."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", host or socket.gethostname())[:LONGEST_HOST]
    return f"{host}-{os.getpid()}-{secrets.token_hex(2)}"


def worker_place(variables: Mapping[str, str] = os.environ) -> WorkerPlace | None:
    """Return the place of this process; None if it was not started for a job of ours. ConfigError for broken
    variables."""
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
    """The number of this process on its machine, in any launch; 0 where none stands there, or what is no number."""
    text = variables.get(LOCAL_RANK, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name}={text!r} in the environment is no whole number; set it to one, or unset it")
    return int(text)
