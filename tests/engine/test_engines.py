"""Several engines in one process: each switches by itself, and none is changed by what another one does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as td
from deepspeed.runtime.sequence_parallel import parallel_state_sp

import ds_dynatrain
from ds_dynatrain.errors import DynatrainError
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.switch import Transaction
from tests.engine import axis_walks, jobs, oracle
from tests.engine.axis_walks import Subject
from tests.engine.models import Sequences, decay_groups, named_groups, small_gpt
from tests.engine.pipelines import pipeline
from tests.engine.pool import RankPool
from tests.engine.subjects import SUBJECTS, language_model
from tests.engine.test_zero_init import under_init
from tests.engine.transitions import layout

STEPS = 6
SAVED_AT = 3
Switches = Mapping[int, str]
"""Optimizer steps done -> the layout to switch to then, in the short form of `transitions`."""


@dataclass(frozen=True)
class Kind:
    """How one engine is made, and its switches. seed: of the random streams that it starts with,
    None for those that are there."""

    find: Callable[[], Subject]
    start: str
    switches: Switches = field(default_factory=dict)
    seed: int | None = 11
    dtype: str = "fp32"


def by_tensor(engine: Any, batch: Any) -> float:
    """One optimizer step by `loss.backward()`, where DeepSpeed allows it."""
    loss = engine(*batch)
    loss.backward() if engine.layout.zero_stage else engine.backward(loss)
    engine.step()
    return float(loss.item())


def dropping(dropout: float = 0.1, **sizes: Any) -> Subject:
    """A model that draws from the default stream."""
    return Subject(partial(small_gpt, dropout=dropout, **sizes), Sequences, groups=decay_groups, step=by_tensor)


def from_init() -> Subject:
    """A model of `zero.Init`: cut over whatever `torch.distributed` speaks of when it is built."""
    return Subject(partial(under_init, jobs.config(start=(4, 3))), Sequences, groups=named_groups)


ACTOR = Kind(partial(language_model, "llama of 4 kv"), "d4z1", {1: "d2t2z1", 3: "t4z2", 5: "d4z3"})
CRITIC = Kind(partial(dropping, width=12, hidden=18), "d4z3", {3: "d4z2", 5: "d4z0"})
REWARD = Kind(dropping, "d4z1", {3: "d4z3"}, dtype="bf16")


class Run:
    """An engine, its loader, and the losses of its steps on this rank."""

    def __init__(self, kind: Kind, **block: Any) -> None:
        subject = kind.find()
        model = subject.build()
        if kind.seed is not None:
            torch.manual_seed(kind.seed)
        settings = axis_walks.configured(subject, kind.dtype, layout(kind.start), **block)
        given = {} if subject.groups is None else {"model_parameters": subject.groups(model)}
        self.kind, self.subject = kind, subject
        self.engine, *_ = ds_dynatrain.initialize(model=model, config=settings, **given)
        self.loader = self.engine.loader(subject.data(96), num_workers=0)
        self.losses: list[float] = []
        self.events: list[str] = []
        self._batches: Iterator[Any] = iter(())

    def ask(self) -> bool:
        """Ask for the switch that is due at this step, if there is one."""
        step = self.engine.global_steps
        wanted = self.kind.switches.get(step)
        if wanted is not None:
            self.engine.switch(layout(wanted), at=step)
        return wanted is not None

    def step(self) -> None:
        """One optimizer step, and the switch before it that is due."""
        is_switched = self.ask()
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches)
        self.losses.append(self.subject.step(self.engine, batch))
        if is_switched:
            self.events.append(self.engine.last_switch.outcome)

    def state(self) -> dict[str, bytes]:
        """All of it, whole, from wherever it lies."""
        with self.engine.turn():
            found = oracle.gather(self.engine, self.subject.places)
        return {f"{name} {kind}": bytes(held.view(torch.uint8).numpy()) for (name, kind), held in found.tensors.items()}


@contextmanager
def running(*given: Kind, **block: Any) -> Iterator[list[Run]]:
    """Engines that are destroyed at the end, in the order in which they were made."""
    with ExitStack() as stack:
        runs = []
        for kind in given:
            runs.append(Run(kind, **block))
            stack.callback(runs[-1].engine.destroy)
        yield runs


Trained = tuple[list[float], list[str], dict[str, bytes]]


def trained(given: Sequence[Kind]) -> list[Trained]:
    """Losses, events and state of each engine after all have trained, step by step in turns."""
    with running(*given) as runs:
        for _ in range(STEPS):
            for run in runs:
                run.step()
        return [(run.losses, run.events, run.state()) for run in runs]


def compare(pool: RankPool, given: Sequence[Kind]) -> None:
    """Together and alone: losses and states are the same, bit for bit."""
    together = pool.run(trained, given=given, seconds=200)
    for place, kind in enumerate(given):
        alone = pool.once(trained, given=[kind], seconds=200)
        for rank, results in enumerate(alone):
            losses, events, state = together[rank][place]
            assert events == ["committed"] * len(kind.switches)
            assert losses == results[0][0], f"rank {rank}"
            assert [name for name in state if state[name] != results[0][2][name]] == []


@pytest.mark.parametrize(
    "given", [[CRITIC, REWARD], pytest.param([ACTOR, CRITIC, REWARD], marks=pytest.mark.full)], ids=len
)
def test_each_trains_as_if_alone(pool: RankPool, given: list[Kind]) -> None:
    """Other models, layouts, ranks, stages and draws; also switches of all of them at one step."""
    compare(pool, given)


AXES = {
    "zero.Init": Kind(from_init, "d4z3", {2: "d4z1", 4: "d4z3"}),
    "pipe": Kind(SUBJECTS["PipelineModule"], "p2d2z1", {2: "p4z1", 4: "d4z0"}),
    "AutoEP": Kind(SUBJECTS["AutoEP"], "d4e2z1", {2: "d4e4z3", 4: "d4z2"}),
    "moe": Kind(SUBJECTS["deepspeed.moe"], "d4z1", {2: "d4e2z1", 4: "d4e4z2"}),
    "sequence": Kind(SUBJECTS["Ulysses"], "d2s2z1", {2: "s4z3", 4: "d4z1"}),
    "autocast": Kind(
        partial(language_model, "llama of 4 kv", torch_autocast={"enabled": True, "dtype": "bfloat16"}),
        "d2t2z1",
        {3: "d4z2"},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "names",
    [
        ("pipe", "AutoEP"),
        ("moe", "sequence"),
        ("autocast", "pipe"),
        ("AutoEP", "zero.Init"),
        ("pipe", "pipe"),
    ],
    ids="+".join,
)
def test_axes_beside_each_other(pool: RankPool, names: tuple[str, ...]) -> None:
    compare(pool, [AXES[name] for name in names])


def sequence_ranks() -> list[int]:
    """What DeepSpeed's module of sequence parallelism says, wherever it is asked; 0 where it is not set up."""
    asked = parallel_state_sp.get_sequence_parallel_world_size
    kinds = [replace(ACTOR, switches={}), replace(AXES["sequence"], switches={1: "s4z1"})]
    with running(*kinds) as (actor, other):
        found = [asked()]
        for _ in range(2):
            actor.step()
            other.step()
            with actor.engine.turn():
                found.append(asked())
            found.append(asked())
    with pytest.raises(AssertionError, match="not initialized"):
        asked()
    return found


