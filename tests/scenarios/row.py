"""Scenarios as data: what is launched, how it is configured, what happens, and what has to come of it.

In texts of a row {row} stands for the folder of the row, {folder} for that of the run, which is {row}/run for the first
one and {row}/then1, {row}/then2, ... for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ds_dynatrain

Layout = Mapping[str, Any]
"""Sizes of a layout by the names of `ds_dynatrain.Layout`; what is not named has size 1."""


@dataclass(frozen=True)
class Event:
    """Something that happens once `at` optimizer steps are done, before the next batch is dealt.

    Every working rank does it. `do` names a function of `actions.py`, `given` holds its arguments. `raises` is part of
    the text of the error that each of them has to get; the text begins with the class of the error. within: it happens
    once the next batch was dealt, before it is trained.
    """

    at: int
    do: str
    given: Mapping[str, Any] = field(default_factory=dict)
    raises: str = ""
    within: bool = False


@dataclass(frozen=True)
class Run:
    """One job on ranks that exist: a script, its configuration, and the events in it.

    model: a name in `models.MODELS`. start: the first layout. config: merged over the configuration that all runs
    share, block by block. loop: how the script feeds the engine, a name in `play.LOOPS`, or one of plain DeepSpeed, a
    name in `play.STOCK`. load: a folder of checkpoints that `engine.load` goes on from. load_stock: one for
    `engine.load_checkpoint`.
    """

    start: Layout
    model: str = "gpt"
    config: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    steps: int = 6
    loop: str = "loader"
    load: str = ""
    load_stock: str = ""


@dataclass(frozen=True)
class Command:
    """A command of `ds-dynatrain`: its exit code, and part of what it prints.

    damages: a folder of which a byte in the middle of the largest file is flipped before. writes: a file with this
    configuration is made before, {row}/config.json.
    """

    arguments: tuple[str, ...]
    code: int = 0
    prints: str = ""
    damages: str = ""
    writes: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Row:
    """A scenario on a fixed launch: a run, what follows it, and what is expected of it.

    then: jobs in the same processes, and commands. ends: the last layout of the run; None: that of its start.
    outcomes: how each switch ends. phases: that the last switch had. reason: part of why it was rolled back. bound: the
    largest relative distance of a loss, in each run, from the run without events; None where another thing is trained.
    undisturbed: what that run is, a name in `play.STOCK` for plain DeepSpeed, "start" for the same job without its
    switches, or a run. resumes: whether another job that loads the state before the last switch in the layout after it,
    and trains to the end, has to have the same bits. alike: pairs of checkpoints that hold the same bits; {undisturbed}
    stands for the folder of that run. fails: part of the text of the error that ends the run on each rank. notes: what
    actions have noted, by name. reports: outcomes of the switches in the report file of the
    run. full: whether `make test` leaves it out.
    """

    name: str
    run: Run
    then: tuple[Run | Command, ...] = ()
    ends: Layout | None = None
    outcomes: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    bound: float | None = 1e-5
    undisturbed: str | Run = "stock"
    resumes: bool = False
    alike: tuple[tuple[str, str], ...] = ()
    fails: str = ""
    reason: str = ""
    reports: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    full: bool = False


DEFAULT: Mapping[str, Any] = {}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 2}}
EXACT = {"dynatrain": {"exact": True, "report": {"jsonl": "{folder}/report.jsonl"}}}


def layout(data: int, stage: int, **sizes: int) -> dict[str, int]:
    """Return a layout by its sizes."""
    return {"data": data, **sizes, "zero_stage": stage}


def words(sizes: Layout) -> str:
    """Return a layout as the engine prints it."""
    return str(ds_dynatrain.Layout(**sizes))


def to(at: int, **sizes: Any) -> tuple[Event, ...]:
    """Save the state after so many steps, and switch there."""
    return Event(at, "save"), Event(at, "switch", sizes)


def switched(kind: str, one: Layout, other: Layout, config: Mapping[str, Any] = DEFAULT, **more: Any) -> Row:
    """Return a switch from one layout to another in the middle of a run, held against a load in the second one."""
    of_run = {key: more.pop(key) for key in ("model", "steps", "loop") if key in more}
    run = Run(one, config=config, events=to(3, **{**dict.fromkeys(one, 1), **other}), **of_run)
    ends = {key: size for key, size in other.items() if key != "late"}
    return Row(f"{kind}: {words(one)} to {words(ends)}", run, ends=ends, **{"resumes": True, **more})


def full(*rows: Row) -> tuple[Row, ...]:
    """Return rows that `make test` leaves out, as others are much like them."""
    return tuple(replace(row, full=True) for row in rows)
