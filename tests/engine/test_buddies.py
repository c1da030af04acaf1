"""What buddies are refused with; `tests/elastic/test_buddies.py` has what they do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine import initialize
from ds_dynatrain.engine.buddies.buddies import Buddies
from ds_dynatrain.engine.context import Candidates
from ds_dynatrain.engine.members.elastic_membership import ElasticMembership
from ds_dynatrain.engine.members.fixed_launch import FixedLaunch
from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.space import Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds


def settings(**buddies: Any) -> DynatrainConfig:
    """A block with buddies."""
    return DynatrainConfig.model_validate({"buddies": {"mode": "copy", **buddies}})


def elastic() -> ElasticMembership:
    """One that asks nobody."""
    return ElasticMembership(cast(Any, SimpleNamespace()))


def test_in_a_launch_of_fixed_size() -> None:
    with pytest.raises(UnsupportedError, match="buddies in a launch of fixed size: nobody comes or goes there"):
        FixedLaunch().refuse(settings(), nn.Linear(2, 2))
    FixedLaunch().refuse(settings(mode="off"), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [({"mode": "replay"}, "buddies that replay steps"), ({"copies": 2}, "several buddies for a member")],
)
def test_what_is_not_there_yet(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        elastic().refuse(settings(**given), nn.Linear(2, 2))


@pytest.mark.parametrize("mode", ["copy", "auto", "off"])
def test_what_is_there(mode: str) -> None:
    elastic().refuse(settings(mode=mode), nn.Linear(2, 2))


def test_beside_another_engine() -> None:
    """Whichever of them is to have buddies."""
    for one, other in ((settings(), settings(mode="off")), (settings(mode="off"), settings())):
        there: Any = SimpleNamespace(settings=other)
        with pytest.raises(UnsupportedError, match="buddies beside another engine"):
            initialize._refuse_beside([there], one, nn.Linear(2, 2), None)


def boundary(buddies: Buddies, share: float) -> int:
    """How often copies are taken after a round that is whole, with what a step waited for as a share of it."""
    of: Any = SimpleNamespace(is_over=True, is_whole=True, is_void=False, mark=None, error="", sent_bytes=0, seconds=0)
    of.mark = SimpleNamespace(step=3)
    buddies._share = share
    buddies._see(of)
    return buddies.protection.every_steps


@pytest.mark.parametrize(
    ("mode", "every", "found"),
    [("copy", 1, [1, 1, 1, 1]), ("auto", 1, [1, 1, 5, 1]), ("auto", 3, [3, 3, 5, 3])],
)
def test_auto_takes_copies_as_seldom_as_it_has_to(mode: str, every: int, found: list[int]) -> None:
    """A step waits for at most 2 % of it, on average."""
    engine: Any = SimpleNamespace(settings=settings(mode=mode, every_steps=every), world=None, members=(0, 1), rank=1)
    buddies = Buddies(engine)
    assert [boundary(buddies, share) for share in (0.001, 0.0199, 0.09, 0.01)] == found


def test_in_another_world_all_begin_with_the_same_interval() -> None:
    """Members that have just come do not know how seldom the others took copies, and all have to take them at once."""
    engine: Any = SimpleNamespace(settings=settings(mode="auto"), world=None, members=(0,), rank=0, vps=None)
    engine.layout = Layout(data=1, zero_stage=1)
    stayed, came = Buddies(engine), Buddies(engine)
    assert boundary(stayed, 0.09) == 5
    for each in (stayed, came):
        each._enter()
    assert stayed.protection.every_steps == came.protection.every_steps == 1


def test_a_round_that_fails_leaves_the_moment_before(caplog: pytest.LogCaptureFixture) -> None:
    """The copies of step 3 are there still, on all members."""
    engine: Any = SimpleNamespace(settings=settings(), world=None, members=(0, 1), rank=0)
    buddies = Buddies(engine)
    failed: Any = SimpleNamespace(is_over=True, is_whole=False, is_void=False, sent_bytes=0, seconds=0)
    failed.mark, failed.error = SimpleNamespace(step=4), ""
    buddies._see(failed)
    assert not buddies.protection.is_protected and buddies.protection.why
    boundary(buddies, 0.0)
    caplog.set_level("WARNING")
    for _ in range(2):
        buddies._see(failed)
        assert buddies.protection.is_protected and buddies.protection.step == 3
    said = [one.getMessage() for one in caplog.records]
    assert said == ["buddies: the copies of step 4 are not whole; a death costs what follows step 3"]


@pytest.mark.parametrize(("here", "is_protected"), [((0, 1), True), ((0, 1, 2), True), ((0, 2), False)])
def test_copies_of_the_world_before_protect(here: tuple[int, ...], is_protected: bool) -> None:
    """As long as each of them has two who have it: so after a switch and a join, and not after a death."""
    engine: Any = SimpleNamespace(settings=settings(), world=None, members=(0, 1), rank=0)
    buddies = Buddies(engine)
    buddies._pairs = {0: 1, 1: 0}
    boundary(buddies, 0.0)
    engine.layout, engine.members = Layout(data=len(here), zero_stage=1), here
    tensors, layout = [LogicalTensor("weight", (8,))], engine.layout
    engine.vps = VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(4), layout, range(layout.world_size))
    engine.candidates = Candidates(0, {member: str(member) for member in here})
    buddies._enter()
    assert buddies.protection.is_protected == is_protected
    assert bool(buddies.protection.why) != is_protected


def test_after_a_load_nothing_from_before_counts() -> None:
    """Nor what was on its way: it would bring back what the load has replaced."""
    engine: Any = SimpleNamespace(settings=settings(), world=None, members=(0, 1), rank=1)
    buddies = Buddies(engine)
    boundary(buddies, 0.0)
    assert buddies.protection.is_protected and buddies.protection.step == 3
    under_way: Any = SimpleNamespace(is_over=True, is_whole=True, is_void=False, error="", sent_bytes=0, seconds=0)
    under_way.mark = SimpleNamespace(step=4)
    buddies._round = under_way
    buddies.forget()
    assert not buddies.protection.is_protected and buddies.protection.step is None
    buddies._see(under_way)
    assert not buddies.protection.is_protected and buddies.protection.step is None
    assert boundary(buddies, 0.0) and buddies.protection.is_protected
