"""Traces: which events happen to which members of a cluster, and when.

A trace is a file of JSON lines, or a CSV file of a spot market with the columns `seconds,nodes`. It can also be drawn
from distributions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.plan import Topology

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
EXAMPLE = '{"seconds": 60, "event": "loss", "members": [3]}'
NOTICE_SECONDS = 30.0
"""Default notice of a pre-emption in seconds: torchrun kills workers 30 s after SIGTERM."""

Values = TypeVar("Values", bound=BaseModel)


class TraceRow(BaseModel):
    """A row of a trace.

    seconds: the time since the start of the trace.
    event: "join": processes are started on the members; "loss": the members die without notice; "preemption": the
        members are given notice, and are gone when it has passed; "slow": the members run at `speed` from now on;
        "end": the trace ends.
    members: the members that the event concerns.
    speed: the relative speed of slow members; 1 ends a slow-down.
    notice_seconds: the length of a pre-emption's notice.
    noticed_seconds: the time until the others notice a loss; None for `Assumptions.detection_seconds`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: Seconds
    event: Literal["join", "loss", "preemption", "slow", "end"]
    members: tuple[int, ...] = ()
    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    notice_seconds: Seconds = NOTICE_SECONDS
    noticed_seconds: Seconds | None = None

    def there_after(self, there: set[int]) -> set[int]:
        """Return the members that are present after the row.

        there: the members that were present before it.
        """
        if self.event in ("loss", "preemption"):
            return there - {*self.members}
        return there | {*self.members} if self.event == "join" else there


Numbered = tuple[int, TraceRow]
"""A line number of the trace file, and the row on that line."""


def read_trace(file: Path, topology: Topology) -> tuple[TraceRow, ...]:
    """Return the rows of a trace file.

    Raises ConfigError, which names the file and the row, if a row cannot be used in this cluster. Raises OSError if the
    file cannot be read.
    """
    lines = [(number, line.strip()) for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)]
    given = [(number, line) for number, line in lines if line and not line.startswith("#")]
    try:
        rows = list(_spot_rows(given, topology) if file.suffix == ".csv" else map(_json_row, given))
        _check(rows, set(topology.node_of))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return tuple(row for _, row in rows)


def at_the_beginning(rows: Iterable[TraceRow], members: Iterable[int]) -> set[int]:
    """Return the members that train from the start: all except those whose first row is a join."""
    first = {member: row.event for row in reversed([*rows]) for member in row.members}
    return {member for member in members if first.get(member) != "join"}


