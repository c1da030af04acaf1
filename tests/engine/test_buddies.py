"""What buddies are refused with; `tests/elastic/test_buddies.py` has what they do."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as td
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_dynatrain.adapters.optimizers import register_optimizer
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine import initialize
from ds_dynatrain.engine.buddies import buddies as buddies_module
from ds_dynatrain.engine.buddies.buddies import Buddies
from ds_dynatrain.engine.buddies.choice import TRIAL_STEPS, Choice
from ds_dynatrain.engine.buddies.kept import Kept
from ds_dynatrain.engine.context import Candidates
from ds_dynatrain.engine.members.elastic_membership import ElasticMembership
from ds_dynatrain.engine.members.fixed_launch import FixedLaunch
from ds_dynatrain.engine.process import Process
from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.plan import memory_of_copies
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


def test_more_copies_than_others() -> None:
    """It is refused at the start; one member alone has no buddies, and says so."""
    engine: Any = SimpleNamespace(settings=settings(copies=2), members=(0, 1), control=SimpleNamespace(member=0))
    engine.layout, engine.candidates = Layout(data=2, zero_stage=1), Candidates(0, {0: "a", 1: "b"})
    with pytest.raises(ConfigError, match="copies: 2 others are to keep each copy, and 2 members work; start on 3"):
        Buddies(engine).check()


class Known(torch.optim.Adam):
    """Of a user's, who has said that its steps can be replayed."""


register_optimizer(Known, ("exp_avg", "exp_avg_sq"), {"step": torch.tensor(0.0)}, replays=True)


class OwnAdam(torch.optim.Adam):
    """Of a user's, of which nothing is known but its states."""


register_optimizer(OwnAdam, ("exp_avg", "exp_avg_sq"), {"step": torch.tensor(0.0)})


def zero_of(cls: type = DeepSpeedZeroOptimizer, **more: Any) -> Any:
    """A DeepSpeed optimizer without what makes one."""
    found = cls.__new__(cls)
    vars(found).update({"cpu_offload": False, "offload_optimizer": False, **more})
    return found


PARAMETERS = [nn.Parameter(torch.zeros(2))]
ADAM = torch.optim.AdamW(PARAMETERS)
NOT_REPLAYED = {
    "stage 0": (Layout(data=2, zero_stage=0), zero_of(), ADAM, "at ZeRO stage 0 nobody has a part of the state"),
    "tensor": (Layout(data=2, tensor=2, zero_stage=1), zero_of(), ADAM, "in a layout with tensor=2 steps are not"),
    "a pipeline at stage 0": (Layout(data=2, pipe=2, zero_stage=0), zero_of(), ADAM, "at ZeRO stage 0 nobody has"),
    "BF16_Optimizer": (Layout(data=2, zero_stage=1), zero_of(BF16_Optimizer), ADAM, "gradients of a BF16_Optimizer"),
    "offload at stage 3": (
        Layout(data=2, zero_stage=3),
        zero_of(DeepSpeedZeroOptimizer_Stage3, offload_optimizer=True),
        ADAM,
        "with zero_optimization.offload_optimizer at stage 3",
    ),
    "Muon": (
        Layout(data=2, zero_stage=1),
        zero_of(),
        MuonWithAuxAdam([{"params": [nn.Parameter(torch.zeros(2, 2))], "use_muon": True}]),
        "MuonWithAuxAdam is not known to give equal bits",
    ),
    "FusedAdam": (
        Layout(data=2, zero_stage=1),
        zero_of(),
        object.__new__(FusedAdam),
        "FusedAdam is not known to give equal bits",
    ),
    "a user's": (Layout(data=2, zero_stage=1), zero_of(), OwnAdam(PARAMETERS), "OwnAdam is not known to give equal"),
}


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_what_cannot_be_replayed(name: str) -> None:
    """It is refused at the start, by name; where a later world is so, copies are taken."""
    layout, zero, basic, words = NOT_REPLAYED[name]
    engine: Any = SimpleNamespace(settings=settings(mode="replay"), world=None, layout=layout, rank=1)
    engine.host = SimpleNamespace(optimizer=zero, basic_optimizer=basic)
    buddies = Buddies(engine)
    with pytest.raises(UnsupportedError, match=f'{words}.*a buddy has to come to the same bits.*take "copy"'):
        buddies.check()
    buddies._choice.enter(True)
    assert buddies.protection.mode == "copy"


@pytest.mark.parametrize("mode", ["replay", "auto"])
def test_steps_are_replayed_by_one_buddy_alone(mode: str) -> None:
    """With several copies "replay" is refused at the start, and "auto" takes copies."""
    engine: Any = SimpleNamespace(settings=settings(mode=mode, copies=2), world=None, rank=1)
    engine.layout, engine.host = (
        Layout(data=3, zero_stage=1),
        SimpleNamespace(optimizer=zero_of(), basic_optimizer=ADAM),
    )
    buddies = Buddies(engine)
    if mode == "replay":
        with pytest.raises(UnsupportedError, match="one buddy alone makes the steps of a member, and 2 are asked for"):
            buddies.check()
    buddies._choice.enter(True)
    buddies._choice.weigh(0.5, 0.1)
    assert buddies.protection.mode == "copy" and buddies.protection.every_steps == (25 if mode == "auto" else 1)