def test_sequence_ranks_are_known_between_the_calls(pool: RankPool) -> None:
    """As in DeepSpeed, which sets them up once: also in the turn of an engine without that axis."""
    assert pool.run(sequence_ranks) == [[2, 2, 2, 4, 4]] * 4


def in_background() -> list[Any]:
    """Two switches that are prepared beside each other, each of which takes effect when it is ready."""
    still = [replace(kind, switches={}) for kind in (ACTOR, CRITIC)]
    with running(*still) as runs:
        for run, target in zip(runs, ("d2t2z1", "d4z1"), strict=True):
            run.step()
            run.engine.switch(layout(target))
        while not all(run.engine.last_switch for run in runs):
            for run in runs:
                run.step()
        return [(run.engine.last_switch.outcome, str(run.engine.layout)) for run in runs]


@pytest.mark.full
def test_switches_in_the_background_at_once(pool: RankPool) -> None:
    """Both read their members' memory: the end of one must not forbid the other to."""
    for found in pool.run(in_background):
        assert [outcome for outcome, _ in found] == ["committed", "committed"]
        assert [name for _, name in found] == [str(layout("d2t2z1")), str(layout("d4z1"))]


def failing(which: int) -> list[Any]:
    """Both ask for a switch at one step, and that of one engine fails on member 2."""
    verify = Transaction._verify
    kinds = [replace(ACTOR, switches={2: "d2t2z1"}), replace(CRITIC, switches={2: "d4z2"})]
    with running(*kinds) as runs:

        def fail(transaction: Transaction) -> str:
            if transaction.engine is runs[which].engine._parts and transaction.control.member == 2:
                raise RuntimeError("made to fail")
            return verify(transaction)

        with patch.object(Transaction, "_verify", fail):
            for _ in range(STEPS):
                for run in runs:
                    run.step()
        return [(run.losses, run.events, run.state()) for run in runs]


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_switch_that_fails_changes_neither(pool: RankPool, which: int) -> None:
    together = pool.run(failing, which=which, seconds=120)
    for place, kind in enumerate((ACTOR, CRITIC)):
        switches = {} if place == which else {2: "d2t2z1" if place == 0 else "d4z2"}
        alone = pool.once(trained, given=[replace(kind, switches=switches)], seconds=120)
        for rank in range(4):
            losses, events, state = together[rank][place]
            assert events == ["rolled_back" if place == which else "committed"]
            assert (losses, state) == (alone[rank][0][0], alone[rank][0][2])