def read_values(kind: type[Values], text: str, option: str) -> Values:
    """Return the object that an option such as "hours=24,loss=3600" describes.

    Raises ConfigError, which names the option and the key, for an unknown key or an invalid value.
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    try:
        return kind.model_validate({name.strip(): value for name, _, value in pairs})
    except ValidationError as error:
        raise ConfigError(f"{option} {text}: {_mistake(error)}; it has {', '.join(kind.model_fields)}") from None


def _mistake(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the row'}: {first['msg']}, got {first['input']!r}"


def _json_row(line: tuple[int, str]) -> Numbered:
    number, text = line
    try:
        return number, TraceRow.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"row {number}: {_mistake(error)}; write rows such as {EXAMPLE}") from None


def _spot_rows(lines: Iterable[tuple[int, str]], topology: Topology) -> Iterator[Numbered]:
    """Yield joins and pre-emptions of whole nodes. If nodes are pre-empted, the newest ones go first.

    The numbers of nodes are scaled so that the largest one equals all nodes of the cluster.
    """
    counts: list[tuple[int, float, int]] = []
    for number, line in lines:
        if line.replace(" ", "") == "seconds,nodes":
            continue
        try:
            time, _, count = line.partition(",")
            row = number, float(time), int(count)
        except ValueError:
            raise ConfigError(f"row {number}: {line!r} is no time and number of nodes; write such as 900,3") from None
        if not (math.isfinite(row[1]) and row[1] >= 0 and row[2] >= 0):
            raise ConfigError(f"row {number}: {line!r} has a number below 0 or none at all; write such as 900,3")
        counts.append(row)
    most = max((nodes for _, _, nodes in counts), default=0)
    if most < 1:
        return
    names, here = topology.names, 0
    for place, (number, seconds, nodes) in enumerate(counts):
        size = round(nodes * len(names) / most)
        names_changed = names[min(here, size) : max(here, size)]
        members = tuple(member for member, name in sorted(topology.node_of.items()) if name in names_changed)
        was, here = here, size
        is_given = place == 0 and seconds == 0  # these are present from the start
        if members and not is_given:
            yield number, TraceRow(seconds=seconds, event="join" if size > was else "preemption", members=members)
    yield counts[-1][0], TraceRow(seconds=counts[-1][1], event="end")


def _check(rows: list[Numbered], members: set[int]) -> None:
    """Raise ConfigError if the rows contradict each other, or name members that the cluster does not have."""
    if not rows:
        raise ConfigError(f"row 1: the trace is empty; write rows such as {EXAMPLE}")
    here, before = at_the_beginning((row for _, row in rows), members), rows[0][1]
    for number, row in rows:
        if (what := _mistake_of(row, before, members, here)) is not None:
            raise ConfigError(f"row {number}: {what}")
        here, before = row.there_after(here), row


def _mistake_of(row: TraceRow, before: TraceRow, members: set[int], here: set[int]) -> str | None:
    """Return why a row cannot follow another one, or what is wrong with its members; None if it is valid.

    here: the members that are present before the row.
    """
    if row.seconds < before.seconds:
        return f"{row.seconds:g} s is before the row above, {before.seconds:g} s; sort the rows by time"
    if before.event == "end" and row is not before:
        return f"it comes after the end at {before.seconds:g} s; remove it, or move the end"
    if bool(row.members) == (row.event == "end"):
        return f"{row.event} of {len(row.members)} members; give members to each event but end"
    for member in row.members:
        if member not in members:
            return f"member {member} is unknown; the cluster has {len(members)}, {min(members)} to {max(members)}"
        if row.event == "join" and row.members.count(member) > 1:
            return f"join of member {member} twice; leave it out once"
        if (row.event == "join") == (member in here):
            what = "is there already" if row.event == "join" else "is not there"
            return f"{row.event} of member {member}, which {what}; correct the member, or remove the row"
    return None


# ---- drawn traces ----------------------------------------------------------------------------------------------------

Mean = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Distributions(BaseModel):
    """The distributions of a drawn trace. Intervals and durations are exponential, and all nodes are alike.

    hours: the length of the trace.
    loss: mean seconds between two losses of nodes in a cluster with all its nodes (MTBF); None for no losses.
    preemption: mean seconds between two pre-emptions of nodes; None for no pre-emptions.
    slow: mean seconds between two slow-downs of nodes; None for no slow-downs.
    back: mean seconds until a node that is gone joins again.
    notice: the length of a pre-emption's notice, in seconds.
    slow_for: the mean duration of a slow-down, in seconds. Nothing else happens to the node in the meantime.
    speed: the speed of a slow node.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hours: Mean
    loss: Mean | None = None
    preemption: Mean | None = None
    slow: Mean | None = None
    back: Mean = 600.0
    notice: Seconds = NOTICE_SECONDS
    slow_for: Mean = 600.0
    speed: Mean = 0.5


def draw(said: Distributions, topology: Topology, seed: int) -> list[TraceRow]:
    """Draw a random trace, and return its rows. Equal arguments give equal rows."""
    chance, end, rows = np.random.default_rng(seed), 3600 * said.hours, list[TraceRow]()
    means = {"loss": said.loss, "preemption": said.preemption, "slow": said.slow}
    rates = {event: 1 / mean / len(topology.names) for event, mean in means.items() if mean is not None}
    for node in topology.names if rates else ():
        members = tuple(member for member, name in sorted(topology.node_of.items()) if name == node)
        at, total = 0.0, sum(rates.values())
        while (at := at + chance.exponential(1 / total)) < end:
            event = str(chance.choice([*rates], p=[rate / total for rate in rates.values()]))
            more = {"slow": {"speed": said.speed}, "preemption": {"notice_seconds": said.notice}}.get(event, {})
            rows.append(TraceRow.model_validate({"seconds": at, "event": event, "members": members, **more}))
            at += chance.exponential(said.slow_for if event == "slow" else said.back)
            rows.append(TraceRow(seconds=at, event="slow" if event == "slow" else "join", members=members))
    inside = sorted((row for row in rows if row.seconds < end), key=lambda row: row.seconds)
    return [*inside, TraceRow(seconds=end, event="end")]


def write_drawn(file: Path, text: str, seed: int, topology: Topology) -> None:
    """Write a drawn trace to a new file.

    Raises ConfigError if the file exists, or if the distributions cannot be used.
    """
    said = read_values(Distributions, text, "--draw")
    if file.exists():
        raise ConfigError(f"--draw: {file} exists; give the name of a new file, or leave out --draw to play this one")
    rows = [row.model_dump_json(exclude_defaults=True) for row in draw(said, topology, seed)]
    file.write_text("\n".join([f"# drawn with seed {seed}: {said!r}", *rows]) + "\n", encoding="utf-8")
