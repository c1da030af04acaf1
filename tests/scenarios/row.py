"""Scenarios as data: what is launched, how it is configured, what happens, and what has to come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Layout = Mapping[str, Any]
"""Sizes of a layout by the names of `ds_dynatrain.Layout`; what is not named has size 1."""


@dataclass(frozen=True)
class Event:
    """Something that happens once `at` optimizer steps are done, before the next batch is dealt.

    Every working rank does it. `do` names a function of `actions.py`, `given` holds its arguments. `raises` is part of
    the text of the error that each of them has to get; the text begins with the class of the error.
    """

    at: int
    do: str
    given: Mapping[str, Any] = field(default_factory=dict)
    raises: str = ""


@dataclass(frozen=True)
class Run:
    """One job on ranks that exist: a script, its configuration, and the events in it.

    model: a name in `models.MODELS`. start: the first layout. config: merged over the configuration that all runs
    share, block by block; {folder} in a text of it is the folder of the run. loop: how the script feeds the engine, a
    name in `play.LOOPS`. load: a folder of checkpoints that `engine.load` goes on from.
    """

    start: Layout
    model: str = "gpt"
    config: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    steps: int = 6
    loop: str = "loader"
    load: str = ""


@dataclass(frozen=True)
class Row:
    """A scenario on a fixed launch: a run, and what is expected of it.

    ends: the last layout in words. outcomes: how each switch ends. bound: the largest relative distance of a loss from
    the run without events; None where the run trains something else. undisturbed: what that run is, "stock" for plain
    DeepSpeed, or "start" for the same job without its events. resumes: whether another job that loads the state before
    the last switch in the layout after it, and trains to the end, has to have the same bits. fails: part of the text of
    the error that ends the job on each rank.
    """

    name: str
    run: Run
    ends: str = ""
    outcomes: tuple[str, ...] = ()
    bound: float | None = 1e-5
    undisturbed: str = "stock"
    resumes: bool = True
    fails: str = ""