def ending(first: int) -> list[float]:
    """One engine ends in the middle of the other's training; the other one goes on alone, and a third one comes."""
    with running(ACTOR, CRITIC) as runs:
        for _ in range(3):
            for run in runs:
                run.step()
        runs[first].engine.destroy()
        kept = runs[1 - first]
        kept.step()
        with running(replace(REWARD, switches={1: "d4z3"}, seed=None)) as (
            third,
        ):  # the kept one has the process to itself
            for _ in range(2):
                third.step()
                kept.step()
        while kept.engine.global_steps < STEPS:
            kept.step()
        return kept.losses


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.full)])
def test_one_ends_and_the_others_stay(pool: RankPool, first: int) -> None:
    kind = (ACTOR, CRITIC)[1 - first]
    for losses, alone in zip(pool.run(ending, first=first, seconds=120), pool.once(trained, given=[kind]), strict=True):
        assert losses == alone[0][0]


def ending_inside() -> list[Any]:
    """One engine ends in the middle of the other one's turn, as one does that is collected there."""
    with running(CRITIC) as (kept,):
        other = Run(replace(ACTOR, switches={}))
        for _ in range(3):
            other.step()
            kept.step()
        with kept.engine.turn():
            torch.rand(1)  # moves its stream, to where it would not be if it had its own back too soon
            other.engine.destroy()
            left = len(PROCESS.engines)
            drawn = torch.rand(1).item()
        while kept.engine.global_steps < STEPS:
            kept.step()
        return [left, kept.losses, drawn, td.get_rank() == kept.engine.rank]


def drawing_inside() -> list[Any]:
    """The same with no other engine."""
    with running(CRITIC) as (kept,):
        for _ in range(3):
            kept.step()
        drawn = torch.rand(2)[1].item()
        while kept.engine.global_steps < STEPS:
            kept.step()
        return [1, kept.losses, drawn, True]


@pytest.mark.full
def test_one_that_ends_inside_anothers_turn_changes_nothing(pool: RankPool) -> None:
    assert pool.run(ending_inside) == pool.run(drawing_inside)


def saving(folder: Path) -> list[Any]:
    """The actor saves, goes on, and loads in another layout; the critic saves in DeepSpeed's format meanwhile."""
    with running(ACTOR, CRITIC) as runs:
        actor, critic = runs
        for _ in range(SAVED_AT):
            for run in runs:
                run.step()
        actor.engine.save(folder / "actor")
        critic.engine.save_checkpoint(str(folder / "critic"))
        saved = actor.state()
        for run in runs:
            run.step()
        for _ in range(2):
            critic.step()
        actor.engine.load(folder / "actor")
        same = actor.state() == saved and actor.engine.global_steps == SAVED_AT
        while critic.engine.global_steps < STEPS:
            critic.step()
        critic.engine.load_checkpoint(str(folder / "critic"))
        return [same, critic.losses, critic.engine.global_steps]


@pytest.mark.full
def test_checkpoints_are_those_of_one_engine(pool: RankPool, tmp_path: Path) -> None:
    alone = pool.once(trained, given=[CRITIC])
    for (same, losses, step), expected in zip(pool.run(saving, folder=tmp_path, seconds=120), alone, strict=True):
        assert same and losses == expected[0][0] and step == SAVED_AT


