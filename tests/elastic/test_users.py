"""Without a token on one machine: whose processes a coordinator lets in, and who gives a job its name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.messages import Agent
from ds_dynatrain.elastic.users import connected_user, tells_users
from ds_dynatrain.errors import PeerRefused
from tests.elastic.served import enter, serving, told

ROOT = Path(__file__).parents[2]
STRANGER = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

ASKING = """
import os, sys
import encodings.idna, ds_dynatrain.elastic.query as query
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.connection import Connection
from ds_dynatrain.elastic.messages import Agent, Dismiss
from ds_dynatrain.errors import PeerRefused
address, user, what = Address(sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), sys.argv[4]
os.setgid(user)
os.setuid(user)
try:
    if what == "name":
        Connection.open(address, None, "not your job").send(Agent(node="x"))
    if what == "status":
        query.ask_status(address)
    if what == "leave":
        query.ask_to_leave(address, "a")
except PeerRefused as error:
    print("refused:", error)
else:
    print("let in")
"""
HASTY = """
import encodings.idna, os, socket, sys
from ds_dynatrain.elastic.messages import Dismiss, Hello, encode
os.setuid(int(sys.argv[3]))
for _ in range(20):
    peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    peer.sendall(encode(Hello(nonce="0" * 32)) + bytes(32) + encode(Dismiss(node="a")) + bytes(32))
    peer.close()
"""


def by_another_user(code: str, address: Address, *words: str) -> str:
    command = [sys.executable, "-c", code, address.host, str(address.port), str(STRANGER), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


@only_root
@pytest.mark.parametrize("what", ["name", "status", "leave"])
def test_another_user_of_the_machine_is_refused(what: str) -> None:
    with serving() as served:
        a = served.join("a")
        enter(a, told(a).generation)
        said = by_another_user(ASKING, served.address, what)
        assert said.startswith("refused:") and f"user {STRANGER}" in said and "DYNATRAIN_TOKEN_FILE" in said, said
        served.connect(job="job").close()
        with pytest.raises(TimeoutError):
            a.expect(0.2)


@only_root
def test_another_user_may_come_in_with_the_token() -> None:
    """Then the token says who belongs to the job."""
    with serving(token="a token of some length") as served:
        assert "the token is missing" in by_another_user(ASKING, served.address, "status")


@only_root
def test_another_user_who_leaves_at_once_is_refused() -> None:
    """The kernel says root of what nobody holds any more."""
    with serving() as served:
        a = served.join("a")
        enter(a, told(a).generation)
        by_another_user(HASTY, served.address)
        with pytest.raises(TimeoutError):
            a.expect(0.3)


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
                late.expect(5)


@pytest.mark.parametrize(
    ("listens", "connects"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::ffff:127.0.0.1"), ("::1", "::1")]
)
def test_whose_connection_it_is(listens: str, connects: str) -> None:
    def family(host: str) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in host else socket.AF_INET

    with socket.socket(family(listens), socket.SOCK_STREAM) as listener:
        try:
            listener.bind((listens, 0))
        except OSError:
            pytest.skip(f"this machine has no {listens}")
        listener.listen()
        assert tells_users(listener.getsockname())
        with socket.socket(family(connects), socket.SOCK_STREAM) as peer:
            peer.connect((connects, listener.getsockname()[1]))
            link, _ = listener.accept()
            there, here = link.getpeername(), link.getsockname()
            assert connected_user(there, here) == os.geteuid()
            assert connected_user(there, (here[0], 1)) is None
        assert connected_user(there, here) is None, "nobody holds the other end any more"
        link.close()
