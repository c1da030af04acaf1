"""A coordinator with its store: found by what it says, gone when it is stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.connection import Connection, ask_status
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.hosting import CoordinatorHost
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.elastic.store import open_store

TOKEN = "a token of some length"
HERE = Address("127.0.0.1", 0)


def test_a_host_serves_and_stops() -> None:
    host = CoordinatorHost(HERE, Settings(1, 2), TOKEN, job="one")
    host.start()
    connection = Connection.open(host.address, TOKEN)
    port = connection.welcome.store_port
    worlds = [Generation(term="a", generation=number, change="planned", members=("a/0",)) for number in (1, 2)]
    stores = [open_store("127.0.0.1", port, world.prefix, 5.0) for world in worlds]
    stores[0].set("key", "1")
    assert stores[0].get("key") == b"1" and not stores[1].check(["key"]), "generations share no key"
    with pytest.raises(OSError):
        CoordinatorHost(host.address, Settings(1, 2), TOKEN)
    assert ask_status(host.address, TOKEN).job == "one"
    host.stop()
    with pytest.raises(OSError):
        ask_status(host.address, TOKEN)
    connection.close()


def test_a_host_answers_before_torch_is_there() -> None:
    """Members of a job whose coordinator was started again do not wait long for it."""
    code = "import ds_dynatrain.cli.jobs, ds_dynatrain.elastic.hosting, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_it_may_open_as_many_files_as_it_may() -> None:
    code = (
        "import resource as r; from ds_dynatrain.descriptors import raise_descriptors as more; most = "
        "r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, most)); told = more(); "
        "assert told == r.getrlimit(r.RLIMIT_NOFILE)[0] and (most == -1 or told == min(most, 1 << 20)), told"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
