"""A coordinator that announces itself in a file, and whoever looks for it there."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from ds_dynatrain.elastic import address as address_module
from ds_dynatrain.elastic.address import Address, Announced, Announcement, announced, read_endpoint
from ds_dynatrain.elastic.connection import Connection, ask_status, connect
from ds_dynatrain.elastic.environment import WorkerPlace
from ds_dynatrain.elastic.handler import NAME, create
from ds_dynatrain.elastic.hosting import CoordinatorHost
from ds_dynatrain.elastic.member import Member
from ds_dynatrain.elastic.rendezvous import AgentLine
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.errors import ConfigError, CoordinatorUnproved, ElasticError, MessageError
from tests.elastic.served import SECONDS, serving
from tools.nodes import Job, free_port

HERE = Address("127.0.0.1", 29400)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run-7.coordinator"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_module, "LOOK_SECONDS", 0.05)


def nothing() -> None:
    raise AssertionError("nobody has taken its place")


def written(file: Path, address: str, host: str = "", mark: str = "0") -> Announced:
    """An announcement of another coordinator."""
    said = Announcement(coordinator=address, host=host or socket.gethostname(), job="job", mark=mark)
    said.write(file)
    return Announced(file)


def test_what_an_endpoint_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_endpoint("10.0.0.1:1") == Address("10.0.0.1", 1)
    monkeypatch.chdir(tmp_path)
    found = read_endpoint("file:here/FILE")
    assert found == Announced(tmp_path / "here" / "FILE") and read_endpoint(str(found)) == found
    assert read_endpoint("file:///shared/FILE") == Announced(Path("/shared/FILE"))
    for text in ("", "file:", "a:b"):
        with pytest.raises(ConfigError, match="expected"):
            read_endpoint(text)


def test_it_is_there_until_the_job_has_finished(file: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no coordinator has announced itself in this file yet"):
        Announced(file).locate(True)
    with announced(file, HERE, "run 7", nothing):
        assert Announced(file).locate(False) == HERE
        assert [each.name for each in file.parent.iterdir()] == [file.name], "nothing half written lies about"
        assert file.stat().st_mode & 0o022 == 0
        file.unlink()
        while not file.exists():  # who has cleaned up the folder has made a mistake
            pass
    assert not file.exists()
    with pytest.raises(ZeroDivisionError), announced(file, HERE, "", nothing):
        raise ZeroDivisionError
    assert file.exists(), "after an error one may be started again, and others look for it meanwhile"


def test_the_newest_wins(file: Path) -> None:
    replaced = threading.Event()
    with pytest.raises(ElasticError, match=r"a newer coordinator, at 127\.0\.0\.1:2, has taken"):
        with announced(file, HERE, "", replaced.set):
            written(file, "127.0.0.1:2")
            assert replaced.wait(SECONDS)
    assert Announced(file).locate(False) == Address("127.0.0.1", 2), "the newer one's is not taken away"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError), announced(tmp_path / "nowhere" / "file", HERE, "", nothing):
        raise AssertionError


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"10.0.0.1:29400\n",
        b"[1]",
        b"{}",
        b'{"coordinator": 1, "host": "", "job": "", "mark": ""}',
        b"\xff",
        b"[" * 4000,
    ],
)
def test_other_files_are_no_announcement(file: Path, body: bytes) -> None:
    file.write_bytes(body)
    with pytest.raises(MessageError, match="is no announcement"):
        Announced(file).locate(True)


def test_too_long_and_nonsense(file: Path) -> None:
    written(file, "127.0.0.1:1")
    said = json.loads(file.read_text())
    for change in ({"job": "x" * 5000}, {"coordinator": "a:b"}):
        file.write_text(json.dumps({**said, **change}))
        with pytest.raises(MessageError):
            Announced(file).locate(True)


def test_an_address_that_only_another_machine_reaches(file: Path) -> None:
    with pytest.raises(ConnectionError, match="on elsewhere alone"):
        written(file, "127.0.0.1:1", host="elsewhere").locate(True)


def test_another_machine_is_believed_with_a_token_only(file: Path) -> None:
    where = written(file, "10.0.0.1:1")
    assert where.locate(True) == Address("10.0.0.1", 1)
    with pytest.raises(CoordinatorUnproved, match="DYNATRAIN_TOKEN_FILE"):
        where.locate(False)


@pytest.mark.parametrize(("asked", "told"), [("0.0.0.0", socket.gethostname()), ("localhost", "127.0.0.1")])
def test_what_a_coordinator_announces(asked: str, told: str) -> None:
    host = CoordinatorHost(Address(asked, 0), Settings(1, 2), "a token of some length")
    assert host.reachable == Address(told, host.address.port) and host.address.port > 0
    host.end()
    host.run()  # it returns at once


def test_who_waits_is_told_for_what(file: Path) -> None:
    with pytest.raises(TimeoutError, match=rf"no coordinator answers at file:{file} within 0 s .*no coordinator has"):
        connect(Announced(file), None, "", 0)
    conf = {"join_timeout": "0", "is_host": "0"}
    with pytest.raises(RendezvousConnectionError, match="has announced itself in this file yet"):
        create(RendezvousParameters(NAME, f"file:{file}", "job", 1, 4, **conf)).next_rendezvous()
    with pytest.raises(ConfigError, match="--announce"):
        create(RendezvousParameters(NAME, f"file:{file}", "job", 1, 4, is_host="1"))


def test_who_waits_finds_it(file: Path) -> None:
    with serving() as served:
        written(file, f"127.0.0.1:{free_port()}")  # one that was killed
        timer = threading.Timer(0.3, written, (file, str(served.address)))
        timer.start()
        connection = connect(Announced(file), None, "", SECONDS)
        assert connection.address == served.address
        assert ask_status(Announced(file)).max_nodes == 4
        connection.close()
        timer.join()


def test_members_and_agents_follow_it(file: Path) -> None:
    with serving() as first:
        where = written(file, str(first.address))
        member = Member(WorkerPlace("a", 0, 1, where), orphan_seconds=SECONDS)
        member.start(SECONDS)
        member.ready()
        line = AgentLine(Connection.open(where, None), "a", where, None, "")
        line.start()
        world = member.wait_for_world(seconds=SECONDS)
        member.enter(world)
    with serving() as second:
        written(file, str(second.address), mark="1")
        status = second.status()
        while not (status.members and status.generation >= world.generation):
            status = second.status()
        assert [one.member for one in status.members] == ["a/0"]
    line.close()
    member.stop()


@pytest.mark.full
def test_a_job_whose_coordinator_moves(tmp_path: Path) -> None:
    """Under torchrun: at another port, while the first one is still there."""
    file = tmp_path / "coordinator"
    job = Job(tmp_path, nodes="2:3", announce=file)
    try:
        job.node("a", is_host=0)
        job.coordinator("first")
        job.node("b", is_host=0)
        before = job.settled(2)
        job.coordinator("second")
        assert job.code("first") == 2 and "has taken the place" in (tmp_path / "first.log").read_text()
        job.node("c", is_host=0)
        after = job.settled(3, after=before.generation)
        assert {one.pid for one in before.members} < {one.pid for one in after.members}
        job.end()
        assert [job.code(name) for name in ("a", "b", "c", "second")] == [0] * 4, job.logs()
    finally:
        job.clean_up()
    assert not file.exists()
