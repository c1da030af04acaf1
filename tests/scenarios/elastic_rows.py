"""Scenarios of launches whose members come and go, as data: what is launched, what befalls it, what has to come of it.

A `Play` is one launch; its rows follow one on another in it, and each is a scenario with an expectation of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FOLDER = "$FOLDER"
"""In a configuration: the folder of the launch."""
ADDRESS = "$ADDRESS"
"""In the words of a command: the coordinator's. `$NODE(a)` there is the name of node a in the status."""


@dataclass(frozen=True)
class Start:
    """Nodes start, each a torchrun, and first a coordinator of that name, if one is given: another job then.

    settings: what their scripts are told otherwise, `config` block by block. conf: of the rendezvous. is_anew: whether
    it is another job, at the coordinator that is there.
    """

    nodes: str
    options: tuple[str, ...] = ()
    coordinator: str = ""
    conf: str = "is_host=0"
    is_anew: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fixed:
    """A torchrun of a fixed number of processes starts, with the same script: another job."""

    node: str
    workers: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Coordinate:
    """A coordinator starts, at the same address as the one before."""

    name: str


@dataclass(frozen=True)
class Terminate:
    """Nodes get SIGTERM, all at once."""

    nodes: str


@dataclass(frozen=True)
class Kill:
    """Nodes or coordinators are gone, by SIGKILL to all their processes at once."""

    nodes: str


@dataclass(frozen=True)
class Hit:
    """A signal to the only worker of a node; its torchrun lives."""

    node: str
    number: int


@dataclass(frozen=True)
class Ask:
    """A `ds-dynatrain` command; prints: parts of what it prints, in the end."""

    words: tuple[str, ...]
    prints: tuple[str, ...] = ()
    code: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """All scripts end after a common step."""


Act = Start | Fixed | Coordinate | Terminate | Kill | Hit | Ask | End


@dataclass(frozen=True)
class Row:
    """An event, and what has to come of it.

    Always: the processes that nothing befell train on, the losses of all steps are those of the run without events, and
    each sample is trained once.

    members: how many processes train then, in a new generation; None: the same ones, 0: none. layout: theirs, in words.
    redone: so many steps may be made again.
    says: patterns of what a node prints, or any of them ("any"). ends: the exit codes of nodes. status: part of the
    output of `ds-dynatrain status`.
    """

    name: str
    act: Act
    members: int | None = None
    layout: str = ""
    redone: int = 0
    says: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, int] = field(default_factory=dict)
    status: str = ""


@dataclass(frozen=True)
class Play:
    """A launch. nodes: MIN:MAX. config: merged over `CONFIG` of `elastic_stage.py`, block by block. workers: a node's.

    is_held_to_launch: whether losses are held against those of one process of the same script; else they are held
    against those of a loop in plain PyTorch. epochs, pause: see `elastic_worker.py`. bound: the largest relative
    distance of a loss from these. full: whether it is left out by default.
    """

    name: str
    rows: tuple[Row, ...]
    model: str = "gpt"
    config: Mapping[str, Any] = field(default_factory=dict)
    nodes: str = "1:4"
    workers: int = 1
    script: str = "elastic_worker.py"
    is_held_to_launch: bool = False
    epochs: int = 0
    pause: float = 0.15
    bound: float = 1e-4
    full: bool = False
