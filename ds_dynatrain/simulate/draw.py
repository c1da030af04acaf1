"""Traces drawn from stated distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.plan import Topology
from ds_dynatrain.simulate.trace import NOTICE_SECONDS, Seconds, TraceRow, read_values

Mean = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Distributions(BaseModel):
    """The distributions of a drawn trace. Intervals and durations are exponential, and all nodes are alike.

    hours: the length of the trace.
    loss: mean seconds between two losses of nodes, in a cluster whose nodes are all there (MTBF); None for no losses.
    preemption: the same for pre-emptions.
    slow: the same for slow-downs.
    back: mean seconds until a node that is gone joins again.
    notice: the notice of a pre-emption, in seconds.
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
    """Return the rows of a trace: equal arguments give equal rows."""
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
