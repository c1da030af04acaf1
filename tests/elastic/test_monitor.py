"""The monitoring port on a real socket: what it tells, to whom, and that no reader disturbs the job."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ds_dynatrain.elastic import coordinator
from ds_dynatrain.elastic import view as feed
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.messages import LONGEST_STACKS, MOST_LINES, Report, Show, Shown, Tally
from ds_dynatrain.elastic.token import Reading
from ds_dynatrain.elastic.view import View
from ds_dynatrain.errors import ConfigError, ElasticError
from ds_dynatrain.monitoring import page, server
from tests.elastic.served import ANY, SECONDS, Served, enter, serving, told
from tests.elastic.watched import READERS, fetched, metrics, status, switched

PUBLISHED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of what uPlot 1.6.32 has published."""
ROOT = Path(__file__).parents[2]
JOB = "the job's own token"
KNOWS = f"Authorization: Bearer {READERS}\r\n".encode()


@pytest.fixture(scope="module")
def quiet() -> Iterator[Served]:
    """A coordinator with one member, for whoever asks and changes nothing."""
    with serving(reading=Reading(ANY, READERS)) as served:
        a = served.join("a")
        enter(a, told(a).generation)
        yield served


def said(served: Served, request: bytes) -> bytes:
    """All that comes back of some bytes."""
    address = "127.0.0.1", int(served.url.rpartition(":")[2])
    with closing(socket.create_connection(address, timeout=SECONDS)) as link:
        link.sendall(request)
        answer = b""
        try:
            while part := link.recv(1 << 16):
                answer += part
        except ConnectionError:  # what was not read of the request may reset it
            pass
        return answer


def test_nodes_join_step_switch_and_die() -> None:
    with serving(reading=Reading(ANY, READERS), job="run-7") as served:
        assert status(served.url)["state"] == "waiting"
        a = served.join("a")
        world = told(a)
        enter(a, world.generation)
        tally = Tally(steps=5, samples=60, stepping_seconds=0.5, held_seconds=0.1, generation=1)
        a.send(Report(ready=True, entered=1, step=5, layout="data=1", tally=tally))
        b = served.join("b")
        told(a), told(b)
        a.send(switched(1, pause_ms=250.0, step=5))
        for one in (a, b):
            one.send(Report(ready=True, entered=2, step=5, tally=tally if one is a else Tally()))
        tally = Tally(steps=8, samples=96, stepping_seconds=0.8, held_seconds=0.35, generation=2)
        a.send(Report(ready=True, entered=2, step=8, layout="data=2", tally=tally))
        found = waited(served, lambda found: found["step"] == 8)
        assert found["state"] == "running" and [one["size"] for one in found["changes"]] == [1, 2]
        assert [one["kind"] for one in found["changes"]] == ["start", "join"]
        assert found["changes"][1]["still_seconds"] == pytest.approx(0.25)
        assert found["switches"][0]["phases_ms"] == {"drain": 20.0, "move": 230.0}
        numbers = metrics(served.url)
        assert numbers["dynatrain_world_size"] == 2 and numbers["dynatrain_members{phase=working}"] == 2
        assert numbers["dynatrain_switches_total{outcome=committed}"] == 1
        assert numbers["dynatrain_pause_seconds_bucket{le=0.2}"] == 0
        assert numbers["dynatrain_pause_seconds_bucket{le=0.5}"] == numbers["dynatrain_pause_seconds_count"] == 1
        assert numbers["dynatrain_steps_total"] == 8 and numbers["dynatrain_state{state=running}"] == 1
        assert numbers["dynatrain_job{name=run-7,term=abc}"] == 1
        b.send(Report(ready=True, entered=2, step=5))  # heard of just now: its end is a death
        b.close()
        found = waited(served, lambda found: len(found["changes"]) == 3)
        assert found["changes"][2]["kind"] == "failure" and "b/0 lost" in found["changes"][2]["reason"]
        assert metrics(served.url)["dynatrain_disruptions_total"] == 1


def waited(served: Served, holds: Callable[[dict[str, object]], bool]) -> dict[str, object]:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if holds(found := status(served.url)):
            return found
        time.sleep(0.1)
    raise TimeoutError(found)


def test_the_status_is_a_view(quiet: Served) -> None:
    code, headers, body = fetched(f"{quiet.url}/status.json")
    assert code == 200 and headers["Content-Type"] == "application/json" and headers["Cache-Control"] == "no-store"
    assert View.model_validate_json(body).status.generation == 1


def test_both_formats_of_metrics(quiet: Served) -> None:
    _, headers, body = fetched(f"{quiet.url}/metrics")
    assert headers["Content-Type"].startswith("text/plain") and b"# TYPE dynatrain_steps_total counter" in body
    _, headers, body = fetched(f"{quiet.url}/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")


def test_the_page_asks_nobody_else(quiet: Served) -> None:
    code, headers, body = fetched(f"{quiet.url}/")
    text = body.decode()
    assert code == 200 and "<!-- scripts -->" not in text and "uPlot" in text
    assert not re.findall(r"(?:src|href|url\(|@import)\s*[=\"']*\s*(?:https?:)?//", text)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        for inside in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL):
            assert base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode() in policy