@pytest.mark.parametrize("layout", [Layout(data=2, zero_stage=2), Layout(data=2, pipe=2, zero_stage=1)], ids=str)
def test_what_can_be_replayed(layout: Layout) -> None:
    engine: Any = SimpleNamespace(settings=settings(mode="replay"), world=None, layout=layout, rank=1)
    for basic in (ADAM, torch.optim.SGD(PARAMETERS), Known(PARAMETERS)):
        engine.host = SimpleNamespace(optimizer=zero_of(), basic_optimizer=basic)
        buddies = Buddies(engine)
        buddies._choice.enter(True)
        assert buddies.protection.mode == "replay"


def test_three_times_another_replica_is_enough() -> None:
    """Each time the state is copied anew; from then on copies are taken."""
    engine: Any = SimpleNamespace(settings=settings(mode="replay", verify_every_steps=2), world=None, rank=1)
    choice = Choice(engine, Kept())
    choice.is_on = True
    replay: Any = SimpleNamespace(is_sound=True, mark=SimpleNamespace(step=3), verify=lambda: False, seconds=0)
    replay.note = replay.put_aside = lambda: None
    choice.replay = replay
    assert choice.goes_on(), "not looked at in this step"
    replay.mark.step = 4
    for _ in range(2):
        choice.replay = replay
        assert not choice.goes_on() and choice.is_on and choice.replay is None, "all is copied anew"
    choice.replay = replay
    assert choice.goes_on() and not choice.is_on and choice.replay is None
    choice.enter(True)
    assert not choice.is_on, "nor in another world"


def test_where_a_replica_is_of_no_use_all_is_copied_anew() -> None:
    """What there is of the others counts until then."""
    ended = list[str]()
    choice = Choice(SimpleNamespace(settings=settings(mode="replay")), Kept())  # type: ignore[arg-type]
    choice.is_on = True
    choice.replay = SimpleNamespace(is_sound=False, put_aside=lambda: ended.append("aside"))  # type: ignore[assignment]
    assert not choice.goes_on() and choice.replay is None and ended == ["aside"]


@pytest.mark.parametrize("mode", ["copy", "auto", "replay", "off"])
def test_what_is_there(mode: str) -> None:
    elastic().refuse(settings(mode=mode), nn.Linear(2, 2))


def test_beside_another_engine() -> None:
    """All engines have the same buddies, or none; no steps are replayed there, and "auto" takes copies."""
    blocks = [settings(), settings(mode="off"), settings(copies=2), settings(every_steps=3)]
    for one, other in itertools.permutations(blocks, 2):
        there: Any = SimpleNamespace(settings=other, job=SimpleNamespace(number=1))
        with pytest.raises(ConfigError, match=r"dynatrain\.buddies: .* in engine 1; .* give each of them the same"):
            initialize._refuse_beside([there], one, nn.Linear(2, 2), None)
    for mode in ("copy", "auto", "off"):
        there = SimpleNamespace(settings=settings(mode=mode))
        initialize._refuse_beside([there], settings(mode=mode), nn.Linear(2, 2), None)
    with pytest.raises(UnsupportedError, match="buddies that replay steps of several engines"):
        initialize._refuse_beside([there], settings(mode="replay"), nn.Linear(2, 2), None)


