"""What an agent gets from `--rdzv-backend=dynatrain`, without torchrun around it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic import rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from ds_dynatrain.elastic import environment
from ds_dynatrain.elastic import token as token_module
from ds_dynatrain.elastic.address import Address, Announced
from ds_dynatrain.elastic.connection import ask_status
from ds_dynatrain.elastic.environment import WorkerPlace, hand_over, job_token, token_from, worker_place
from ds_dynatrain.elastic.handler import NAME, REPLACE_C10D, create, get_handler
from ds_dynatrain.elastic.rendezvous import AgentLine, NodeRendezvous, workers_of
from ds_dynatrain.elastic.token import made_token
from ds_dynatrain.errors import ConfigError, CoordinatorUnproved
from tests.elastic.served import SECONDS, enter, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    """The environment is put back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def parameters(port: int, **settings: str) -> RendezvousParameters:
    return RendezvousParameters(NAME, f"127.0.0.1:{port}", "job", 1, 4, local_addr="node 1", **settings)


def made(port: int, **settings: str) -> NodeRendezvous:
    rendezvous = create(parameters(port, **settings))
    assert isinstance(rendezvous, NodeRendezvous)
    return rendezvous


def test_two_agents_and_one_coordinator() -> None:
    port = free_port()
    first, second = made(port), made(port)
    worlds = [one.next_rendezvous() for one in (first, second)]
    for world in worlds:
        assert (world.rank, world.world_size) == (0, 1)
    worlds[0].store.set("key", "1")
    assert not worlds[1].store.check(["key"]), "what agents say in their own world is heard nowhere else"
    place = worker_place()
    assert place is not None and place.node.startswith("node-1-") and place.agent == os.getpid() and place.job == "job"
    assert place.coordinator == Address("127.0.0.1", port)
    assert second.num_nodes_waiting() == 0 and not second.is_closed() and second.get_backend() == NAME
    second.next_rendezvous()  # its workers crashed, and are started again
    again = worker_place()
    assert again is not None and again.node != place.node
    assert ask_status(place.coordinator, job_token(place.coordinator)[0]).max_nodes == 4
    second.shutdown()
    first.shutdown()
    with pytest.raises(OSError):
        ask_status(place.coordinator)


def test_an_agent_can_be_kept_from_hosting(in_time: Callable[[float, float], None]) -> None:
    begin = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match="no coordinator answers"):
        made(free_port(), is_host="0", join_timeout="1").next_rendezvous()
    in_time(time.monotonic() - begin, 5)


def test_the_token_has_to_be_the_same(tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "token"
    file.write_text("a token of some length")
    file.chmod(0o600)
    host, stranger = made(port, token_file=str(file)), made(port)
    host.next_rendezvous()
    with pytest.raises(RendezvousConnectionError, match="token"):
        stranger.next_rendezvous()
    host.shutdown()


def test_a_job_that_was_given_no_token_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All agents and workers of one user find it; who has not got it is told which file to copy."""
    monkeypatch.setenv(token_module.STATE, str(tmp_path))
    for name in (environment.TOKEN, environment.TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)
    port, file = free_port(), tmp_path / "dynatrain" / "token"
    host, other = made(port), made(port)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    for agent in (host, other):
        agent.next_rendezvous()
    assert os.environ[environment.TOKEN_FILE] == str(file), "workers find it, too"
    monkeypatch.delenv(environment.TOKEN_FILE)
    with pytest.raises(CoordinatorUnproved, match=f"of {file} on .*name it in DYNATRAIN_TOKEN_FILE"):
        ask_status(Address("127.0.0.1", port))
    other.shutdown()
    host.shutdown()


def test_nobody_obeys_what_has_taken_the_port_of_a_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job that was given no token: an agent is told to end a worker by a program that has none."""
    monkeypatch.setenv(token_module.STATE, str(tmp_path))
    token, _ = job_token(Address("127.0.0.1", 1))
    with serving(token=token) as served, subprocess.Popen(["sleep", "60"]) as worker:
        line = AgentLine(served.connect(), "a", served.address, token, "")
        line.start()
        served.stop()
        with serving(address=served.address, silent_seconds=0.2) as rogue:
            rogue.join("a", pid=worker.pid)
            time.sleep(1)
            assert worker.poll() is None
        line.close()
        worker.kill()


def test_a_made_token_is_the_same_for_all_who_ask_at_once(tmp_path: Path) -> None:
    file = tmp_path / "coordinator"
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: job_token(Announced(file), {}), range(32)))
    ((token, where),) = found
    assert (
        len(token) == 64
        and where == f"{file}.token"
        and [one.name for one in tmp_path.iterdir()] == [f"{file.name}.token"]
    )


