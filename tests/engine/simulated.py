"""A job whose members come and go, without processes or tensors: real decisions, on the coordinator's side
(`elastic.membership_machine`) and on the members' (`BoundaryMachine`), around engines that hold nothing but numbers.

A member's turn is what its main thread does until it would wait. A collective is finished when all who take part have
begun it; a transaction is decided by the first who can tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.environment import WorkerPlace
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.engine.elastic import Elastic
from ds_dynatrain.errors import DynatrainError, SwitchRefused
from ds_dynatrain.membership import boundary_machine as do
from ds_dynatrain.membership.boundary_machine import BoundaryMachine
from ds_dynatrain.membership.destinations import (
    WITH_NEWCOMERS,
    Destination,
    DestinationFacts,
    Registry,
    Rules,
    choose,
    destinations,
    rule_of,
)
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.whole import Had, Mark, WholeCopies
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.space import Layout
from tests.elastic.driver import Driver

PLACE = Address("127.0.0.1", 1)
MOST_TURNS = 200


@dataclass
class Board:
    """The board of an engine in one generation."""

    values: dict[tuple[int, str], Any]
    engine: int = 0

    def read(self, key: str) -> Any | None:
        return self.values.get((self.engine, key))

    def all_posted(self, key: str, names: Iterable[int | str]) -> bool:
        return all((self.engine, f"{key}/{name}") in self.values for name in names)

    def of_all(self, engines: int) -> list[Board]:
        """Those of so many engines."""
        return [Board(self.values, engine) for engine in range(engines)]

    def decide(self, key: str, value: Any) -> Any:
        return self.values.setdefault((0, key), value)


@dataclass
class Engine:
    """As far as members come and go."""

    layout: Layout
    members: tuple[int, ...]
    number: int
    works: bool
    attempt: int = 1
    generation: int = 1
    step: int = 0
    prepared: Proposal | None = None
    copies: dict[Mark, set[int]] = field(default_factory=dict)
    """The ranks of whose copies its process has, at the last two moments."""

    def keep(self, first: Engine) -> None:
        """Its own copy, and that of the rank before it. first: the first engine, at whose boundary this is."""
        size = self.layout.world_size
        rank, when = self.members.index(self.number), (self.generation, f"{self.generation}.0", 0, self.step)
        mark = Mark(*when, self.layout, () if first is self else max(first.copies, key=lambda one: one.moment).moment)
        self.copies[mark] = {rank, (rank - 1) % size}
        for old in sorted(self.copies, key=lambda one: one.moment)[:-2]:
            del self.copies[old]


@dataclass
class Job:
    """All processes, the coordinator and the boards. votes: of the next transactions; True when they are used up."""

    nodes: int
    most: int
    stage: int
    engines: int
    widest: int
    has_checkpoints: bool
    has_buddies: bool = field(default=False, kw_only=True)
    least: int = field(default=1, kw_only=True)
    """MIN, and how many members the narrowest layout has."""
    driver: Driver = field(init=False)
    members: dict[str, Member] = field(default_factory=dict)
    boards: defaultdict[str, dict[tuple[int, str], Any]] = field(default_factory=lambda: defaultdict(dict))
    begun: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """The step that was begun last, by the start of the job, the engine's generation, and its number."""
    votes: list[bool] = field(default_factory=list)
    entered: dict[tuple[int, str], tuple[Proposal, ...]] = field(default_factory=dict)
    starts: int = 0
    """How often a job was begun."""
    wishes: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Widths that the script asks for, by the start of the job, the engine's generation and the step."""
    building: list[int] = field(default_factory=list)
    """So many turns the next newcomers need to make their engines; none when they are used up."""

    def __post_init__(self) -> None:
        self.driver = Driver(Settings(self.least, self.most))
        for number in range(self.nodes):
            self.come(f"n{number}")
        self.driver.wait(self.driver.settings.recovery_seconds + 0.1)

    def come(self, node: str) -> None:
        self.driver.start(node)
        self.members[f"{node}/0"] = Member(self, f"{node}/0")

    def board(self, world: Generation) -> Board:
        return Board(self.boards[world.prefix])

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members.values() if not member.end]

    def begin(self, world: Generation) -> None:
        """All members of a world start the job together: it begins anew, or a state that was lost comes back."""
        have_trained = [one for one in self.ended if one.id in self.driver.trained]
        membership = self.driver.membership
        newest = None if membership is None else membership.world
        is_over = newest is not None and world.generation < newest.generation
        if self.driver.terms == 1 and membership is not None and not is_over:
            known = [one for one in membership.roster if one not in membership._back]  # else given up, for now
            there = [member for member in self.alive if member.id in known]
            holders = [member.id for member in there for engine in member.engines if engine.works]
            assert not holders, f"{holders} have the state"
            assert not have_trained or world.begun or any(one.end == "saved" for one in self.ended)
        step = max((member.engines[0].step for member in have_trained), default=0) if world.begun else 0
        self.starts += 1
        for name in world.members:
            self.members[name].start(world, step)
        for member in self.ended:
            member.is_past = not world.begun

    @property
    def ended(self) -> list[Member]:
        """Those that have ended since the job began, or began anew."""
        return [member for member in self.members.values() if member.end and not member.is_past]

    def wish(self, width: int, soon: int) -> None:
        """The script asks for another width, after so many steps more."""
        working = [one for one in self.alive if any(engine.works for engine in one.engines)]
        if working and self.engines == 1:
            step = max(member.engines[0].step for member in working) + soon
            self.wishes[working[0].starts, working[0].engines[0].generation, step] = width

    def kill(self, member: Member) -> None:
        member.end = "dead"
        self.driver.die(member.id)

    def first_layout(self, members: int) -> Layout:
        return Layout(data=min(members, self.widest), zero_stage=self.stage)


