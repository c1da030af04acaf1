"""The coordinator on a real socket: what peers are told, and that no peer disturbs another."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds_dynatrain.elastic import address as address_module
from ds_dynatrain.elastic import coordinator as coordinator_module
from ds_dynatrain.elastic import door as door_module
from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.elastic.connection import NO_TAG, Channel, Connection
from ds_dynatrain.elastic.door import Peer
from ds_dynatrain.elastic.membership_machine import MembershipStateMachine
from ds_dynatrain.elastic.messages import (
    HEADER,
    LARGEST_MESSAGE,
    Agent,
    Announce,
    Bye,
    Changed,
    Fence,
    Hello,
    Message,
    Report,
    encode,
)
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.elastic.token import read_token
from ds_dynatrain.errors import ConfigError, ElasticError, JobFinished, PeerRefused
from tests.elastic.by_hand import greeted, raw
from tests.elastic.served import SECONDS, enter, serving, told

TOKEN = "not a very good secret"


def test_join_leave_kill_and_end() -> None:
    with serving(least=2) as served:
        a, b = served.join("a"), served.join("b")
        assert told(a) == told(b)
        for one in (a, b):
            enter(one, 1)
        c = served.join("c")
        assert told(a).members == told(b).members == told(c).members == ("a/0", "b/0", "c/0")
        for one in (a, b, c):
            enter(one, 2)
        b.close()
        world = told(a)
        assert (world.change, world.members, world.lost) == ("failure", ("a/0", "c/0"), ("b/0",))
        assert told(c) == world
        for one in (a, c):
            enter(one, 3)
        c.send(Report(ready=True, leaving=True, entered=3))
        assert told(c).leaving == ("c/0",) and told(a).members == ("a/0",)
        c.send(Bye(newest=4, has_left=True))
        enter(a, 4)
        status = served.status()
        assert [(one.member, one.rank, one.phase) for one in status.members] == [("a/0", 0, "working")]
        assert status.generation == 4 and status.paused and len(status.changes) == 4
        a.send(Bye())
        served.thread.join(SECONDS)
        assert not served.thread.is_alive(), "a coordinator ends with its job"


def test_death_is_told_at_once(in_time: Callable[[float, float], None]) -> None:
    with serving() as served:
        a = served.join("a")
        enter(a, told(a).generation)
        b = served.join("b")
        told(a), told(b)
        b.close()
        begin = time.monotonic()
        assert told(a).change == "failure"
        in_time(time.monotonic() - begin, 1)


def test_a_silent_worker_is_fenced_through_its_agent(in_time: Callable[[float, float], None]) -> None:
    """Once another one has entered a generation without it."""
    with serving(least=2, silent_seconds=0.4) as served:
        agent = served.connect()
        agent.send(Agent(node="a"))
        a, b = served.join("a", pid=4711), served.join("b")
        assert told(a) == told(b)
        enter(a, 1)
        begin, entered = time.monotonic(), 1
        while time.monotonic() - begin < SECONDS:
            agent.send(Agent(node="a"))
            enter(b, entered)
            try:
                entered = told_within(b, 0.05)
            except TimeoutError:
                pass
            try:
                assert agent.receive(0.05) == Fence(member="a/0", pid=4711)
                break
            except TimeoutError:
                continue
        assert entered == 2 and time.monotonic() - begin > 0.3
        in_time(time.monotonic() - begin, 2)
        with pytest.raises(PeerRefused, match="no heartbeat"):
            a.receive(SECONDS)
        again = served.connect()
        again.send(Announce(node="a", local_rank=0, local_size=1, pid=4711))
        with pytest.raises(PeerRefused, match="was given up"):
            again.receive(SECONDS)


def told_within(connection: Connection, seconds: float) -> int:
    """The number of the next generation that a worker is told of; TimeoutError if none comes."""
    message = connection.receive(seconds)
    assert isinstance(message, Changed), message
    return message.world.generation


def test_a_worker_that_hung_while_the_coordinator_was_away_is_fenced() -> None:
    """A new coordinator has never heard it; its agent may come back later than the decision."""
    with serving() as served:
        a, b = served.join("a"), served.join("b")
        world = told(a)
        while len(world.members) < 2:
            enter(a, world.generation)
            world = told(a)
        a.close(), b.close()
    with serving() as served:
        a = served.connect()
        a.send(Announce(node="a", local_rank=0, local_size=1, pid=1, world=world))
        a.send(Report(ready=True, entered=world.generation))
        while told(a).change != "failure":
            pass
        agent = served.connect()
        agent.send(Agent(node="b"))
        assert agent.receive(SECONDS) == Fence(member="b/0", pid=None)


def test_waiting_members_are_sent_home() -> None:
    with serving(most=1) as served:
        a, spare = served.join("a"), served.join("b")
        told(a)
        a.send(Bye())
        with pytest.raises(JobFinished):
            spare.receive(SECONDS)
        late = served.connect()
        late.send(Announce(node="c", local_rank=0, local_size=1, pid=1))
        with pytest.raises(JobFinished):
            late.receive(SECONDS)


class TestToken:
    @pytest.mark.parametrize("token", [None, "some other secret text"])
    def test_without_it_nobody_comes_in(self, token: str | None) -> None:
        with serving(token=TOKEN) as served:
            with pytest.raises(PeerRefused, match="token"):
                Connection.open(served.address, token)
            assert told(served.join("a")).generation == 1

    def test_files(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        with pytest.raises(ConfigError, match="cannot be read"):
            read_token(file)
        file.write_text("short\n")
        file.chmod(0o600)
        with pytest.raises(ConfigError, match="at least 16") as caught:
            read_token(file)
        assert "short" not in str(caught.value)
        file.write_text(f"  {TOKEN}\n")
        assert read_token(file) == TOKEN

    @pytest.mark.parametrize(
        ("mode", "owner", "others"),
        [
            (0o644, None, "every user"),
            (0o602, None, "every user"),
            (0o640, None, "its group"),
            (0o640, 1, ""),
            (0o644, 1, "every user"),
        ],
    )
    def test_files_that_others_read(self, tmp_path: Path, mode: int, owner: int | None, others: str) -> None:
        file = tmp_path / "the token"
        file.write_text(TOKEN)
        file.chmod(mode)
        if owner is not None and os.geteuid():
            pytest.skip("only root can give files away")
        if owner is not None:
            os.chown(file, owner, -1)
        if others:
            with pytest.raises(ConfigError, match=f"{others}.* can read or change it; chmod 600 '{file}'") as caught:
                read_token(file)
            assert TOKEN not in str(caught.value)
        else:
            assert read_token(file) == TOKEN


def test_without_a_token_only_this_machine_is_listened_to() -> None:
    with pytest.raises(ElasticError, match="DYNATRAIN_TOKEN_FILE"):
        listen(Address("0.0.0.0", 0), is_guarded=False)
    listen(Address("0.0.0.0", 0), is_guarded=True).close()
    listen(Address("localhost", 0), is_guarded=False).close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node-1:29500", Address("node-1", 29500)),
        ("node-1", Address("node-1", address_module.DEFAULT_PORT)),
        ("[::1]:80", Address("::1", 80)),
        ("[fe80::1]", Address("fe80::1", address_module.DEFAULT_PORT)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize("text", ["", ":80", "a:b", "a:70000", "a:-1", "[::1", "::1", "a:٣"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        Address.parse(text)


def test_another_job_is_refused() -> None:
    with serving(job="one") as served:
        with pytest.raises(PeerRefused, match=r"'one', not of 'two'"):
            served.connect(job="two")


def test_who_only_asks_gives_a_job_no_name() -> None:
    with serving() as served:
        served.connect(job="not your job").close()  # it says hello, and no more
        first = served.connect(job="job")
        first.send(Agent(node="a"))
        while served.status().job != "job":
            pass
        with pytest.raises(PeerRefused, match=r"'job', not of 'another'"):
            served.connect(job="another")


def test_a_name_that_was_given_meanwhile_counts() -> None:
    with serving() as served:
        late = served.connect(job="another")
        first = served.connect(job="job")
        first.send(Agent(node="a"))
        while served.status().job != "job":
            pass
        late.send(Agent(node="b"))
        with pytest.raises(PeerRefused, match=r"'job', not of 'another'"):
            while True:
                late.receive(5)


HELLO = Hello(nonce="0" * 32)
STRANGE: dict[str, bytes] = {
    "nothing": b"",
    "a browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a length without end": HEADER.pack(0xFFFFFFFF),
    "more than a greeting": HEADER.pack(5000) + b"x" * 5000,
    "an empty message": HEADER.pack(0) + NO_TAG,
    "half a message": encode(HELLO)[:9],
    "no tag": encode(HELLO),
    "no proof": encode(HELLO) + NO_TAG,
    "no greeting": encode(Report(ready=True)) + NO_TAG,
}
"""What is said in place of a greeting."""
HOSTILE: dict[str, tuple[Message, ...]] = {
    "a greeting twice": (HELLO,),
    "a report before an announcement": (Report(),),
    "an announcement that lies": (Announce(node="x", local_rank=5, local_size=2, pid=1),),
    "the id of another": (Announce(node="a", local_rank=0, local_size=1, pid=1),),
    "a world from nowhere": (Announce(node="y", local_rank=0, local_size=1, pid=1), Report(entered=99)),
}
"""What is said after one."""


def test_hostile_peers_disturb_nobody() -> None:
    with serving(least=2) as served:
        a, b = served.join("a"), served.join("b")
        for one in (a, b):
            enter(one, told(one).generation)
        for wire in STRANGE.values():
            with raw(served.address) as peer:
                peer.link.sendall(wire)
                peer.link.shutdown(socket.SHUT_WR)
                peer.rest()
        for messages in HOSTILE.values():
            with greeted(served.address) as peer:
                for message in messages:
                    peer.send(message)
                peer.link.shutdown(socket.SHUT_WR)
                assert b"refused" in peer.rest()
        with greeted(served.address) as peer:  # a huge message that never ends
            peer.link.sendall(HEADER.pack(LARGEST_MESSAGE) + b"x" * 4096)
        status = served.status()
        assert status.generation == 1 and [one.member for one in status.members] == ["a/0", "b/0"]
        c = served.join("c")
        assert told(a) == told(b) == told(c)


def test_random_bytes_disturb_nobody() -> None:
    chance = random.Random(7)
    with serving() as served:
        a = served.join("a")
        enter(a, told(a).generation)
        for _ in range(200):
            knows = chance.random() < 0.5
            with (greeted if knows else raw)(served.address) as peer:
                said = (
                    STRANGE.values() if not knows else [b"".join(map(peer.sealed, each)) for each in HOSTILE.values()]
                )
                wire = bytearray(chance.choice(list(said)) + chance.randbytes(chance.randrange(40)))
                for _ in range(chance.randrange(4)):
                    if wire:
                        wire[chance.randrange(len(wire))] = chance.randrange(256)
                peer.link.sendall(wire)
                if chance.random() < 0.5:
                    peer.link.shutdown(socket.SHUT_WR)
        status = served.status()
        assert "a/0" in {one.member for one in status.members}
        assert served.status().members[0].phase == "working"


def test_who_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch, in_time: Callable[[float, float], None]) -> None:
    monkeypatch.setattr(door_module, "PROVE_SECONDS", 0.2)
    with serving() as served, raw(served.address) as peer:
        begin = time.monotonic()
        peer.rest()
        in_time(time.monotonic() - begin, 2)


def test_many_strangers_keep_no_member_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait longest are sent away."""
    monkeypatch.setattr(door_module, "MOST_STRANGERS", 8)
    monkeypatch.setattr(door_module, "PROVE_SECONDS", 600)
    with serving(token=TOKEN) as served:
        a = served.join("a")
        enter(a, told(a).generation)
        strangers = [raw(served.address) for _ in range(30)]
        a.send(Report(ready=True, entered=1, step=5))
        for _ in range(20):
            strangers.append(raw(served.address))
            assert served.status().members
        while served.status().members[0].step != 5:
            pass
        for one in strangers[:20]:
            one.rest()  # to its end
        for one in strangers:
            one.link.close()