@pytest.mark.parametrize("mode", ["copy", "auto"])
def test_of_several_engines_no_steps_are_replayed(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(Process, "is_shared", True)
    engine: Any = SimpleNamespace(settings=settings(mode=mode), world=None, members=(0, 1), rank=0)
    engine.layout, engine.host = (
        Layout(data=2, zero_stage=2),
        SimpleNamespace(optimizer=zero_of(), basic_optimizer=ADAM),
    )
    buddies = Buddies(engine)
    buddies._choice.enter(True)
    boundary(buddies, 0.09)
    assert buddies.protection.mode == "copy" and buddies.protection.every_steps == (5 if mode == "auto" else 1)


def boundary(buddies: Buddies, share: float) -> int:
    """How often copies are taken after a round that is whole, with what a step waited for as a share of it."""
    of: Any = SimpleNamespace(is_over=True, is_whole=True, is_void=False, mark=None, error="", sent_bytes=0, seconds=0)
    of.mark = SimpleNamespace(step=3)
    buddies._share = share
    buddies._see([of])
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


@pytest.mark.parametrize(("replayed", "mode", "every"), [(0.03, "replay", 1), (0.05, "copy", 5)])
def test_auto_tries_to_replay(monkeypatch: pytest.MonkeyPatch, replayed: float, mode: str, every: int) -> None:
    """Where copies cost too much and steps can be replayed: it goes on with these where a step waits less for them."""
    monkeypatch.setattr(td, "all_reduce", lambda *_, **__: None)
    engine: Any = SimpleNamespace(settings=settings(mode="auto"), world=None, members=(0, 1), rank=0)
    engine.layout = Layout(data=2, zero_stage=2)
    engine.host = SimpleNamespace(optimizer=zero_of(), basic_optimizer=ADAM)
    buddies = Buddies(engine)
    choice = buddies._choice
    choice.enter(True)
    assert boundary(buddies, 0.01) == 1 and buddies.protection.mode == "copy", "no need to"
    buddies.keeper.take_seconds = 0.04
    boundary(buddies, 0.09)
    assert buddies.protection.mode == "replay"
    engine.world = SimpleNamespace(default=None)
    for step in range(TRIAL_STEPS):
        choice.replay = SimpleNamespace(is_sound=True, mark=SimpleNamespace(step=1 + step), seconds=replayed)  # type: ignore[assignment]
        choice.replay.note = choice.replay.put_aside = lambda: None  # type: ignore
        assert choice.is_on and choice.goes_on()
    choice.replay = None
    assert (buddies.protection.mode, buddies.protection.every_steps) == (mode, every)
    choice.weigh(0.09, 0.04)
    assert choice.is_on == (mode == "replay"), "once in a world"


def test_auto_takes_copies_where_nothing_can_be_replayed() -> None:
    engine: Any = SimpleNamespace(settings=settings(mode="auto"), world=None, members=(0, 1), rank=0)
    engine.layout, engine.host = Layout(data=2, zero_stage=0), None
    buddies = Buddies(engine)
    buddies._choice.enter(True)
    assert boundary(buddies, 0.09) == 5 and buddies.protection.mode == "copy"


def one_tensor(layout: Layout) -> VirtualParameterSpace:
    """In fp32 with Adam."""
    tensors = [LogicalTensor("w", (7, 3), 0)]
    return VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(4), layout, range(layout.world_size))


def test_in_another_world_all_begin_with_the_same_interval() -> None:
    """Members that have just come do not know how seldom the others took copies, and all have to take them at once."""
    engine: Any = SimpleNamespace(settings=settings(mode="auto"), world=None, members=(0,), rank=0, vps=None)
    engine.layout, engine.candidates = Layout(data=1, zero_stage=1), Candidates(0, {0: "a"})
    engine.vps, engine.control = one_tensor(engine.layout), SimpleNamespace(member=0)
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
    buddies._see([failed])
    assert not buddies.protection.is_protected and buddies.protection.why
    boundary(buddies, 0.0)
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
    buddies = Buddies(engine)
    buddies._pairing.by_member = kept_by
    boundary(buddies, 0.0)
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
    buddies = Buddies(engine)
    boundary(buddies, 0.0)
    assert buddies.protection.is_protected and buddies.protection.step == 3
    under_way: Any = SimpleNamespace(is_over=True, is_whole=True, is_void=False, error="", sent_bytes=0, seconds=0)
    under_way.mark = SimpleNamespace(step=4)
    buddies._rounds = [under_way]
    buddies.replace()
    assert buddies.kept.since == (3, 1)
    assert not buddies.protection.is_protected and buddies.protection.step is None
    buddies._see([under_way])
    assert not buddies.protection.is_protected and buddies.protection.step is None
    assert boundary(buddies, 0.0) and buddies.protection.is_protected


PLACE: dict[str, Any] = {"generation": 3, "segment": "3.1", "registered": (), "global_steps": 4}
"""Of an engine after its first load in a world."""


def of_two_engines() -> tuple[Buddies, Buddies]:
    """Those of the first engine of a process and of another one, in a world of two."""
    members, found = (0, 1), list[Buddies]()
    for layout in (Layout(data=2, zero_stage=1), Layout(data=2, zero_stage=0)):
        engine: Any = SimpleNamespace(settings=settings(), world=None, members=members, rank=0, layout=layout, **PLACE)
        tensors = [LogicalTensor("weight", (8,))]
        engine.vps = VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(4), layout, range(2))
        engine.candidates = Candidates(0, {member: str(member) for member in members})
        engine.control = SimpleNamespace(member=0)
        found.append(Buddies(engine, lambda: found))
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
    assert first.keeper.buddies == ((1,), (0,), (3,), (2,)) and other.keeper.buddies == ((1,), (0,), (3,), (2,))
    other._engine.members = (4, 5, 6, 7)
    first._enter()
    assert other.keeper.buddies == ((3,), (2,), (1,), (0,))


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
    block = DynatrainConfig.model_validate({"fallback": {"path": "checkpoints"}})
    engine.settings, buddies._settings, buddies._of_all = block, block.buddies, tuple
    engine.candidates, engine.world = Candidates(0, {0: "a", 1: node}), SimpleNamespace(default=None)
    buddies._pairing._settings = block.buddies
    buddies.check()
    for _ in range(2):
        buddies._enter()
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    if free > 100 and node == "b":
        assert not said and buddies._pairing.by_member == PAIR
        return
    why = "all members that train are on node 'a'" if node == "a" else "copies would take 192 bytes on node 'a'"
    assert not buddies._pairing.by_member and not buddies.protection.is_protected and buddies.protection.why
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