class Member:
    """One process. end: why it has ended; heard: how many of the published generations."""

    def __init__(self, job: Job, name: str) -> None:
        self.job, self.id, self.end = job, name, ""
        self.elastic = Elastic(WorkerPlace(name.partition("/")[0], 0, 1, PLACE), DynatrainConfig(timeout_seconds=5.0))
        self.machine = BoundaryMachine(self._destinations)
        self.engines: list[Engine] = []
        self.world: Generation | None = None
        self.waits_in: tuple[str, Generation, do.Proposals] | None = None
        self.is_past = False
        self.starts = 0
        self.turns_to_build = 0
        self.coming: list[Engine] = []
        self.restores_from: tuple[WholeCopies, ...] = ()
        self.asked: Proposal | None = None
        """The switch that its script has asked for, while it is prepared."""

    @property
    def present(self) -> Board:
        """The board of the generation that it is in."""
        return Board({}) if self.elastic.world is None else self.job.board(self.elastic.world)

    # ---- what it hears and says --------------------------------------------------------------------------------------

    def hear(self) -> None:
        told = self.job.driver.told.get(self.id)
        if told is not None and not self.end:
            self.elastic.member._hear(told)
            self.say()

    def say(self) -> None:
        """To the coordinator, what has changed in the report."""
        now, known = self.elastic.member._report, self.job.driver.reports[self.id]
        step = max((engine.step for engine in self.engines), default=0)
        said = {name: getattr(now, name) for name in ("entered", "broken", "engines", "lacking")}
        if (said, step > 0) != ({name: getattr(known, name) for name in said}, known.step > 0):
            self.job.driver.say(self.id, **said, step=step)

    # ---- its main thread ---------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Go on until it waits for others, or has begun a step."""
        if self.end:
            return
        if self.coming:
            self._build()
        elif not self.engines:
            self._begin()
        elif self.waits_in is not None:
            self._wait()
        else:
            self._train()
            if self.waits_in is None:
                self._reach_boundary()
        if not self.end:
            self.say()

    @property
    def own(self) -> do.OwnFacts:
        is_change = self.world is not None and any(one.prepared not in (None, self.asked) for one in self.engines)
        there = self.job.board(self.world) if is_change and self.world is not None else self.present
        held = tuple(
            do.HeldState(
                one.number,
                one.layout,
                one.members,
                one.members.index(one.number) if one.works else None,
                one.attempt,
                one.generation,
                one.step,
                Board(there.values, place),
                pending=one.prepared,
                can_restore=self.job.has_checkpoints,
                copies=partial(_had, one),
            )
            for place, one in enumerate(self.engines)
        )
        elastic, is_leaving = self.elastic, self.elastic.member.is_leaving
        return do.OwnFacts(self.id, elastic.world, elastic.registry, elastic.is_aborted, held, is_leaving)

    def _begin(self) -> None:
        """With all that start the job; or by the record of one that runs."""
        world = self.elastic.member.newest
        if world is None or self.id not in world.members:
            if world is not None and world.change == "failure" and self.id in world.leaving:
                self.job.board(world).values[0, f"survivor/{self.id}"] = {"holds": [], "released": []}
            if self.job.driver.reports[self.id].leaving or (world is not None and not world.members):
                self._go("was told to leave")
            return
        board, is_led = self.job.board(world), bool(world.survivors)
        if not is_led and world.generation > 1:
            asked = (*world.members, *world.leaving)
            board.values[0, f"survivor/{self.id}"] = {"holds": [], "released": []}
            if not board.all_posted("survivor", asked):
                return
            is_led = any(board.values[0, f"survivor/{one}"]["holds"] for one in asked)
        record = board.read("job")
        if is_led and record is not None:
            number, self.starts = from_record(Registry, record["registry"]).numbers[self.id], record["starts"]
            where = Layout.from_dict(record["layout"]), tuple(record["members"])
            self.coming = [Engine(*where, number, False) for _ in range(self.job.engines)]
            self.turns_to_build = self.job.building.pop() if self.job.building else 0
            self.elastic.member.building()
            self._build()
        elif not is_led and all(self._starts_with(one, world) for one in world.members):
            self.job.begin(world)

    def _build(self) -> None:
        self.turns_to_build -= 1
        if self.turns_to_build <= 0:
            self.engines, self.coming = self.coming, []

    def _starts_with(self, other: str, world: Generation) -> bool:
        member = self.job.members[other]
        return not member.end and not member.engines and not member.coming and member.elastic.member.newest == world

    def start(self, world: Generation, step: int) -> None:
        """Start the job with all members of a world."""
        self.starts = self.job.starts
        registry, layout = Registry().extended(world.members), self.job.first_layout(len(world.members))
        number, members = registry.numbers[self.id], tuple(range(layout.world_size))
        self.engines = [Engine(layout, members, number, number in members, step=step) for _ in range(self.job.engines)]
        self.elastic.enter(world, registry, registry.ids_of(members))
        self.say()

    def _train(self) -> None:
        """Finish the step that was begun, if all have begun it."""
        first = self.engines[0]
        key, begun = (self.starts, first.generation), self.job.begun
        mine = begun.get((*key, first.number), 0)
        if not first.works or mine <= first.step:
            return
        if self.elastic.is_aborted:
            begun[(*key, first.number)] = first.step
        elif all(begun.get((*key, one), 0) >= mine for one in first.members):
            for engine in self.engines:
                engine.step = mine
                if self.job.has_buddies and first.layout.world_size > 1:
                    engine.keep(first)
            if (*key, first.step) in self.job.wishes and self.elastic.world is not None:
                self.waits_in = "ask", self.elastic.world, ()

    def _reach_boundary(self) -> None:
        first = self.engines[0]
        if first.works and self.job.begun.get((self.starts, first.generation, first.number), 0) > first.step:
            return  # in the middle of a step
        self.elastic.member.built()
        for _ in range(MOST_TURNS):
            boards = [] if self.world is None else self.job.board(self.world).of_all(self.job.engines)
            actions = self.machine.advance(self.own, self.elastic.member.newest, boards)
            self._carry_out(actions)
            if not actions or self.end or self.waits_in is not None:
                break
        else:
            raise AssertionError(f"{self.id} finds no end: {actions}")
        world = self.elastic.world
        is_ready = first.works and not self.end and self.waits_in is None and not self.elastic.is_aborted
        if is_ready and world is not None and not world.paused:
            self.job.begun[self.starts, first.generation, first.number] = first.step + 1

    # ---- what the machine wants --------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[do.Action]) -> None:
        for action in actions:
            try:
                self._do(action)
            except DynatrainError as error:
                self.job.kill(self)
                self.end = f"error: {error}"
            if self.end:
                return

    def _do(self, action: do.Action) -> None:
        machine, newest = self.machine, self.world
        match action:
            case do.Open(world):
                self.world = world
            case do.GiveUpPreparation():
                if self.asked is not None:  # the others wait for it in vain, and roll it back
                    self.present.decide(self.asked.record_key, {"commit": False, "reason": "given up"})
                for engine in self.engines:
                    self._drop(engine)
            case do.EndProcess(must_save):
                self._go("saved" if must_save else "left")
            case do.Fail(error):
                raise error
            case do.LetGo():
                self._let_go(self.engines)
            case do.Hold(sources):
                for engine, source in zip(self.engines, sources, strict=True):
                    if engine.number not in source.members:
                        self._let_go([engine])
                    engine.layout, engine.members = source.layout, source.members
            case do.Spend(proposals):
                for engine, proposal in zip(self.engines, proposals, strict=True):
                    engine.prepared, engine.attempt = None, proposal.generation
            case do.Post(key, value, 0, is_decision=True, is_present=True):
                self.present.decide(key, value)
            case do.Follow(0, asked):
                self._prepare_asked(asked)
            case do.PassBy(0, asked, is_committed):
                self.asked = self.engines[0].prepared = None
                self.engines[0].attempt = asked.generation
                if is_committed:
                    self.engines[0].layout, self.engines[0].members = asked.layout, asked.members
                    self.elastic.retrain(asked.members)
            case do.Transact(0):
                assert self.asked is not None and self.elastic.world is not None
                self.present.values[0, f"{_meeting(self.asked)}/{self.engines[0].number}"] = {}
                self.waits_in = "switch", self.elastic.world, (self.asked,)
            case do.Enter(world, registry, proposals):
                self._enter(world, registry, proposals)
            case _:
                assert newest is not None
                board = self.job.board(newest)
                match action:
                    case do.Know(registry, records):
                        for engine in self.engines:
                            is_same = engine.number == registry.numbers[self.id]
                            assert is_same or not engine.works, "the number of who holds something never changes"
                            engine.number = registry.numbers[self.id]
                        for engine, record in zip(self.engines, records, strict=False):
                            engine.attempt, engine.members = int(record["attempt"]), tuple(record["members"])
                            engine.layout = Layout.from_dict(record["layout"])
                    case do.Post(key, value, is_decision=True):
                        board.decide(key, value)
                    case do.Post(key, value, engine_):
                        assert (engine_, key) not in board.values or not key.startswith("change/"), "said once"
                        board.values[engine_, key] = value
                    case do.PostJob(registry):
                        self._post_job(board, registry)
                    case do.Prepare(proposals):
                        self._prepare(board, proposals)
                    case do.Transact():
                        board.values[0, f"{_meeting(machine.proposals[0])}/{self.engines[0].number}"] = {}
                        self.waits_in = "transact", newest, machine.proposals
                    case do.Restore(proposals, copies) | do.Serve(proposals, copies):
                        board.values[0, f"restoring/{proposals[0].generation}/{self.engines[0].number}"] = {}
                        what = "serve" if isinstance(action, do.Serve) else "restore"
                        self.waits_in, self.restores_from = (what, newest, proposals), copies
                        for engine, whole in zip(self.engines, copies, strict=False):
                            ranks = enumerate(whole.holders)
                            mine = {rank for rank, holder in ranks if holder == engine.number}
                            assert mine <= engine.copies.get(whole.mark, set()), "it has what it gives"
                        assert len({whole.mark.moment for whole in copies}) < 2, "all at one moment"
                    case _:
                        raise AssertionError(action)

    def _go(self, why: str) -> None:
        self.end = why
        self.job.driver.bye(self.id)

    def _let_go(self, engines: list[Engine]) -> None:
        for engine in engines:
            engine.works = False

    def _drop(self, engine: Engine) -> None:
        if engine.prepared is not None:
            engine.attempt, engine.prepared, self.asked = engine.prepared.generation, None, None

    def _post_job(self, board: Board, registry: Registry) -> None:
        for place, engine in enumerate(self.engines):
            record = {"engines": len(self.engines), "attempt": engine.attempt, "layout": engine.layout.to_dict()}
            record["starts"] = self.starts
            board.values[place, "job"] = {**record, "members": engine.members, "registry": to_record(registry)}

    def refuse(self) -> None:
        """Refuse what it has asked for, as its board is lost; the others learn that by their time-out at the latest."""
        first, self.waits_in = self.engines[0], None
        self.present.values[0, f"{_request(first)}/{first.number}"] = 0, False

    def _ask(self, world: Generation) -> None:
        """Ask for a switch with all that train; each refuses while it prepares another one."""
        first, board = self.engines[0], self.job.board(world)
        key, is_over = _request(first), self.elastic.is_aborted
        board.values.setdefault((0, f"{key}/{first.number}"), (first.attempt + 1, first.prepared is None))
        if not is_over and not board.all_posted(key, first.members):
            return
        self.waits_in = None
        said = [board.read(f"{key}/{member}") or (0, False) for member in first.members]
        pool = sorted(self.elastic.registry.numbers.values(), key=lambda number: (number != first.members[0], number))
        width = self.job.wishes[self.starts, first.generation, first.step]
        target = first.layout.replace(data=width), tuple(pool[:width])
        is_refused = width > len(pool) or target == (first.layout, first.members)
        if is_over or is_refused or not all(is_free for _, is_free in said):
            return
        asked = Proposal(said[0][0], first.layout, first.members, *target, None)
        board.decide(f"proposal/{asked.generation}", to_record(asked))
        self._prepare_asked(asked)

    def _prepare_asked(self, asked: Proposal) -> None:
        first, key = self.engines[0], f"prepared/{asked.generation}"
        assert first.prepared is None, "one after the other"
        self.asked = first.prepared = asked
        first.attempt = asked.generation
        self.present.values[0, f"{key}/{first.number}"] = True
        if self.present.all_posted(key, asked.union):
            self.present.values[0, f"{key}/all"] = ""

    def _prepare(self, board: Board, proposals: do.Proposals) -> None:
        if self.machine.tries >= WITH_NEWCOMERS and not self.machine.restores:
            holders = {member for proposal in proposals for member in proposal.source_members}
            stay = holders & {self.machine.registry.numbers[one] for one in self.world.members} if self.world else ()
            are_left_out = all(set(each.members) <= holders for each in proposals)
            assert len(stay) < self.job.least or are_left_out, "newcomers are left out"
        for place, (engine, proposal) in enumerate(zip(self.engines, proposals, strict=True)):
            assert proposal.generation >= engine.attempt or not engine.works, "a number is used once"
            if engine.number in proposal.union and proposal.source_members:
                key = f"prepared/{proposal.generation}"
                board.values[place, f"{key}/{engine.number}"] = True
                if Board(board.values, place).all_posted(key, proposal.union):
                    board.values[place, f"{key}/all"] = ""
                if not proposal.moves_nothing:
                    engine.prepared, engine.attempt = proposal, proposal.generation

    def _enter(self, world: Generation, registry: Registry, proposals: do.Proposals) -> None:
        assert self.job.entered.setdefault((self.starts, world.prefix), proposals) == proposals, (
            "all enter by one proposal"
        )
        for engine, proposal in zip(self.engines, proposals, strict=True):
            self._drop(engine)
            engine.attempt, engine.layout, engine.members = proposal.generation, proposal.layout, proposal.members
        self.world = None
        self.starts = self.job.board(world).decide("starts", self.starts)
        self.elastic.enter(world, registry, registry.ids_of(proposals[0].members))

    def _wait(self) -> None:
        """In a transaction, restoring, or asking for a switch."""
        assert self.waits_in is not None
        what, world, proposals = self.waits_in
        if what == "ask":
            self._ask(world)
            return
        is_switch = what in ("transact", "switch")
        board, key = self.job.board(world), f"record/{proposals[0].generation}"
        union = {one for each in proposals if not each.moves_nothing for one in each.union}
        is_over = self.elastic.is_over(world.generation)
        copies = self.restores_from
        if not is_switch:
            key, union = f"restored/{proposals[0].generation}", set(proposals[0].members)
            union |= {member for whole in copies for member in whole.members}
        if board.read(key) is None:
            here = _meeting(proposals[0]) if is_switch else f"restoring/{proposals[0].generation}"
            if is_over:
                board.decide(key, {"commit": False, "reason": "somebody died"})
            elif board.all_posted(here, union):
                votes = self.job.votes
                is_good = not is_switch or (votes.pop() if votes else True)
                board.decide(key, {"commit": is_good, "reason": "it could not be"})
            else:
                return
        self.waits_in = None
        decision = board.read(key)
        assert decision is not None
        if what == "serve":
            return
        if decision["commit"]:
            steps = max(one.engines[0].step for one in self.job.members.values() if one.engines)
            for engine, proposal in zip(self.engines, proposals, strict=True):
                if not proposal.moves_nothing:
                    engine.works, engine.generation = engine.number in proposal.members, proposal.generation
                    engine.layout, engine.members, engine.prepared = proposal.layout, proposal.members, None
                    engine.step = self._carried(board, proposal, engine.step, steps)
        else:
            for engine in self.engines:
                self._drop(engine)
        if what == "switch":
            self.asked = None
            if decision["commit"]:
                self.elastic.retrain(proposals[0].members)
            return
        ended = self.machine.restored if what == "restore" else None
        if ended is not None:
            self._carry_out(ended(self.own, decision["commit"]))
            if not decision["commit"] and not self.end:
                self._let_go(self.engines)
                if self.elastic.member.is_newest(world):
                    self.elastic.member.broken(world)
        else:
            self._carry_out(self.machine.transacted(self.own, decision["commit"], decision["reason"]))

    def _carried(self, board: Board, proposal: Proposal, step: int, newest: int) -> int:
        """The step of those that hold the state; of a checkpoint any that all take alike."""
        said = step if self.engines[0].number in proposal.source_members else None
        if said is None and proposal.source_members:
            said = board.read(f"step/{proposal.generation}")
            if said is None:
                first = proposal.source_members[0]
                members = [one for one in self.job.members.values() if one.engines and one.starts == self.starts]
                found = [one for one in members if one.engines[0].number == first]
                said = found[0].engines[0].step
        elif said is None:
            said = self.restores_from[0].mark.step if self.restores_from else newest
        return int(board.decide(f"step/{proposal.generation}", said))

    def _destinations(self, asked: DestinationFacts) -> list[Destination] | None:
        least, widest = self.job.least, self.job.widest

        def refuse(layout: Layout) -> None:
            if not least <= layout.data <= widest:
                raise SwitchRefused("too wide, or too narrow")

        def rules(present: Destination) -> Rules:
            layout, members = present

            def assign(wanted: Layout, able: tuple[int, ...]) -> Destination:
                first = members[:1] if members[0] in able else ()
                return wanted, (*first, *(one for one in able if one not in first))[: wanted.world_size]

            return Rules(lambda count: choose(rule_of("data"), count, layout, refuse), assign)

        found = destinations(asked, [rules(present) for present in asked.present], lambda what: None)
        if found is None:
            self.elastic.member.lacks(asked.world)
        return found


def _had(engine: Engine) -> tuple[Had, ...]:
    """The copies that its process has."""
    return tuple(Had(mark, rank) for mark, ranks in engine.copies.items() for rank in ranks)


def _meeting(proposal: Proposal) -> str:
    """Where those stand who take part; see `Proposal.has_begun`."""
    return f"{proposal.key}/meet/0"


def _request(engine: Engine) -> str:
    """Where all that train ask for a switch."""
    return f"request/{engine.generation}/{engine.step}"