def test_peers_that_come_together_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only four may be unproved at once, sixty-four connect in one moment, and each of them is let in."""
    monkeypatch.setattr(door_module, "MOST_STRANGERS", 4)
    monkeypatch.setattr(door_module, "STRANGERS_A_SECOND", 1)
    with serving(token=TOKEN) as served, ThreadPoolExecutor(64) as pool:
        begin = threading.Barrier(64)

        def ask(_: int) -> int:
            begin.wait()
            return served.status().generation

        assert list(pool.map(ask, range(64))) == [0] * 64


FLOOD = """
import socket, sys, time
begin, count, held = time.monotonic(), 0, []
while time.monotonic() - begin < 2:
    for _ in range(int((time.monotonic() - begin) * 3000) - count):
        count += 1
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex(("127.0.0.1", int(sys.argv[1])))
    while len(held) > 800:
        held.pop(0).close()
    time.sleep(0.002)
"""


def test_honest_peers_come_in_beside_thousands_of_strangers(in_time: Callable[[float, float], None]) -> None:
    found, before = list[float](), len(os.listdir("/proc/self/fd"))
    with serving(token=TOKEN) as served:
        with subprocess.Popen([sys.executable, "-c", FLOOD, str(served.address.port)]) as flood:
            while flood.poll() is None:
                begin = time.monotonic()
                served.status()
                found.append(time.monotonic() - begin)
                assert len(os.listdir("/proc/self/fd")) < before + door_module.MOST_STRANGERS + 50
                time.sleep(0.02)
        assert flood.returncode == 0
    in_time(max(found), 1)


def test_strangers_get_a_line_a_second_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with serving(token=TOKEN) as served:
        for _ in range(30):
            with pytest.raises(PeerRefused):
                Connection.open(served.address, None)
        a = served.connect()
        a.send(Report())
        with pytest.raises(PeerRefused, match="comes after hello"):
            a.receive(SECONDS)
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(lines) < 15 and "comes after hello" in lines[-1], "what a member does wrong is always told"


def test_the_log_says_how_many_there_were(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(door_module.time, "monotonic", lambda: now[0])
    complaints = door_module.Complaints()
    for moment in (0.1, 0.2, 0.3, 1.2, 5.0):
        now[0] = moment
        complaints.say(f"at {moment}")
    assert [record.getMessage() for record in caplog.records] == [
        "at 0.1",
        "at 1.2 (and 2 more like it before)",
        "at 5.0",
    ]


def test_without_descriptors_the_log_stays_short(caplog: pytest.LogCaptureFixture) -> None:
    """A coordinator that can open no file more says so once a second, and goes on as soon as it can."""
    with serving() as served:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = [socket.socket() for _ in range(3)]
        highest, held = max(map(int, os.listdir("/proc/self/fd"))), [os.open(os.devnull, os.O_RDONLY)]
        while held[-1] < highest:  # no number below the limit is free
            held.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1], limit[1]))
        try:
            for one in waiting:
                one.connect((served.address.host, served.address.port))
            time.sleep(0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            for each in held:
                os.close(each)
        assert not served.status().members
        for one in waiting:
            one.close()
    said = [record.getMessage() for record in caplog.records if "ulimit -n" in record.getMessage()]
    assert len(said) == 1


def test_what_is_owed_to_nodes_that_never_come_back_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "MOST_OWED", 3)
    coordinator = coordinator_module.Coordinator(MembershipStateMachine(Settings(1, 1), "a", 0.0), 1)
    for number in range(9):
        coordinator._fence(f"n{number}", Fence(member=f"n{number}/0", pid=1))
    assert list(coordinator._owed) == ["n6", "n7", "n8"]


def test_who_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MOST_UNREAD", 1 << 20)

    async def case() -> None:
        here, there = socket.socketpair()
        with there:
            reader, writer = await asyncio.open_connection(sock=here)
            peer = Peer(reader, writer, "a", Channel(None, ("", ""), "coordinator"))
            for _ in range(8):
                peer.send_bytes(b"x" * (1 << 18))
                if writer.is_closing():
                    return
        raise AssertionError("2 MB lie there unread, and the connection is still open")

    asyncio.run(case())


def test_no_descriptor_is_left() -> None:
    with serving() as served:
        a = served.join("a")
        enter(a, told(a).generation)
        served.status()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            served.status()
            with raw(served.address) as peer:
                peer.link.sendall(b"GET / HTTP/1.1\r\n\r\n")
        served.status()
        time.sleep(0.1)
        assert len(os.listdir("/proc/self/fd")) <= before + 1