def neutral() -> list[Any]:
    """Between calls: ranks and draws of the script, and what an engine's turn shows."""
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    with running(replace(ACTOR, switches={1: "d2t2z1"}), CRITIC) as runs:
        torch.manual_seed(5)
        drawn, ranks = [], []
        for _ in range(3):
            for run in runs:
                run.step()
            drawn.append(torch.rand(1).item())
            ranks.append((td.get_rank(), td.get_world_size()))
            total = torch.ones(1)
            td.all_reduce(total)
        turns = []
        for run in runs:
            with run.engine.turn():
                turns.append(td.get_rank() == run.engine.rank)
        own = runs[0].engine.members.index(td.get_rank()) == runs[0].engine.rank
        return [drawn == expected, set(ranks), total.item(), turns, own, runs[0].engine.members]


def test_between_calls_the_process_is_the_scripts(pool: RankPool) -> None:
    for member, (is_drawn, ranks, total, turns, is_own, _) in enumerate(pool.run(neutral)):
        assert is_drawn and is_own
        assert ranks == {(member, 4)} and total == 4.0
        assert turns == [True, True]


def refused(call: Callable[[], Any]) -> str:
    """The words of an error of ours."""
    try:
        call()
    except DynatrainError as error:
        return str(error)
    return "no error"


def refusals(folder: Path) -> list[str]:
    """What cannot be, one after the other; both engines train on."""
    block = {"fallback": {"path": str(folder)}}
    still = [replace(kind, switches={}) for kind in (ACTOR, CRITIC)]
    with running(still[0], **block) as (actor,):
        found = [
            refused(lambda: Run(replace(still[1], start="d2z1"))),
            refused(lambda: Run(still[1], **block)),
        ]
        actor.step()
        with running(still[1]) as (critic,):
            critic.step()
            found.append(refused(lambda: critic.engine.switch(data=2)))
            found.append(str(critic.engine.plan(data=2).refusal))
            module = pipeline("tied")
            module.global_rank ^= 1
            found.append(refused(lambda: ds_dynatrain.initialize(model=module, config=jobs.config(start=(4, 1)))))
            critic.engine.switch(zero_stage=2, at=5)
            found.append(refused(lambda: Run(REWARD)))
            for _ in range(5):
                actor.step()
                critic.step()
            found += [str(run.engine.global_steps) for run in (actor, critic)]
    with running(replace(still[1], start="d2z1")):
        found.append(refused(lambda: Run(still[0])))
    return found


def test_layouts_that_leave_processes_idle_are_refused(pool: RankPool, tmp_path: Path) -> None:
    idle = "which leaves 2 of 4 processes idle: an idle process waits in its loader"
    for start, folder, switch, plan, stage, busy, *steps, after in pool.run(refusals, folder=tmp_path, seconds=120):
        assert idle in start and idle in switch and idle in plan and idle in after
        assert "dynatrain.fallback.path" in folder and "of another engine of this process" in folder
        assert "PipelineModule: it was built as rank" in stage
        assert "a switch of another engine of this process is pending" in busy
        assert steps == ["6", "6"]


def same_model(stage: int) -> str:
    model = small_gpt()
    with jobs.job(jobs.config(start=(4, 3)), model=model) as made:
        found = refused(lambda: ds_dynatrain.initialize(model=model, config=jobs.config(start=(4, stage))))
        jobs.train(made, 2)
    return found


def test_a_model_of_another_engine_is_refused(pool: RankPool) -> None:
    for found in pool.run(same_model, stage=1):
        assert re.search("in data=4 zero_stage=1 with parameters of engine [0-9]+, in data=4 zero_stage=3", found), (
            found
        )


def through_both() -> list[str]:
    """Losses of two engines in one pass, in both styles; then one engine's alone."""
    found = []
    for style in ("engine", "loss"):
        with running(*(replace(CRITIC, start="d4z1", switches={}) for _ in range(2))) as (one, other):
            batch = next(iter(one.loader))
            losses = one.engine(*batch), other.engine(*batch)
            loss = losses[0] + losses[1]
            found.append(refused(partial(one.engine.backward, loss) if style == "engine" else loss.backward))
            with one.engine.turn():
                found.append(str(td.get_rank() == one.engine.rank))
            found.append(str(td.get_rank()))
    return found


def test_a_pass_through_both_is_refused(pool: RankPool) -> None:
    for member, words in enumerate(pool.run(through_both)):
        assert all("one backward pass through two engines" in each for each in words[::3])
        assert words[1::3] == ["True", "True"] and words[2::3] == [str(member)] * 2
