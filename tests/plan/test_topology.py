"""Topologies: cluster files and their errors, and the seconds that traffic takes by class of link."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.plan import LinkClass, Topology
from ds_dynatrain.space.interval import ints

EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "a800-16x8.toml"
LINKS = "[node]\nbytes_per_second = 2\n[network]\nbytes_per_second = 1\n"
GB = 10**9

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python reads TOML from 3.11 on")


def test_the_example() -> None:
    topology = Topology.read(EXAMPLE)
    assert (len(topology.node_of), len(topology.names), topology.network.at_once) == (128, 16, 8)
    assert topology.node_index(ints([0, 7, 8, 127])).tolist() == [0, 0, 1, 15]


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path, names = tmp_path / "cluster.toml", {0: 'a "b"', 1: "c", 5: 'a "b"'}
    made = Topology(names, LinkClass(3e9), LinkClass(2e9, 1e-5, 2.0), LinkClass(1e9, 1e-4), 8e9, 1e-3, 1.5, str(path))
    path.write_text(made.to_toml("measured\ntoday"), encoding="utf-8")
    assert Topology.read(path) == made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x =", "no TOML"),
        ("nodes = 2", "node: this key is needed"),
        (f"nodes = 2\n{LINKS}", "give either nodes and members_per_node"),
        (f"nodes = 0\nmembers_per_node = 1\n{LINKS}", "nodes: expected greater than or equal to 1, got 0"),
        (f"nods = 2\n{LINKS}", "nods: there is no such key"),
        (f"{LINKS}at_onse = 2", "network.at_onse: there is no such key"),
        (f"{LINKS}latency_seconds = -1", "network.latency_seconds: expected greater than or equal to 0, got -1"),
        (f"{LINKS}[members]\na = [0]\nb = [1, 0]", "members.b: member 0 is on a as well"),
    ],
)
def test_a_wrong_file_is_refused_by_its_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Topology.read(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Topology.read(tmp_path / "none.toml")


def test_the_busiest_direction_of_the_busiest_member() -> None:
    topology = Topology.uniform(
        2, 2, memory=LinkClass(4e9), node=LinkClass(2e9), network=LinkClass(1e9), overhead_factor=1
    )
    found = topology.seconds(ints([0, 0, 1, 2, 3]), ints([0, 1, 0, 0, 0]), ints([8, 6, 4, 3, 2]) * GB)
    assert (found.memory, found.node, found.network) == (2.0, 3.0, 5.0)
    assert (found.floor, found.expected) == (5.0, 10.0)


def test_members_that_share_a_card() -> None:
    alone = Topology.uniform(2, 2, network=LinkClass(1e9))
    shared = Topology.uniform(2, 2, network=LinkClass(1e9, at_once=1))
    traffic = ints([0, 1]), ints([2, 3]), ints([3, 4]) * GB
    assert (alone.seconds(*traffic).network, shared.seconds(*traffic).network) == (4.0, 7.0)


def test_latency_is_expected_for_each_message() -> None:
    topology = Topology.uniform(1, 2, node=LinkClass(1e9, latency_seconds=0.5), overhead_factor=1)
    found = topology.seconds(ints([0] * 4), ints([1] * 4), ints([GB, 0, 0, 0]))
    assert (found.floor, found.expected) == (1.0, 3.0)


def test_overheads_are_expected_and_not_in_the_floor() -> None:
    topology = Topology.uniform(1, 2, node=LinkClass(1e9), overhead_seconds=0.5, overhead_factor=2.0)
    found = topology.seconds(ints([0]), ints([1]), ints([3 * GB]))
    assert (found.floor, found.expected) == (3.0, 6.5)


def test_no_traffic_takes_no_time() -> None:
    nothing = np.empty(0, np.int64)
    assert Topology.uniform(1, 1).seconds(nothing, nothing, nothing).expected == 0.0


def test_a_member_outside_of_the_cluster() -> None:
    with pytest.raises(ConfigError, match="2 members on 1 nodes, and member 2 is not among them"):
        Topology.uniform(1, 2).seconds(ints([0]), ints([2]), ints([1]))
