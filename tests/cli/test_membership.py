"""`ds-dynatrain coordinator` and `ds-dynatrain status`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ds_dynatrain.cli.jobs import nodes
from ds_dynatrain.cli.main import app
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.environment import job_token
from ds_dynatrain.elastic.messages import Agent, Leave, Report
from ds_dynatrain.errors import ConfigError
from tests.elastic.served import SECONDS, Served, enter, serving, told

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("DYNATRAIN_TOKEN", "DYNATRAIN_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def wait_until(holds: Callable[[], bool]) -> None:
    """Poll until something holds; AssertionError if it does not in time."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def mine() -> str:
    """What a job has that was given no token."""
    return job_token(Address("127.0.0.1", 0))[0]


def test_status_for_eyes_and_for_programs() -> None:
    with serving(token=mine(), job="run 7") as served:
        assert "has not started" in run("status", served.address).stdout
        a = served.join("a")
        enter(a, told(a).generation)
        a.send(Report(ready=True, entered=1, step=12, layout="data=1 [x]", pause_ms=84, protected="yes"))
        b = served.join("b")
        told(a)
        text = run("status", served.address).stdout
        assert "job 'run 7': running; generation 2, 2 members, 1 to 4 nodes" in text
        assert "a/0" in text and "data=1 [x]" in text and "84 ms" in text and "yes" in text and "b joined" in text
        said = json.loads(run("status", served.address, "--json").stdout)
        assert said["generation"] == 2 and said["ranks"] == ["a/0", "b/0"] and said["members"][0]["step"] == 12
        a.send(Report(ready=True, entered=1, step=13, protected="no"))
        says(served, "job 'run 7': running, unprotected; generation 2")
        for one, step in ((a, 13), (b, 0)):
            one.send(Report(ready=True, entered=step and 1, step=step))  # heard of just now: its end is a death
        a.close()
        b.close()
        says(served, "job 'run 7': lost: no member has its state any more; ")


def says(served: Served, words: str) -> None:
    """The status comes to say so."""
    end = time.monotonic() + SECONDS
    while words not in (text := run("status", served.address).stdout):
        assert time.monotonic() < end, text
        time.sleep(0.02)


def test_names_of_members_are_whole_in_a_narrow_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what `leave` asks for."""
    monkeypatch.setenv("COLUMNS", "80")
    with serving(token=mine()) as served:
        a = served.join("a-node-with-a-long-name-19030")
        enter(a, told(a).generation)
        a.send(Report(ready=True, entered=1, step=12, layout="data=1 zero_stage=1", pause_ms=84))
        assert "0     a-node-with-a-long-name-19030/0 " in run("status", served.address).stdout


def test_status_is_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without COLUMNS and without a terminal nothing is cut or folded."""
    monkeypatch.delenv("COLUMNS")
    layout = "data=2 pipe=2 tensor=2 expert=2 sequence=2 zero_stage=1 offload=cpu"
    with serving(token=mine(), job="run 7") as served:
        a = served.join("a-node-with-a-long-name-19030")
        enter(a, told(a).generation)
        a.send(Report(ready=True, entered=1, step=12, layout=layout, pause_ms=84, waits_for="member 1, at the move"))
        (line,) = [line for line in run("status", served.address).stdout.splitlines() if "19030/0 " in line]
        assert layout in line and "84 ms" in line and line.rstrip().endswith("member 1, at the move")


def test_status_folds_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with serving(token=mine()) as served:
        a = served.join("a")
        enter(a, told(a).generation)
        a.send(Report(ready=True, entered=1, step=12, layout="data=2 zero_stage=1", waits_for="member 1, at the move"))
        text = run("status", served.address).stdout
    assert "…" not in text
    assert all(part in text for part in ("data=2", "zero_stage=1", "member 1,", "move"))


def test_status_names_nodes_that_start() -> None:
    """A node whose workers still import is known by its agent, from its connection to its first worker."""
    with serving(least=2, token=mine()) as served:
        agent = served.connect()
        agent.send(Agent(node="b"))
        wait_until(lambda: served.status().starting != ())
        assert "b: its workers start, for 0 s so far" in run("status", served.address).stdout
        worker = served.join("b")
        wait_until(lambda: served.status().starting == ())
        assert "its workers start" not in run("status", served.address).stdout
        worker.close()
        agent.close()


def test_status_of_nothing_is_an_error() -> None:
    with serving(token=mine()) as served:
        address = served.address
    result = run("status", address)
    assert result.exit_code == 2 and f"no coordinator answers at {address}" in result.stderr
    assert run("status", "nowhere:x").exit_code == 2


def test_status_needs_the_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a token of some length")
    file.chmod(0o600)
    with serving(token=file.read_text()) as served:
        refused = run("status", served.address)
        assert refused.exit_code == 2 and "the token is missing" in refused.stderr
        assert run("status", served.address, "--token-file", file).exit_code == 0


def test_a_node_is_told_to_leave() -> None:
    with serving(least=2, token=mine()) as served:
        workers = [served.join("a", rank, 2) for rank in range(2)]
        other = served.join("b")
        for one in (*workers, other):
            told(one)
        result = run("leave", served.address, "a")
        assert result.exit_code == 0 and "told to leave: a/0, a/1" in result.stdout
        assert [one.receive(SECONDS) for one in workers] == [Leave(), Leave()]
        unknown = run("leave", served.address, "c")
        assert unknown.exit_code == 2 and "no worker of node 'c' is in this job; nodes: a, b" in unknown.stderr
        assert run("leave", served.address, "a/0").exit_code == 2
    assert run("leave", served.address, "a").exit_code == 2


def test_a_coordinator_without_a_token_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """None was given, and this user has no folder to make one in."""
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    result = run("coordinator", "0.0.0.0:0", "--nnodes", "1:2")
    assert result.exit_code == 2 and "DYNATRAIN_TOKEN_FILE" in result.stderr


def test_nodes() -> None:
    assert nodes("2:8") == (2, 8) and nodes("3") == (3, 3)
    for text in ("", "a", "2:x", ":3", "-1:2"):
        with pytest.raises(ConfigError, match="MIN:MAX"):
            nodes(text)


def test_a_coordinator_of_its_own(in_time: Callable[[float, float], None]) -> None:
    command = [sys.executable, "-m", "ds_dynatrain.cli", "coordinator", "127.0.0.1:0", "--nnodes", "1:2"]
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert "coordinator at 127.0.0.1:" in line
            address = line.split("coordinator at ")[1].split(",")[0]
            assert run("status", address).exit_code == 0
        finally:
            begin = time.monotonic()
            process.terminate()
            code = process.wait(SECONDS)
        assert code == 143, "also as process 1 of a container, which has no handler by default"
        in_time(time.monotonic() - begin, 2)
