"""Topology of a cluster: nodes, their members, and the speed of the links between them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.space.interval import Ints, ints

MEMORY, NODE, NETWORK = 0, 1, 2
"""Classes of links: inside a member, between members of a node, between nodes."""
CLASSES = ("memory", "node", "network")
ASSUMED = "assumed"
OVERHEAD = 1.25
"""Factor by which moves take longer than the transfer of their bytes, from docs/figures/training.md (up to four ranks).
"""
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LinkClass:
    """The links of one class.

    bytes_per_second: the speed of one member, in each direction.
    latency_seconds: the time of an empty message.
    at_once: how many members of a node can reach that speed together, such as its number of network cards; None for
        all.
    """

    bytes_per_second: Positive
    latency_seconds: Annotated[float, Field(ge=0)] = 0.0
    at_once: Positive | None = None


@dataclass(frozen=True)
class LinkSeconds:
    """The seconds that the traffic of a plan takes.

    memory, node, network: the minimum time on the links of each class, which work in parallel.
    expected: the time if each member uses its links one after the other, with latencies and overheads.
    """

    memory: float
    node: float
    network: float
    expected: float

    @property
    def floor(self) -> float:
        """Lower bound on the time of all traffic. Link classes work in parallel, so only the slowest one counts."""
        return max(self.memory, self.node, self.network)


@dataclass(frozen=True)
class Topology:
    """The nodes of a cluster and the links between its members.

    node_of: a map from member to the name of its node.
    memory, node, network: the links inside a member, between members of a node, and between nodes.
    device_memory_bytes: the memory of each member's device; None if unknown.
    overhead_seconds: the part of a switch's moves that does not depend on the number of bytes.
    overhead_factor: the factor by which moves take longer than their links alone, because of short runs, packing, and
        waits for other members.
    origin: the source of these figures: a file, or "assumed".
    """

    node_of: Mapping[int, str]
    memory: LinkClass = LinkClass(5e9)
    node: LinkClass = LinkClass(1e9, 1e-4)
    network: LinkClass = LinkClass(1e9, 1e-4)
    device_memory_bytes: float | None = None
    overhead_seconds: float = 0.0
    overhead_factor: float = OVERHEAD
    origin: str = ASSUMED

    @staticmethod
    def uniform(nodes: int, members_per_node: int, **others: Any) -> Topology:
        """Return a topology of equal nodes, with members numbered node by node.

        others: further fields of the class.
        """
        return Topology({r: f"node-{r // members_per_node}" for r in range(nodes * members_per_node)}, **others)

    @staticmethod
    def read(path: str | Path) -> Topology:
        """Read a cluster file. Raises ConfigError, which names the file and the key, if it cannot be used."""
        cluster = _cluster_in(Path(path))
        found = cluster.node_of(str(path))
        links, overhead = (cluster.memory, cluster.node, cluster.network), cluster.overhead
        memory = cluster.device_memory_bytes
        return Topology(found, *links, memory, overhead.seconds, overhead.factor, str(path))

    def to_toml(self, comment: str = "") -> str:
        """Return the text of a cluster file that `read` turns into this topology."""
        lines = [f"# {line}" for line in comment.splitlines()]
        if self.device_memory_bytes is not None:
            lines.append(f"device_memory_bytes = {self.device_memory_bytes:.6g}")
        for name in CLASSES:
            link: LinkClass = getattr(self, name)
            lines += ["", f"[{name}]", f"bytes_per_second = {link.bytes_per_second:.6g}"]
            lines.append(f"latency_seconds = {link.latency_seconds:.6g}")
            if link.at_once is not None:
                lines.append(f"at_once = {link.at_once:.6g}")
        lines += ["", "[overhead]", f"seconds = {self.overhead_seconds:.6g}", f"factor = {self.overhead_factor:.6g}"]
        lines += ["", "[members]"]
        for name in dict.fromkeys(self.node_of.values()):
            quoted = name.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'"{quoted}" = {[member for member, node in self.node_of.items() if node == name]}')
        return "\n".join(lines).lstrip("\n") + "\n"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes, in the order of their first members."""
        return tuple(dict.fromkeys(self.node_of[member] for member in sorted(self.node_of)))

    @cached_property
    def _places(self) -> tuple[Ints, Ints]:
        """Two arrays: the members in ascending order, and the index in `names` of each member's node."""
        members, number = ints(sorted(self.node_of)), {name: index for index, name in enumerate(self.names)}
        return members, ints([number[self.node_of[member]] for member in members.tolist()])

    def node_index(self, members: Ints) -> Ints:
        """Return the index in `names` of each member's node. Raises ConfigError for an unknown member."""
        known, nodes = self._places
        at = np.minimum(np.searchsorted(known, members), len(known) - 1)
        strangers = members[known[at] != members] if len(known) else members
        if len(strangers):
            raise ConfigError(
                f"{self.origin}: {len(known)} members on {len(self.names)} nodes, and member {strangers[0]} is not "
                "among them; describe a cluster that has all members of both layouts"
            )
        return nodes[at]

    def busy_seconds(self, nodes: Ints, sent: Floats, received: Floats) -> Floats:
        """Return how long each member uses its links: a row for each class, without latencies and overheads.

        nodes: the index of each member's node in `names`.
        sent, received: the bytes of each member, with a row for each class.
        """
        found = np.zeros((len(CLASSES), len(nodes)))
        for row, name in enumerate(CLASSES):
            link: LinkClass = getattr(self, name)
            for end in (sent[row], received[row]):
                alone = end / link.bytes_per_second
                together = np.bincount(nodes, alone) / (link.at_once or np.inf)
                found[row] = np.maximum.reduce([found[row], alone, together[nodes]])
        return found

    def expected_seconds(self, busy: Floats) -> float:
        """Return how long moves take whose members use their links for `busy` seconds, one class after the other."""
        longest = float(busy.sum(0).max(initial=0.0))
        return self.overhead_seconds + self.overhead_factor * longest if longest else 0.0

    def seconds(self, source: Ints, target: Ints, nbytes: Ints) -> LinkSeconds:
        """Return how long the given traffic takes, by class of links.

        source, target, nbytes: the bytes from each source member to each target member, as one message. If source and
            target are equal, the entry is a copy inside the member.
        """
        out_of, into = self.node_index(source), self.node_index(target)
        where = np.where(out_of != into, NETWORK, np.where(source == target, MEMORY, NODE))
        members, nodes = self._places
        shape = len(CLASSES), len(members)
        ends = [np.ravel_multi_index((where, np.searchsorted(members, end)), shape) for end in (source, target)]
        sums = [np.bincount(end, nbytes, shape[0] * shape[1]).reshape(shape).astype(np.float64) for end in ends]
        counts = [np.bincount(end, minlength=shape[0] * shape[1]).reshape(shape) for end in ends]
        busy = self.busy_seconds(nodes, *sums)
        latency = np.array([[getattr(self, name).latency_seconds] for name in CLASSES])
        memory, node, network = busy.max(1, initial=0.0).tolist()
        return LinkSeconds(memory, node, network, self.expected_seconds(busy + np.maximum(*counts) * latency))


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overhead:
    """Time that moves take in addition to the transfer over links.

    seconds: the part that does not depend on the number of bytes.
    factor: how many times longer moves take than the transfer alone.
    """

    seconds: Annotated[float, Field(ge=0)] = 0.0
    factor: Annotated[float, Field(ge=1)] = OVERHEAD


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class ClusterFile:
    """The keys of a cluster file: either `members`, or `nodes` and `members_per_node`.

    members: for each node its members, or their number.
    """

    node: LinkClass
    network: LinkClass
    memory: LinkClass = Topology.memory
    overhead: Overhead = Overhead()
    nodes: Count | None = None
    members_per_node: Count | None = None
    members: dict[str, list[Annotated[int, Field(ge=0)]]] = field(default_factory=dict)
    device_memory_bytes: Positive | None = None

    def node_of(self, file: str) -> dict[int, str]:
        """Return the map from member to node. Raises ConfigError if there is none, or one member has two nodes."""
        if not self.members and self.nodes is not None and self.members_per_node is not None:
            return dict(Topology.uniform(self.nodes, self.members_per_node).node_of)
        if not self.members or self.nodes is not None or self.members_per_node is not None:
            raise ConfigError(
                f'{file}: give either nodes and members_per_node, or a table [members] with lines such as "a" = [0, 1]'
            )
        found: dict[int, str] = {}
        for name, members in self.members.items():
            for member in members:
                if member in found:
                    raise ConfigError(
                        f"{file}: members.{name}: member {member} is on {found[member]} as well; remove it from one"
                    )
                found[member] = name
        return found


def _cluster_in(path: Path) -> ClusterFile:
    """Read a cluster file. Raises ConfigError if it cannot be read or a key is wrong."""
    if sys.version_info < (3, 11):
        raise ConfigError(f"{path}: cluster files need Python 3.11 for TOML; give the bandwidth as an option instead")
    import tomllib

    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give a file that `ds-dynatrain probe` wrote") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: this is no TOML ({error}); correct the line that it names") from error
    try:
        return TypeAdapter(ClusterFile).validate_python(text)
    except ValidationError as error:
        errors = error.errors(include_url=False)  # a misspelt key explains a missing one
        first = next((each for each in errors if each["type"].startswith("unexpected")), errors[0])
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key}: {_mistake(first['type'], first['msg'], first['input'])}") from error


def _mistake(kind: str, said: str, value: object) -> str:
    """Return a message that says what is wrong with a key of a cluster file, and what to do."""
    if kind.startswith("unexpected"):
        return "there is no such key; remove it, or correct its name"
    if kind.startswith("missing"):
        return "this key is needed and is not there; add it"
    return f"expected {said.replace('Input should be ', '').removeprefix('a valid ')}, got {value!r}; correct it"
