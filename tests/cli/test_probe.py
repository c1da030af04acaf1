"""`ds-dynatrain probe`: links that processes of torchrun measure, and its refusals."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_dynatrain.cli.main import app
from ds_dynatrain.cli.probe import LAUNCH
from ds_dynatrain.plan import Topology
from tests.elastic.warm import Warm, nursery

SECONDS = 120.0
MODULE = ("-m", "ds_dynatrain.cli", "probe", "--write")

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python reads TOML from 3.11 on")


def start(log: Path, words: Sequence[object], node: str | None = None) -> Warm:
    environment = {name: value for name, value in os.environ.items() if name not in (*LAUNCH, "DYNATRAIN_NODE")}
    if node is not None:
        environment["DYNATRAIN_NODE"] = node
    with log.open("ab") as file:
        command = ["torch.distributed.run", *map(str, words)]
        return nursery().start(command, environment, Path.cwd(), file.fileno())


def check_ends(launches: Sequence[Warm], log: Path) -> None:
    try:
        codes = [launch.wait(SECONDS) for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    assert codes == [0] * len(launches), log.read_text()


def test_two_members_of_a_node(tmp_path: Path) -> None:
    file, log = tmp_path / "cluster.toml", tmp_path / "log"
    check_ends([start(log, ["--standalone", "--nproc-per-node=2", *MODULE, file])], log)
    found, text = Topology.read(file), file.read_text()
    assert text in log.read_text() and "network: not measured" in text
    assert [*found.node_of] == [0, 1] and len(found.names) == 1
    assert found.network == Topology.network
    assert found.overhead_factor >= 1 and 0 < found.overhead_seconds < 1
    for link in (found.memory, found.node):
        assert 1e7 < link.bytes_per_second < 1e12 and 0 < link.latency_seconds < 0.1


def test_three_members_on_two_nodes(tmp_path: Path) -> None:
    file, log = tmp_path / "cluster.toml", tmp_path / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=probe"]
    place += ["--local-addr=127.0.0.1"]
    words = {name: [*place, f"--nproc-per-node={count}", *MODULE, file] for name, count in (("a", 2), ("b", 1))}
    check_ends([start(log, given, name) for name, given in words.items()], log)
    found = Topology.read(file)
    assert sorted(found.node_of.values()) == ["a", "a", "b"]
    assert "not measured" not in file.read_text()
    assert 1e7 < found.network.bytes_per_second < 1e12


def test_outside_of_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
    found = CliRunner().invoke(app, ["probe", "--write", str(tmp_path / "cluster.toml")])
    assert found.exit_code == 2
    assert re.search(r"RANK.* not set.*torchrun --nproc-per-node=MEMBERS -m ds_dynatrain.cli probe", found.output)
    assert not (tmp_path / "cluster.toml").exists()