def test_what_a_member_is_doing_is_plain_text() -> None:
    with serving(reading=Reading(ANY, READERS)) as served:
        a = served.join("a")
        told(a)
        longest = Shown(lines=("\0" * 400,) * MOST_LINES, stacks="\0" * LONGEST_STACKS)
        for answer in (Shown(lines=("<b>INFO</b>",), stacks="<img src=x>: train.py:7"), longest):
            with ThreadPoolExecutor() as pool:
                readers = [pool.submit(fetched, f"{served.url}/doing?a%2F0") for _ in range(3)]
                assert isinstance(a.receive(SECONDS), Show)
                time.sleep(0.5)
                a.send(answer)
            found = [reader.result() for reader in readers]
            assert {code for code, _, _ in found} == {200}, "one question answers all that ask meanwhile"
            for _, headers, body in found:
                assert headers["Content-Type"] == "text/plain; charset=utf-8"
                assert headers["X-Content-Type-Options"] == "nosniff"
                assert body.startswith(b"a/0\n") and answer.stacks.encode() in body and answer.lines[0].encode() in body
        for nobody in ("b/0", "", "<script>", "a/0%00"):
            code, _, body = fetched(f"{served.url}/doing?{nobody}")
            assert code == 404 and body == b"there is no such member\n"


def test_a_member_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "SHOW_SECONDS", 0.2)
    with serving(reading=Reading(ANY, READERS)) as served:
        a = served.join("a")
        enter(a, told(a).generation)
        assert fetched(f"{served.url}/doing?a/0")[0] == 504
        assert isinstance(a.receive(SECONDS), Show)
        a.send(Shown(stacks="late"))
        b = served.join("b")
        assert told(a).members == told(b).members, "a late answer harms nobody"


def test_uplot_is_as_it_was_published() -> None:
    for name, digest in PUBLISHED.items():
        assert hashlib.sha256((page.STATIC / name).read_bytes()).hexdigest() == digest
    assert "Permission is hereby granted" in (page.STATIC / "uPlot.LICENSE").read_text()