def test_a_made_token_is_this_users(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.token"
    with pytest.raises(ConfigError, match=r"none can be made .*DYNATRAIN_TOKEN_FILE"):
        made_token(tmp_path / "missing" / "token")
    if os.geteuid():
        pytest.skip("only root can give files away")
    file.write_text("known to somebody else\n")
    file.chmod(0o600)
    os.chown(file, 1, -1)
    with pytest.raises(ConfigError, match=r"of user 1, who knows .*DYNATRAIN_TOKEN_FILE"):
        made_token(file)


def test_c10d_is_replaced_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = torch_rendezvous.rendezvous_handler_registry
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    stock = registry._registry["c10d"]
    assert get_handler() is create and registry._registry["c10d"] is stock
    monkeypatch.setenv(REPLACE_C10D, "1")
    assert get_handler() is create and registry._registry["c10d"] is create


def test_the_entry_point_costs_little() -> None:
    """Every process that imports torch's rendezvous loads it."""
    code = "import ds_dynatrain.elastic.handler as h, sys; h.get_handler(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"{code} and 'pydantic' not in sys.modules"], check=True, cwd=ROOT)


def test_a_worker_that_hangs_is_ended() -> None:
    """As soon as another one has gone on without it."""
    with subprocess.Popen(["sleep", "60"]) as worker, serving(least=2, silent_seconds=0.4) as served:
        line = AgentLine(served.connect(), "a", served.address, None, "")
        line.start()
        connections = served.join("a", pid=worker.pid), served.join("b")
        end = time.monotonic() + SECONDS
        while worker.poll() is None and time.monotonic() < end:
            enter(connections[1], served.status().generation)
            time.sleep(0.05)
        assert worker.returncode == -9
        for each in connections:
            each.close()
        line.close()


def test_a_worker_is_found_by_what_it_was_started_as() -> None:
    """For a coordinator that was started anew and never heard its process id."""
    variables = {environment.NODE: "host-1", environment.LOCAL_RANK: "1"}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **variables}) as worker:
        assert [found.pid for found in workers_of("host-1/1", None)] == [worker.pid]
        assert workers_of("host-1/0", None) == workers_of("host-2/1", None) == []
        worker.kill()


def test_only_workers_of_this_agent_are_ended() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as wrapper:
        assert wrapper.stdout is not None
        worker = int(wrapper.stdout.readline())
        for mine in (wrapper.pid, worker):
            assert [found.pid for found in workers_of("a/0", mine)] == [mine]
        assert not workers_of("a/0", os.getppid()) and not workers_of("a/0", 1)
        os.kill(worker, 9)


def test_an_agent_outlives_a_coordinator() -> None:
    with serving() as served:
        line = AgentLine(served.connect(), "a", served.address, None, "")
        line.start()
    time.sleep(0.3)
    line.close()


class TestEnvironment:
    def test_a_place_comes_through(self) -> None:
        place = WorkerPlace("n-1", 3, 8, Address("host", 1234), "job", 99)
        variables: dict[str, str] = {environment.LOCAL_RANK: "3", environment.LOCAL_SIZE: "8"}
        hand_over(place, variables)
        assert worker_place(variables) == place

    def test_without_a_launch_there_is_none(self) -> None:
        assert worker_place({"LOCAL_RANK": "0"}) is None

    def test_the_page_has_every_variable(self) -> None:
        page = (ROOT / "docs" / "configuration.md").read_text().partition("## Environment\n")[2]
        values = (*vars(environment).values(), REPLACE_C10D)
        names = {value for value in values if str(value).startswith("DYNATRAIN_")}
        assert len(names) == 7 and not [name for name in names if f"`{name}" not in page]

    def test_broken_numbers_are_named(self) -> None:
        variables = {environment.COORDINATOR: "a:1", environment.NODE: "n", environment.LOCAL_RANK: "x"}
        with pytest.raises(ConfigError, match="LOCAL_RANK"):
            worker_place(variables)

    def test_tokens(self, tmp_path: Path) -> None:
        assert token_from({}) is None
        assert token_from({environment.TOKEN: "0123456789abcdef"}) == "0123456789abcdef"
        with pytest.raises(ConfigError, match=r"DYNATRAIN_TOKEN: 3 characters"):
            token_from({environment.TOKEN: "abc"})
        file = tmp_path / "token"
        file.write_text("fedcba9876543210\n")
        file.chmod(0o600)
        both = {environment.TOKEN: "0123456789abcdef", environment.TOKEN_FILE: str(file)}
        assert token_from(both) == "fedcba9876543210", "a file counts more"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
