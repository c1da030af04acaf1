"""What buddies are refused with; `tests/elastic/test_buddies.py` has what they do."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as td
from torch import nn

from ds_dynatrain.buddies import extension as buddies_module
from ds_dynatrain.buddies.assignment import memory_of_copies
from ds_dynatrain.buddies.extension import Buddies
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.environment import WorkerPlace
from ds_dynatrain.engine.elastic_membership import ElasticMembership
from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.extension import made
from ds_dynatrain.reshard.context import Candidates
from ds_dynatrain.space import Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds


def settings(**buddies: Any) -> DynatrainConfig:
    """A block with buddies, as it counts in an elastic launch."""
    return DynatrainConfig.model_validate({"buddies": {"mode": "copy", **buddies}}).in_launch(is_elastic=True)


def elastic() -> ElasticMembership:
    """One that asks nobody."""
    return ElasticMembership(WorkerPlace("a", 0, 1, Address("127.0.0.1", 1)), DynatrainConfig())


def attached(engine: Any, kind: type[Buddies] = Buddies) -> Buddies:
    """The buddies of an engine that is nothing but what they ask it for."""
    buddies, engine.extensions = kind(engine.settings), ()
    buddies.attach(SimpleNamespace(_parts=engine))
    return buddies


def test_in_a_launch_of_fixed_size() -> None:
    with pytest.raises(UnsupportedError, match="buddies in a launch of fixed size: no process could take over"):
        Buddies(settings()).check_launch(False)
    assert not any(isinstance(each, Buddies) for each in made(settings(mode="off")))


def test_more_copies_than_others() -> None:
    """It is refused at the start; one member alone has no buddies, and says so."""
    engine: Any = SimpleNamespace(settings=settings(copies=2), members=(0, 1), control=SimpleNamespace(member=0))
    engine.layout, engine.candidates = Layout(data=2, zero_stage=1), Candidates(0, {0: "a", 1: "b"})
    with pytest.raises(ConfigError, match="copies: 2 others are to keep each copy, and 2 members work; start on 3"):
        attached(engine).on_start()


@pytest.mark.parametrize("mode", ["copy", "off"])
def test_what_is_there(mode: str) -> None:
    elastic().refuse(settings(mode=mode), nn.Linear(2, 2))


def test_beside_another_engine() -> None:
    """All engines have the same buddies, or none."""
    blocks = [settings(), settings(mode="off"), settings(copies=2), settings(every_steps=3)]
    for one, other in itertools.permutations(blocks, 2):
        with pytest.raises(ConfigError, match=r"dynatrain\.buddies: .* in engine 1; .* give each of them the same"):
            refuse_beside(one, other)
    for mode in ("copy", "off"):
        refuse_beside(settings(mode=mode), settings(mode=mode))


def refuse_beside(here: DynatrainConfig, there: DynatrainConfig) -> None:
    """What `initialize` asks: the extensions of the new engine, and those of the one that is there."""
    for extension in (*made(here), *made(there)):
        extension.check_beside(here, there, 1)


def boundary(buddies: Buddies) -> None:
    """Let a round end that is whole."""
    of: Any = SimpleNamespace(is_over=True, is_whole=True, is_void=False, mark=None, error="", sent_bytes=0, seconds=0)
    of.mark = SimpleNamespace(step=3)
    buddies._see([of])


def test_a_round_that_fails_leaves_the_moment_before(caplog: pytest.LogCaptureFixture) -> None:
    """The copies of step 3 are there still, on all members."""
    engine: Any = SimpleNamespace(settings=settings(), world=None, members=(0, 1), rank=0)
    buddies = attached(engine)
    failed: Any = SimpleNamespace(is_over=True, is_whole=False, is_void=False, sent_bytes=0, seconds=0)
    failed.mark, failed.error = SimpleNamespace(step=4), ""
    buddies._see([failed])
    assert not buddies.protection.is_protected and buddies.protection.why
    boundary(buddies)
    caplog.set_level("WARNING")
    for _ in range(2):
        buddies._see([failed])
        assert buddies.protection.is_protected and buddies.protection.step == 3
    said = [one.getMessage() for one in caplog.records]
    assert said == ["buddies: the copies of step 4 are not whole; a death costs what follows step 3"]


PAIR = {0: (1,), 1: (0,)}
THREE = {0: (1, 2), 1: (2, 0), 2: (0, 1)}
"""With two copies of each."""


WORLDS = [(PAIR, (0, 1), True), (PAIR, (0, 1, 2), True), (PAIR, (0, 2), False)]
WORLDS += [(THREE, (0, 1, 2), True), (THREE, (0, 2, 3), True), (THREE, (1, 3), False)]


@pytest.mark.parametrize(("kept_by", "here", "is_protected"), WORLDS)
def test_copies_of_the_world_before_protect(
    kept_by: dict[int, tuple[int, ...]], here: tuple[int, ...], is_protected: bool
) -> None:
    """As long as each of them has two who have it: so after a switch or a join, and not after a death too many."""
    engine: Any = SimpleNamespace(settings=settings(), world=None, members=tuple(kept_by), rank=0)
    buddies = attached(engine)
    buddies._by_member = kept_by
    boundary(buddies)
    engine.layout, engine.members = Layout(data=len(here), zero_stage=1), here
    tensors, layout = [LogicalTensor("weight", (8,))], engine.layout
    engine.vps = VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(4), layout, range(layout.world_size))
    engine.candidates = Candidates(0, {member: str(member) for member in here})
    engine.control = SimpleNamespace(member=here[0])
    buddies._enter()
    assert buddies.protection.is_protected == is_protected
    assert bool(buddies.protection.why) != is_protected


def test_after_a_load_nothing_from_before_counts() -> None:
    """Nor what was on its way: it would bring back what the load has replaced."""
    engine: Any = SimpleNamespace(settings=settings(), world=None, members=(0, 1), rank=1, layout=None, **PLACE)
    buddies = attached(engine)
    boundary(buddies)
    assert buddies.protection.is_protected and buddies.protection.step == 3
    under_way: Any = SimpleNamespace(is_over=True, is_whole=True, is_void=False, error="", sent_bytes=0, seconds=0)
    under_way.mark = SimpleNamespace(step=4)
    buddies._rounds = [under_way]
    buddies.replace()
    assert buddies.kept.since == (3, 1)
    assert not buddies.protection.is_protected and buddies.protection.step is None
    buddies._see([under_way])
    assert not buddies.protection.is_protected and buddies.protection.step is None
    boundary(buddies)
    assert buddies.protection.is_protected


PLACE: dict[str, Any] = {"generation": 3, "segment": "3.1", "registered": (), "global_steps": 4}
"""Of an engine after its first load in a world."""


def of_two_engines() -> tuple[Buddies, Buddies]:
    """Those of the first engine of a process and of another one, in a world of two."""
    members, found = (0, 1), list[Buddies]()

    class Together(Buddies):
        _all = found  # type: ignore[assignment]

    for layout in (Layout(data=2, zero_stage=1), Layout(data=2, zero_stage=0)):
        engine: Any = SimpleNamespace(settings=settings(), world=None, members=members, rank=0, layout=layout, **PLACE)
        tensors = [LogicalTensor("weight", (8,))]
        engine.vps = VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(4), layout, range(2))
        engine.candidates = Candidates(0, {member: str(member) for member in members})
        engine.control = SimpleNamespace(member=0)
        found.append(attached(engine, Together))
    return found[0], found[1]


def two_rounds(step: int, **of_other: Any) -> list[Any]:
    """Of both engines; the other one has made as many steps again."""
    known = {"is_over": True, "is_whole": True, "is_void": False, "error": "", "sent_bytes": 0, "seconds": 0}
    marks = SimpleNamespace(step=step), SimpleNamespace(step=2 * step)
    return [SimpleNamespace(mark=marks[0], **known), SimpleNamespace(mark=marks[1], **{**known, **of_other})]


def test_copies_of_all_engines_are_whole_together() -> None:
    """What one engine has whole counts as soon as the other one has its own of that boundary."""
    first, other = of_two_engines()
    first._enter()
    for buddies in (first, other):
        assert buddies.protection.buddies == PAIR and not buddies.protection.is_protected
    first._rounds = two_rounds(3, is_over=False)
    first._see(first._rounds)
    assert first._rounds and not first.protection.is_protected
    first._see(two_rounds(3))
    assert not first._rounds and (first.protection.step, other.protection.step) == (3, 6)
    assert first.protection.is_protected and other.protection.is_protected
    first._see(two_rounds(4, is_whole=False, error="no room"))
    assert (first.protection.step, other.protection.step) == (3, 6), "the moment before"


def test_the_same_members_keep_the_copies_of_all_engines() -> None:
    """Whatever ranks these have in each."""
    first, other = of_two_engines()
    for buddies, members in ((first, (4, 7, 5, 6)), (other, (6, 5, 7, 4))):
        engine: Any = buddies._engine
        engine.members, engine.layout = members, engine.layout.replace(data=4)
        engine.candidates = Candidates(0, {member: "ab"[member // 6] for member in members})
    first._enter()
    assert first.protection.buddies == other.protection.buddies == {4: (7,), 7: (4,), 5: (6,), 6: (5,)}
    assert first.buddies == ((1,), (0,), (3,), (2,)) and other.buddies == ((1,), (0,), (3,), (2,))
    other._engine.members = (4, 5, 6, 7)
    first._enter()
    assert other.buddies == ((3,), (2,), (1,), (0,))


def test_a_load_of_one_engine_counts_for_all() -> None:
    """The others' copies are of another history than what it goes on from."""
    first, other = of_two_engines()
    first._enter()
    first._see(two_rounds(3))
    first._rounds = two_rounds(4)
    other.replace()
    assert first.kept.since == other.kept.since == (3, 1)
    first._see(first._rounds)
    for buddies in (first, other):
        assert not buddies.protection.is_protected and buddies.protection.step is None
    first._see(two_rounds(5))
    assert other.protection.is_protected and other.protection.step == 10


