"""One history of a launch of fixed size, from a seed: its script asks for switches, and members work and idle.

The decisions are the product's (`membership.boundary_machine`), for a generation that never changes; processes, tensors
and the network are not. Every thread of a process is a generator that yields where it waits; chance says which goes on.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ds_dynatrain.membership import boundary_machine as do
from ds_dynatrain.membership.boundary_machine import BoundaryMachine, HeldState, OwnFacts
from ds_dynatrain.membership.destinations import Registry
from ds_dynatrain.membership.proposal import CONNECTING, Proposal
from ds_dynatrain.records import to_record
from ds_dynatrain.space import Layout
from tests.engine.simulated import Board, Engine
from tests.sim.history import StuckError

T = TypeVar("T")
Waiting = Generator[None, None, T]
STEPS = 12
MOST_TURNS = 20_000
MOST_ACTIONS = 20


@dataclass(frozen=True)
class Ask:
    """What is asked of one engine after a step. after: so many steps later; None where all are prepared. cause: the
    extension that asks; empty for the script.
    """

    members: tuple[int, ...]
    after: int | None
    late: bool
    cause: str

    def proposal(self, engine: Engine) -> Proposal:
        at = None if self.after is None else engine.step + self.after
        present, target = (engine.layout, engine.members), Layout(data=len(self.members), zero_stage=1)
        return Proposal(engine.attempt + 1, *present, target, self.members, at, late=self.late, cause=self.cause)


@dataclass
class Launch:
    """Its processes, and their one board. asks: by engine and step; fails: switches that are rolled back."""

    seed: int
    values: dict[tuple[int, str], Any] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    threads: list[Waiting[None]] = field(default_factory=list)
    asks: dict[tuple[int, int], Ask] = field(default_factory=dict)
    ended: list[Proposal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = chance = random.Random(f"launch {self.seed}")
        engines, size = chance.choice((1, 1, 2)), chance.randint(1, 4)
        self.connects = chance.random() < 0.5
        for engine in range(engines):
            for step in range(1, STEPS):
                if chance.random() < 0.4:
                    some = chance.sample(range(size), size if engines > 1 else chance.randint(1, size))
                    late = engines == 1 and chance.random() < 0.3
                    self.asks[engine, step] = Ask(
                        tuple(some), chance.choice((None, None, 0, 1, 4)), late, chance.choice(("", "balance"))
                    )
        first = tuple(range(size if engines > 1 else chance.randint(1, size)))
        for number in range(size):
            made = [
                Engine(Layout(data=len(first), zero_stage=1), first, number, number in first) for _ in range(engines)
            ]
            self.processes.append(Process(self, number, made))

    def run(self) -> None:
        """To the end of all scripts."""
        self.threads = [process.script() for process in self.processes]
        for _ in range(MOST_TURNS):
            thread = self.chance.choice(self.threads)
            if next(thread, self) is self:
                self.threads.remove(thread)
            if all(process.end for process in self.processes):
                return
        where = [f"{one.number}: {one.waits_for or one.end or 'turns'}" for one in self.processes]
        raise StuckError(f"seed {self.seed}: {'; '.join(where)}")

    def vote(self, board: LaunchBoard, key: str) -> bool:
        """What all decide: the first one to come here throws the coin."""
        return bool(board.decide(key, {"commit": self.chance.random() < 0.7, "reason": ""})["commit"])


@dataclass
class Process:
    """A process of a launch. end: how its script has ended. connected: switches that it has connected for."""

    launch: Launch
    number: int
    engines: list[Engine]
    end: str = ""
    waits_for: str = ""
    connected: set[tuple[int, int]] = field(default_factory=set)
    window: dict[int, tuple[Proposal, int]] = field(default_factory=dict)
    """Late switches between their votes, by engine, and the generation before each."""

    def __post_init__(self) -> None:
        self.machine = BoundaryMachine(lambda asked: None)

    def board(self, place: int) -> LaunchBoard:
        return LaunchBoard(self.launch.values, place)

    def script(self) -> Waiting[None]:
        """A loop like a user's, over all engines."""
        while self.engines[0].step < STEPS:
            for place in range(len(self.engines)):
                if not (yield from self._boundary(place)):
                    self.end = "idle"
                    return
                if (yield from self._train(place)):
                    yield from self._ask(place)
        for place in range(len(self.engines)):
            self.board(place).post(f"ended/{self.number}", True)
        self.end = "at its end"

    # ---- between two steps -------------------------------------------------------------------------------------------

    def _boundary(self, place: int) -> Waiting[bool]:
        """Whether this process works then; if not, the scripts of all that do have ended."""
        engine = self.engines[place]
        while True:
            for _ in range(MOST_ACTIONS):
                actions = self.machine.advance(self._own(place), None, ())
                for action in actions:
                    yield from self._do(action)
                if not actions:
                    break
            else:
                raise AssertionError(f"member {self.number} finds no end: {actions}")
            if engine.works or self.board(place).all_posted("ended", engine.members):
                return engine.works
            self.waits_for = "work"
            yield

    def _own(self, at: int) -> OwnFacts:
        held = []
        for place, one in enumerate(self.engines):
            asked = one.prepared
            is_open = asked is not None and self.launch.connects and (place, asked.generation) not in self.connected
            held.append(
                HeldState(
                    one.number,
                    one.layout,
                    one.members,
                    one.members.index(one.number) if one.works else None,
                    one.attempt,
                    one.generation,
                    one.step,
                    self.board(place),
                    pending=asked,
                    is_in_window=place in self.window,
                    lacks=partial(bool, one.attempt % 3) if is_open else None,
                )
            )
        return OwnFacts("", None, Registry(), False, tuple(held), at=at)

    def _train(self, place: int) -> Waiting[bool]:
        """Make a step with all that train; True if it was made, and False in a void batch."""
        engine, board = self.engines[place], self.board(place)
        if place in self.window and not (yield from self._settle(place, *self.window.pop(place))):
            return False
        key, where = f"step/{engine.generation}/{engine.step}", [engine.members, str(engine.layout)]
        assert self.number in engine.members, "who trains has a rank"
        said = yield from self._together(board, key, engine.members, where)
        assert all(each == where for each in said), "all that train do so in one world"
        engine.step += 1
        return True

    def _ask(self, place: int) -> Waiting[None]:
        engine, board, ask = (
            self.engines[place],
            self.board(place),
            self.launch.asks.get((place, self.engines[place].step)),
        )
        if ask is None or not engine.works:
            return
        mine = [engine.attempt, engine.prepared is None]
        said = yield from self._together(board, f"request/{engine.generation}/{engine.step}", engine.members, mine)
        assert all(each == mine for each in said), "all have heard of the same switches"
        if engine.prepared is not None and engine.prepared.cause and not ask.cause:  # the script's goes first
            if engine.number == engine.members[0]:
                board.decide(engine.prepared.record_key, {"commit": False, "reason": ""})
            engine.prepared = None
        if engine.prepared is None:
            asked = ask.proposal(engine)
            board.decide(f"proposal/{asked.generation}", to_record(asked))
            self._prepare(place, asked)

    # ---- what the machine wants --------------------------------------------------------------------------------------

    def _do(self, action: do.Action) -> Waiting[None]:
        match action:
            case do.Post(key, value, engine, is_decision=True, is_present=True):
                self.board(engine).decide(key, value)
            case do.Follow(engine, asked):
                self._prepare(engine, asked)
            case do.PassBy(place, asked, is_committed):
                one = self.engines[place]
                one.attempt, one.prepared = asked.generation, None
                if is_committed:
                    one.layout, one.members = asked.layout, asked.members
            case do.Connect(place):
                yield from self._connect(place)
            case do.Transact(int(place)):
                yield from self._transact(place)
            case _:
                raise AssertionError(action)

    def _prepare(self, place: int, asked: Proposal) -> None:
        engine = self.engines[place]
        assert asked.generation > engine.attempt and engine.prepared is None, "a number is used once"
        engine.prepared, engine.attempt = asked, asked.generation
        self.launch.threads.append(self._prepare_beside(self.board(place), asked))

    def _prepare_beside(self, board: LaunchBoard, asked: Proposal) -> Waiting[None]:
        """The thread of a preparation, which ends once all are prepared, or the switch is given up."""
        for _ in range(self.launch.chance.choice((0, 3, 30))):
            yield
        key = f"prepared/{asked.generation}"
        board.post(f"{key}/{self.number}", True)
        if board.all_posted(key, asked.union):
            board.post(f"{key}/all", "")

    def _connect(self, place: int) -> Waiting[None]:
        engine, board = self.engines[place], self.board(place)
        asked = _prepared(engine)
        yield from self._prepared_and_here(board, asked, f"{asked.ahead_key}/{CONNECTING}/0", engine)
        assert (place, asked.generation) not in self.connected, "once"
        self.connected.add((place, asked.generation))
        if not self.launch.vote(board, f"{asked.ahead_key}/record"):
            board.decide(asked.record_key, {"commit": False, "reason": ""})
            engine.prepared = None

    def _transact(self, place: int) -> Waiting[None]:
        engine, board = self.engines[place], self.board(place)
        asked = _prepared(engine)
        steps = yield from self._prepared_and_here(board, asked, f"{asked.key}/meet/0", engine)
        first = next(step for step in steps if step is not None)
        assert asked.at in (None, first), "at the step that was asked for"
        if asked.late:
            if self.launch.vote(board, f"entered/{asked.generation}"):
                self.window[place] = asked, engine.generation
                if self.number in asked.members:
                    self._enter(engine, asked, first)
                else:
                    yield from self._settle(place, *self.window.pop(place))
                return
            board.decide(asked.record_key, {"commit": False, "reason": ""})
        elif self.launch.vote(board, asked.record_key):
            self._enter(engine, asked, first)
        self._note(engine, asked)

    def _settle(self, place: int, asked: Proposal, before: int) -> Waiting[bool]:
        """The second vote of a late switch; whether it was a yes. before: the generation to go back to."""
        engine, board = self.engines[place], self.board(place)
        step = engine.step
        yield from self._together(board, f"{asked.key}/late", asked.union, None)
        is_committed = self.launch.vote(board, asked.record_key)
        if is_committed:
            self._enter(engine, asked, step)
        else:
            engine.layout, engine.members = asked.source_layout, asked.source_members
            engine.generation, engine.works = before, self.number in asked.source_members
        self._note(engine, asked)
        return is_committed

    def _enter(self, engine: Engine, asked: Proposal, step: int) -> None:
        engine.layout, engine.members, engine.step = asked.layout, asked.members, step
        engine.generation, engine.works = asked.generation, self.number in asked.members

    def _note(self, engine: Engine, asked: Proposal) -> None:
        engine.prepared = None
        self.launch.ended.append(asked)

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def _prepared_and_here(self, board: LaunchBoard, asked: Proposal, key: str, engine: Engine) -> Waiting[list[Any]]:
        """Where all members of both worlds stand, once they are prepared; None for idle ones."""
        steps = yield from self._together(board, key, asked.union, engine.step if engine.works else None)
        while not asked.is_prepared(board):
            yield
        assert len({*steps} - {None}) == 1, f"{asked}: they stand at {steps}"
        return steps

    def _together(self, board: LaunchBoard, key: str, members: Iterable[int], mine: Any) -> Waiting[list[Any]]:
        """What all of them say, once they have."""
        board.post(f"{key}/{self.number}", mine)
        self.waits_for = key
        while not board.all_posted(key, members):
            yield
        self.waits_for = ""
        return [board.read(f"{key}/{member}") for member in members]


class LaunchBoard(Board):
    """The board of an engine, in a launch whose generation never changes."""

    def post(self, key: str, value: Any) -> None:
        assert (self.engine, key) not in self.values, f"{key}: said twice"
        self.values[self.engine, key] = value

    def decide(self, key: str, value: Any) -> Any:
        return self.values.setdefault((self.engine, key), value)


def _prepared(engine: Engine) -> Proposal:
    assert engine.prepared is not None
    return engine.prepared


def launch(seed: int) -> Launch:
    """Run one. AssertionError if something happens that never may, StuckError if a script does not come to its end."""
    made = Launch(seed)
    made.run()
    return made