HOSTILE: list[tuple[str, bytes, bytes]] = [
    ("a path", b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b" 404 "),
    ("an encoded path", b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n\r\n", b" 404 "),
    ("a file of the page", b"GET /static/page.js HTTP/1.1\r\n\r\n", b" 404 "),
    ("another server", b"GET http://example.com/metrics HTTP/1.1\r\n\r\n", b" 404 "),
    ("two slashes", b"GET //metrics HTTP/1.1\r\n\r\n", b" 200 "),
    ("no path", b"GET\r\n\r\n", b" 400 "),
    ("no version", b"GET / HTTP/x\r\n\r\n", b" 400 "),
    ("version 2", b"GET / HTTP/2.0\r\n\r\n", b" 505 "),
    ("a long path", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b" 431 "),
    ("many headers", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b" 431 "),
    ("no colon", b"GET / HTTP/1.1\r\n\x00\xff\xfe\r\n\r\n", b" 200 "),
    ("our own protocol", b"\x00\x00\x00\x10" + b"{}" * 8 + b"\r\n\r\n", b" 400 "),
    ("another site's page", b"GET /status.json HTTP/1.1\r\nAuthorization: \r\nHost: evil.example\r\n\r\n", b" 401 "),
    *(
        (method, f"{method} /metrics HTTP/1.1\r\n\r\n".encode(), b" 405 ")
        for method in ("POST", "PUT", "DELETE", "HEAD")
    ),
    ("a method of its own", b"LEAVE a HTTP/1.1\r\n\r\n", b" 405 "),
]


@pytest.mark.parametrize(("request_", "code"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_hostile_requests(quiet: Served, request_: bytes, code: bytes) -> None:
    if b"Authorization" not in request_:
        request_ = request_.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\r\n" + KNOWS)
    answer = said(quiet, request_)
    assert code in answer.partition(b"\r\n")[0] or (not answer and len(request_) > server.LARGEST_REQUEST), answer[:300]
    assert b"evil.example" not in answer and b"passwd" not in answer, "nothing of a request is repeated"
    assert quiet.status().generation == 1


def test_tokens() -> None:
    with serving(reading=Reading(ANY, READERS)) as served:
        for path in ("/", "/metrics", "/status.json", "/doing?a/0", "/nothing"):
            for token in ("", "another one", READERS[:-1], READERS + "x", "\u20ac"):
                if token.isascii():
                    code, headers, body = fetched(f"{served.url}{path}", token)
                    assert (
                        code == 401 and headers["WWW-Authenticate"].startswith("Basic") and READERS.encode() not in body
                    )
        assert fetched(f"{served.url}/status.json", READERS)[0] == 200
        basic = base64.b64encode(f"anybody:{READERS}".encode()).decode()
        assert b" 200 " in said(served, f"GET / HTTP/1.1\r\nAuthorization: Basic {basic}\r\n\r\n".encode())[:20]
        for wrong in ("Basic !!!", f"Basic {basic[:-4]}", "Basic", f"Digest {READERS}", f"Bearer{READERS}"):
            assert b" 401 " in said(served, f"GET / HTTP/1.1\r\nAuthorization: {wrong}\r\n\r\n".encode())[:20]
        assert b" 401 " in said(served, b"GET / HTTP/1.1\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")[:20]


def test_where_it_listens(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "localhost"):
        Reading(Address(host, 0), READERS).listen().close()
    with pytest.raises(ElasticError, match=r"cannot be watched at 192\.0\.2\.1"):
        Reading(Address("192.0.2.1", 0), READERS).listen()
    file = tmp_path / "token"
    file.write_text(READERS)
    file.chmod(0o600)
    assert Reading.of("127.0.0.1:9", file, JOB) == Reading(Address("127.0.0.1", 9), READERS, str(file))
    assert Reading.of("off", None, JOB) is None
    assert Reading.of(None, file, JOB) == Reading(Address("127.0.0.1", 0), READERS, str(file))
    with pytest.raises(ConfigError, match="it has the job's token"):
        Reading.of("127.0.0.1:9", file, READERS)


def test_without_a_token_file_there_is_one_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first, again = (Reading.of("127.0.0.1:9", None, JOB) for _ in range(2))
    assert first is not None and first == again and len(first.token) == 64
    assert Path(first.token_file).stat().st_mode & 0o777 == 0o600
    assert Reading.of(None, None, JOB) == replace(first, address=Address("127.0.0.1", 0)), "for this machine alone"
    assert Reading.of(None, None, first.token) is None, "what nobody asked for does not end a job"


def test_slow_readers_hold_nobody_up(monkeypatch: pytest.MonkeyPatch, in_time: Callable[[float, float], None]) -> None:
    """As many as there may be say a byte now and then, or read none of what they asked for; the job decides as ever."""
    monkeypatch.setattr(server, "READ_SECONDS", 1.0)
    monkeypatch.setattr(server, "WRITE_SECONDS", 1.0)
    with serving(reading=Reading(ANY, READERS)) as served:
        a = served.join("a")
        enter(a, told(a).generation)
        address = "127.0.0.1", int(served.url.rpartition(":")[2])
        links = [socket.create_connection(address) for _ in range(3 * server.MOST_READERS)]
        for place, link in enumerate(links):
            try:
                link.sendall(b"GET / HTTP/1.1\r\n" + KNOWS + b"\r\n" if place % 2 else b"G")
            except ConnectionError:  # it was sent away
                pass
        begin = time.monotonic()
        b = served.join("b")
        assert told(a).members == told(b).members == ("a/0", "b/0")
        in_time(time.monotonic() - begin, 1)
        time.sleep(1.2)
        assert fetched(f"{served.url}/status.json")[0] == 200, "they have lost their places"
        for link in links:
            link.close()


def test_many_readers_at_once_make_few_views(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(reading=Reading(ANY, READERS)) as served:
        a = served.join("a")
        enter(a, told(a).generation)
        made, stop, codes = list[float](), threading.Event(), list[int]()
        real = View.model_dump_json
        monkeypatch.setattr(View, "model_dump_json", lambda self: (made.append(time.monotonic()), real(self))[1])

        def read() -> None:
            while not stop.is_set():
                try:
                    codes.append(fetched(f"{served.url}/status.json")[0])
                except OSError:  # sent away
                    pass

        threads = [threading.Thread(target=read) for _ in range(12)]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        b = served.join("b")
        assert told(a).members == told(b).members
        time.sleep(1.5)
        stop.set()
        for thread in threads:
            thread.join()
        assert codes.count(200) > 10 and len(made) <= 2 + 2 * (time.monotonic() - begin)


def test_without_the_library_it_says_what_to_install(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['prometheus_client'] = None; from ds_dynatrain.cli.main import main; main()"
    command = [sys.executable, "-c", hidden, "coordinator", "127.0.0.1:0", "--nnodes=1:2", "--http=127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2 and "pip install 'ds-dynatrain[monitoring]'" in done.stderr


def test_a_view_that_takes_long_is_made_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "FRESH_SECONDS", 0.0)
    made: list[float] = []

    def make() -> int:
        made.append(time.monotonic())
        time.sleep(0.03)
        return len(made)

    given, end = feed.Feed[int](make, lambda call: call()), time.monotonic() + 1.0
    while time.monotonic() < end:
        assert given.read() == len(made)
    assert 1 <= len(made) <= 2, "in a twentieth of the time at the most"


def test_a_loop_that_has_ended_holds_no_reader_up(in_time: Callable[[float, float], None]) -> None:
    def ended(call: Callable[[], None]) -> None:
        raise RuntimeError("the loop is closed")

    begin = time.monotonic()
    assert feed.Feed[int](lambda: 7, ended).read() is None
    in_time(time.monotonic() - begin, 1)