def test_memory_is_that_of_all_engines() -> None:
    """The other one's whole state counts, since it has to go back, too."""
    first, other = of_two_engines()
    needs = [each._needs(["a", "b"])[0] for each in (first, other)]
    alone = memory_of_copies(first._engine.vps, first._engine.layout, ["a", "b"])[0]
    assert needs[0] == needs[1] == alone + 2 * alone, "at stage 0 each has all of it"


@pytest.mark.parametrize(("free", "node"), [(10**6, "b"), (10**6, "a"), (100, "b")])
def test_without_being_asked_for_there_are_copies_where_they_can_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int, node: str
) -> None:
    """On two nodes, in half of the memory that is free there; else one warning says what a death costs."""
    monkeypatch.setattr(buddies_module, "available_bytes", lambda: free)
    monkeypatch.setattr(td, "all_reduce", lambda said, group: said.copy_(said[:, :1].expand(2, 2).clone()))
    buddies, _ = of_two_engines()
    engine: Any = buddies._engine
    block = DynatrainConfig.model_validate({"fallback": {"path": "checkpoints"}}).in_launch(is_elastic=True)
    buddies = attached(engine)
    engine.settings, engine.extensions, buddies._settings = block, made(block), block.buddies
    engine.candidates, engine.world = Candidates(0, {0: "a", 1: node}), SimpleNamespace(default=None)
    buddies.on_start()
    for _ in range(2):
        buddies._enter()
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    if free > 100 and node == "b":
        assert not said and buddies._by_member == PAIR
        return
    why = "all members that train are on node 'a'" if node == "a" else "copies would take 192 bytes on node 'a'"
    assert not buddies._by_member and not buddies.protection.is_protected and buddies.protection.why
    assert len(said) == 1 and why in said[0]
    assert said[0].endswith("a death takes training back to the newest fallback checkpoint in checkpoints")


def test_a_step_that_waits_long_for_copies_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    buddies, _ = of_two_engines()
    buddies._enter()
    for share in (0.05, 0.25, 0.5):
        buddies._share = share
        buddies._see(two_rounds(3))
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "25 % of a step is waiting for the copies" in said[0]
