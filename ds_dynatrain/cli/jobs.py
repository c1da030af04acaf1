"""Commands for elastic jobs: run a coordinator, show the status as a table or as JSON, ask a node to leave."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table

from ds_dynatrain.elastic.address import Address, Announced, Endpoint, announced, read_endpoint
from ds_dynatrain.elastic.connection import ask_status, ask_to_leave
from ds_dynatrain.elastic.environment import job_token
from ds_dynatrain.elastic.messages import Status
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.elastic.token import Reading
from ds_dynatrain.elastic.view import is_lost, is_unprotected
from ds_dynatrain.errors import ConfigError, ElasticError
from ds_dynatrain.terminal import stdout_console

Answer = TypeVar("Answer")

WHOLE = ("rank", "member", "phase", "step")
"""Columns whose text is never wrapped, so that a node's name can be copied for `leave`."""


def nodes(text: str) -> tuple[int, int]:
    """Parse MIN:MAX or N, as in torchrun's --nnodes. Return (MIN, MAX). Raises ConfigError for anything else."""
    least, _, most = text.partition(":")
    numbers = (least, most or least)
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise ConfigError(f"--nnodes {text!r}: expected MIN:MAX, for example 2:8")
    return int(numbers[0]), int(numbers[1])


def run_coordinator(
    address: str,
    settings: Settings,
    job: str,
    token_file: Path | None,
    store_port: int,
    announce: Path | None = None,
    http: str | None = None,
    http_token_file: Path | None = None,
) -> None:
    """Serve one job as its coordinator until the job has finished.

    address: the address at which to listen.
    settings: the coordinator's settings.
    job: the name of the job.
    token_file: the file with the job's token.
    store_port: the port of the store for process groups; 0 for a free one.
    announce: a file in which to announce the coordinator's address, if any.
    http: the address at which to show the job, if any.
    http_token_file: the file with the token for the address `http`.

    Raises ConfigError or ElasticError if the coordinator cannot start, or if another one has replaced it in the file
    `announce`.
    """
    from ds_dynatrain.elastic.hosting import CoordinatorHost  # imports torch

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    where = Address.parse(address)
    endpoint = where if announce is None else Announced(announce)
    token, found_in = job_token(endpoint, file=None if token_file is None else str(token_file))
    reading = Reading.of(http, http_token_file, token)
    try:
        host = CoordinatorHost(where, settings, token, job, store_port, reading, found_in)
    except OSError as error:
        raise ElasticError(
            f"cannot listen at {where}: {error}; give another port, or end the process that has this one"
        ) from error
    # Exit as by default, even as process 1 of a container, which has no default. Nothing has to be saved.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    with nullcontext() if announce is None else announced(announce, host.reachable, job, host.end):
        host.run()


def status(address: str, token_file: Path | None) -> Status:
    """Ask the coordinator at an address for the status of its job.

    Raises ConfigError if the address or token is invalid, and ElasticError if no coordinator answers or the coordinator
    refuses this process.
    """
    return _asked(address, token_file, ask_status)


def leave(address: str, node: str, token_file: Path | None) -> tuple[str, ...]:
    """Ask the workers of a node to leave the job. Return the workers that were asked.

    Raises ConfigError if no node can have this name, and otherwise raises as `status` does.
    """
    try:
        return _asked(address, token_file, lambda where, token: ask_to_leave(where, node, token))
    except ValidationError as error:
        raise ConfigError(
            f"{node!r} is no name of a node; `ds-dynatrain status {address}` says which there are"
        ) from error


def _asked(address: str, token_file: Path | None, question: Callable[[Endpoint, str | None], Answer]) -> Answer:
    where = read_endpoint(address)
    token, _ = job_token(where, file=None if token_file is None else str(token_file))
    try:
        return question(where, token)
    except OSError as error:
        raise ElasticError(
            f"no coordinator answers at {where}: {error}; give the address that `ds-dynatrain coordinator` listens "
            "at, or start one"
        ) from error


def show_status(status: Status) -> None:
    """Print the status of a job: its state, its members, and the last changes."""
    console = stdout_console()
    state = _state(status)
    name = f"job {status.job!r}" if status.job else "a job without a name"
    console.print(
        escape(
            f"{name}: {state}; generation {status.generation}, {len(status.ranks)} members, "
            f"{status.min_nodes} to {status.max_nodes} nodes"
        ),
        soft_wrap=True,
    )
    if status.members:
        console.print(_members(status))
    lines = [f"{node.node}: its workers start, for {node.seconds:.0f} s so far" for node in status.starting]
    lines += status.parted
    for each in status.changes:
        head = f"{each.seconds_ago:8.1f} s ago  generation {each.generation} ({each.change}), {each.size} members"
        lines.append(f"{head}  {each.reason}")
    for line in lines:
        console.print(escape(line), soft_wrap=True)


def _state(status: Status) -> str:
    """Return a short description of the job's state, such as "running"."""
    if status.finished:
        return "finished"
    if status.generation == 0:
        return "has not started"
    if is_lost(status):
        return "lost: no member has its state any more"
    if not status.ranks:
        return "waiting: all members were told to go"
    state = "paused: too few nodes" if status.paused else "running"
    return f"{state}, unprotected" if is_unprotected(status) else state


def _members(status: Status) -> Table:
    """Return a table with one row per member. Columns that are empty for all members are left out."""
    columns: dict[str, list[str]] = {
        "rank": ["" if one.rank is None else str(one.rank) for one in status.members],
        "member": [escape(one.member) for one in status.members],
        "phase": [one.phase for one in status.members],
        "step": [str(one.step) for one in status.members],
        "layout": [escape(one.layout) for one in status.members],
        "last pause": [f"{one.pause_ms:.0f} ms" if one.pause_ms else "" for one in status.members],
        "protected": [one.protected for one in status.members],
        "heard of": [f"{one.heard_seconds:.1f} s ago" for one in status.members],
        "waits for": [escape(one.waits_for) for one in status.members],
    }
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title, cells in columns.items():
        if any(cells):
            is_whole = title in WHOLE
            width = max(map(len, (title, *cells))) if is_whole else None
            table.add_column(title, no_wrap=is_whole, overflow="fold", min_width=width)
    for row in zip(*filter(any, columns.values()), strict=True):
        table.add_row(*row)
    return table
