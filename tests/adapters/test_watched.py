"""Groups that say WorldChanged: what they turn into it, and what they leave as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as td
from torch._C._distributed_c10d import HashStore

from ds_dynatrain.adapters.process_groups import make_group
from ds_dynatrain.adapters.watched import COLLECTIVES, QUESTIONS, WAITS, Fate, WatchedGroup, watched
from ds_dynatrain.errors import WorldChanged

GONE = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
WRONG = "ProcessGroupGloo::allgather: invalid tensor size at index 0"


@pytest.fixture
def fate() -> Fate:
    return Fate()


@pytest.fixture
def group(fate: Fate) -> Iterator[td.ProcessGroup]:
    """Of this process alone."""
    yield watched(make_group(HashStore(), "alone", 0, 1, 5.0), fate)[0]


def failing(text: str) -> None:
    raise RuntimeError(text)


def test_a_lost_peer_is_a_change_of_the_world(fate: Fate) -> None:
    with pytest.raises(WorldChanged, match="Connection closed") as caught:
        fate.call(failing, GONE)
    assert isinstance(caught.value, RuntimeError) and GONE in str(caught.value.__cause__)
    assert type(fate.failure) is RuntimeError and GONE in str(fate.failure)
    assert fate.failure.__traceback__ is None, "its frames hold the groups"


def test_wrong_arguments_stay_what_they_are(fate: Fate) -> None:
    with pytest.raises(RuntimeError, match="invalid tensor size") as caught:
        fate.call(failing, WRONG)
    assert not isinstance(caught.value, WorldChanged) and fate.failure is None


def test_its_collectives_do_what_those_of_the_group_do(group: td.ProcessGroup) -> None:
    ones = torch.ones(3)
    work = group.allreduce([ones])
    work.wait()
    assert work.is_completed() and ones.tolist() == [1, 1, 1]
    group.barrier().wait()
    assert (group.rank(), group.size(), group.name(), group.group_name) == (0, 1, "gloo", "alone")


def test_a_closed_world_takes_no_collective(group: td.ProcessGroup, fate: Fate) -> None:
    fate.is_closed = True
    with pytest.raises(WorldChanged, match="void"):
        group.allreduce([torch.ones(1)])
    fate.is_closed = False
    group.allreduce([torch.ones(1)]).wait()


def test_torch_has_these_methods() -> None:
    """Another name in another torch would pass by unseen."""
    assert not [name for name in COLLECTIVES if not hasattr(td.ProcessGroup, name)]
    assert not [name for name in (*WAITS, *QUESTIONS) if not hasattr(td.Work, name)]
    own = {name for name in vars(WatchedGroup) if not name.startswith("__")}
    assert own >= set(COLLECTIVES)
