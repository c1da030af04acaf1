"""Decisions of a process at a boundary, about switches and changes of members, without sockets, threads or engines.

A boundary is the point between two optimizer steps; a board is a generation's records in a key-value store. The machine
reads the boards and the state that this process holds, and returns what is to be done (`Action`).

A *switch* requested by the script or an extension stays within the generation. It uses the current board of its engine:
working members meet at the requested step, or at a step that rank 0 names once all are prepared. Idle members learn of
the switch from the board. A launch of fixed size has only such switches: its generation never changes.

A *change of members* leads to another generation, which the coordinator publishes. The new generation has boards of its
own, one for each engine of a process. Every member goes through the same stages:

| stage | what it waits for | keys |
|---|---|---|
| agree | after a failure: all that may hold state (all members, if none may) report what they hold | `survivor/<id>` |
| prove | before copies are used: their holders read them; damaged ones are left out | `sound/<try>/<m>` |
| learn | on an idle member: the description of the job's engines, from which it builds its own | `job`, `built/<m>` |
| follow | rank 0 of the working members leads: it proposes a layout for each engine | `copies`, `change/<attempt>` |
| meet | all are prepared; rank 0 names its next step, at which the switch begins | `prepared`, `meet`, `record` |
| | if all leave: the step that all have reached, or the next one if a member has waited | `stands/<step>/<m>`, `meet` |
| window | a late switch between its votes: the new world takes its first step, or goes back | `entered`, `record` |
| over | a later generation, because the state could not be restored in this one | |

If no state moves (a newcomer gets no rank, or an idle member leaves), all members enter the generation at the meeting.
If an attempt is rolled back, another one follows; after two such attempts, the next one leaves the newcomers out. A
later generation interrupts every stage except the window: a window first ends with its record (`transacted`). Only the
first attempt at a change is late, which means that state that no forward pass reads moves during the new world's first
step. A requested switch precedes a planned change; no requested switch is carried out once a change was proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.errors import ConfigError, DynatrainError, ElasticError
from ds_dynatrain.extension import BACKUP_KEY
from ds_dynatrain.membership.destinations import Destination, DestinationFacts, Registry
from ds_dynatrain.membership.proposal import CONNECTING, Board, Proposal
from ds_dynatrain.membership.survival import (
    Survivor,
    WholeState,
    joint_loss,
    replaced_before,
    whole_copies,
    whole_state,
    without,
)
from ds_dynatrain.membership.whole import Had, Mark, WholeCopies
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.space.layout import Layout

Proposals = tuple[Proposal, ...]
"""Proposed switches for a change of members, one for each engine of a process."""
IN_THE_PAUSE = -1
"""Sentinel used instead of a step: communicators are made only in the pause of the switch."""


@dataclass(frozen=True)
class HeldState:
    """Current state of one engine of this process.

    number: the number of this member.
    rank: the engine's rank; None if the engine is idle.
    attempt: the highest generation number that was proposed to the engine.
    board: the key-value store of the engine's current generation.
    is_clean: whether no optimizer step is in progress.
    pending: the switch that is being prepared, if any.
    is_in_window: whether a late switch (optimizer state moves after training has resumed) is still in progress.
    settle: waits until this member's device has finished all earlier work. A read of the board after this call finds
        everything that other members had posted before the call.
    lacks: returns whether the next world needs communicators that the current one does not have; None if no
        communicators are made before the pause.
    can_restore: whether an extension keeps backup checkpoints of this engine.
    registered: how often parameters were registered again (`update_param_groups`).
    frozen: the layout and rank in which this member has the frozen weights that are in no copy; None if there are none.
    since: returns `Survivor.since`; the call asks the coordinator's store.
    copies: returns descriptions of the copies that this process has.
    damaged: reads the copies that this process is to provide, and returns the ranks whose copies are damaged.
    goes_late: returns whether a switch to the given layout moves optimizer state after the pause.
    """

    number: int
    layout: Layout
    members: tuple[int, ...]
    rank: int | None
    attempt: int
    generation: int
    step: int
    board: Board
    is_clean: bool = True
    pending: Proposal | None = None
    is_in_window: bool = False
    settle: Callable[[], None] = lambda: None
    lacks: Callable[[], bool] | None = None
    can_restore: bool = False
    registered: int = 0
    since: Callable[[], tuple[int, ...] | None] = tuple
    copies: Callable[[], tuple[Had, ...]] = tuple
    damaged: Callable[[WholeCopies], tuple[int, ...]] = lambda copies: ()
    frozen: tuple[Layout, int] | None = None
    goes_late: Callable[[Layout], bool] = lambda layout: False


@dataclass(frozen=True)
class OwnFacts:
    """Facts that a process knows about itself.

    world: the generation that the process has entered.
    registry: the numbers of that generation's members.
    is_aborted: whether the current world can no longer be used.
    is_leaving: whether this process was asked to leave.
    engines: the process's engines, in the order in which they were made; the first one decides for all.
    at: the index of the engine that is now between two optimizer steps.
    has_waited: whether the time limit of the wait for other members at this boundary has passed, so that training
        continues without them.
    """

    member: str
    world: Generation | None
    registry: Registry
    is_aborted: bool
    engines: tuple[HeldState, ...]
    is_leaving: bool = False
    at: int = 0
    has_waited: bool = True

    @property
    def is_idle(self) -> bool:
        """Whether the first engine holds no state."""
        return self.engines[0].rank is None

    @property
    def is_all_idle(self) -> bool:
        """Whether no engine holds any state."""
        return all(engine.rank is None for engine in self.engines)

    @property
    def is_switching(self) -> bool:
        """Whether a switch of any engine is being prepared."""
        return any(engine.pending is not None for engine in self.engines)

    @property
    def makes_steps(self) -> bool:
        """Whether the working members take optimizer steps. They do not while the world is aborted or the job is
        paused."""
        return not self.is_aborted and (self.world is None or not self.world.paused)

    def goes_late(self, world: Generation, targets: Sequence[tuple[Layout, tuple[int, ...]]]) -> bool:
        """Return whether optimizer state is to move during the first step of a generation, instead of before this step.

        world: the generation.
        targets: each engine's layout and members in that generation.
        """
        if not self.makes_steps or world.paused or not world.members:
            return False
        moving = [(one, to) for one, to in zip(self.engines, targets, strict=True) if to != (one.layout, one.members)]
        return bool(moving) and all(one.goes_late(layout) for one, (layout, _) in moving)


@dataclass(frozen=True)
class GiveUpPreparation:
    """Give up any switch that is being prepared, because it cannot take place."""

    reason: str


@dataclass(frozen=True)
class Open:
    """Connect, or reconnect, to the boards (the members' key-value stores) of a generation."""

    world: Generation


@dataclass(frozen=True)
class Know:
    """Adopt the registry, which maps every member to its number.

    records: on an idle member, the record that `PostJob` has posted for each engine; () on other members.
    """

    registry: Registry
    records: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Post:
    """Post a value on an engine's board (the members' key-value store).

    engine: the index of the engine.
    is_decision: whether the first value counts, so that a value already posted by another member is kept.
    is_present: whether to post on the board of the current generation rather than on that of the next one.
    """

    key: str
    value: Any
    engine: int = 0
    is_decision: bool = False
    is_present: bool = False


@dataclass(frozen=True)
class PostJob:
    """Post a description of each engine, from which newcomers build their own engines."""

    registry: Registry


@dataclass(frozen=True)
class Void:
    """Discard the copies of this process that are out of date, because a state such as a checkpoint was loaded after
    they were taken.

    before: the `Mark.stretch` of the newest load; copies with a smaller one are discarded.
    """

    before: tuple[int, ...]


@dataclass(frozen=True)
class LetGo:
    """Give up the state of all engines, because it will be restored from copies or a checkpoint.

    lost: a description of the copies that are permanently lost; "" if there are none.
    """

    lost: str = ""


@dataclass(frozen=True)
class Hold:
    """Continue after a failure from the state that the survivors hold. If the whole state of an engine does not list
    this member, the member gives up its own state of that engine.

    sources: for each engine, the layout and members of the whole state.
    """

    sources: tuple[WholeState, ...]


@dataclass(frozen=True)
class Prepare:
    """Prepare each engine for its part in a membership change, and post `prepared` when that is done."""

    proposals: Proposals


@dataclass(frozen=True)
class Follow:
    """Prepare an idle engine for its part in a switch that the working members have agreed on."""

    engine: int
    proposal: Proposal


@dataclass(frozen=True)
class PassBy:
    """Record the outcome of a switch in which an idle engine of this process takes no part."""

    engine: int
    proposal: Proposal
    is_committed: bool


@dataclass(frozen=True)
class Connect:
    """Connect all members of an engine's next world some steps before its switch; give the switch up if that fails."""

    engine: int


@dataclass(frozen=True)
class Transact:
    """Carry out this member's part in the prepared switch of one engine, or of all engines in a change of members.

    After a change of members, call `BoundaryMachine.transacted`. If optimizer state moves after training has resumed,
    call it only once the final outcome is recorded.

    engine: the index of the engine; None for all engines.
    """

    engine: int | None = None


@dataclass(frozen=True)
class Restore:
    """Restore the state, together with all members of the new world, from copies or from a checkpoint.

    Call `BoundaryMachine.restored` afterwards.

    copies: the copies to use, one set for each engine; () for a checkpoint.
    """

    proposals: Proposals
    copies: tuple[WholeCopies, ...] = ()


@dataclass(frozen=True)
class Serve:
    """Send this member's copies to the members that restore the state. This member restores nothing itself."""

    proposals: Proposals
    copies: tuple[WholeCopies, ...]


@dataclass(frozen=True)
class Spend:
    """Record that an attempt was rolled back on all members. The generation numbers of its proposals are not used
    again.

    tries: the number of attempts that have failed so far.
    """

    proposals: Proposals
    tries: int
    reason: str


@dataclass(frozen=True)
class Enter:
    """Enter the generation: each engine takes the layout and the rank that its proposal assigns."""

    world: Generation
    registry: Registry
    proposals: Proposals


@dataclass(frozen=True)
class EndProcess:
    """End the process.

    must_save: whether the process has to save its state first, because no member was left to receive it.
    """

    must_save: bool = False


@dataclass(frozen=True)
class Fail:
    """End the script with an error."""

    error: DynatrainError


Action = (
    GiveUpPreparation
    | Open
    | Know
    | Post
    | PostJob
    | Void
    | LetGo
    | Hold
    | Prepare
    | Follow
    | PassBy
    | Connect
    | Transact
    | Restore
    | Serve
    | Spend
    | Enter
    | EndProcess
    | Fail
)


class ChangeStage(Enum):
    """Stage that this member has reached on its way to a new generation."""

    AGREE = "agree"
    PROVE = "prove"
    LEARN = "learn"
    FOLLOW = "follow"
    MEET = "meet"
    WINDOW = "window"
    OVER = "over"


class BoundaryMachine:
    """State machine that decides what one process does at a boundary (the point between two optimizer steps).

    destinations: returns each engine's new layout and members if this member leads; None if no layout is possible.
    world: the generation that the process is about to enter; None if the process is already in the newest one.
    proposals: the proposals of the current attempt, one for each engine.
    """

    def __init__(self, destinations: Callable[[DestinationFacts], list[Destination] | None]) -> None:
        self._destinations = destinations
        self._passed_over = 0
        """Number of the last generation that left this idle member out; the member waits for the next one."""
        self._ahead: tuple[Proposal | None, int] = None, IN_THE_PAUSE
        """A requested switch, and the step at which its communicators are made, as named by rank 0."""
        self.forget()

    def forget(self) -> None:
        """Forget the generation that this process was about to enter."""
        self.world: Generation | None = None
        self.proposals: Proposals = ()
        self.stage = ChangeStage.LEARN
        self.registry, self.tries, self.restores = Registry(), 0, False
        self.meets_at: int | None = None
        """Step at which all members meet; None until rank 0 has named a step."""
        self._copies: tuple[WholeCopies, ...] = ()
        self._survivors: list[dict[str, Survivor]] = []
        """For each engine, a map from the id of every member that may hold state to its report, without copies that
        were found damaged later."""
        self._proofs = self._lost = 0  # `_lost`: index of the first engine that has lost state
        self._leader = ""
        self._said = set[str]()

    # ---- events ------------------------------------------------------------------------------------------------------

    def advance(self, own: OwnFacts, newest: Generation | None, boards: Sequence[Board]) -> list[Action]:
        """Return the next actions. Carry them out and call this method again until it returns none; then call it again
        from time to time.

        newest: the last generation that was published.
        boards: the boards (key-value stores) of `world`, one for each engine of the process; () while they are not
            open.

        Members join and leave only at boundaries of the first engine.
        """
        if self.stage is ChangeStage.WINDOW or any(engine.is_in_window for engine in own.engines):
            return []
        if own.at:
            return self._switch(own)
        if newest is not None and not self.proposals and (given_up := self._give_up_hopeless(own, newest)):
            return given_up
        if newest is not None and self._is_later(own, newest):
            return self._set_out(own, newest)
        if newest is not None and newest.generation == self._passed_over and own.is_leaving:
            return [EndProcess()]
        steps = {
            ChangeStage.AGREE: self._agree,
            ChangeStage.PROVE: self._prove,
            ChangeStage.LEARN: self._learn,
            ChangeStage.FOLLOW: self._follow,
            ChangeStage.MEET: self._meet_idle if own.is_idle else self._meet,
        }
        while self.world is not None and boards and self.stage in steps:
            stage = self.stage
            if actions := steps[stage](own, self.world, boards):
                return actions
            if self.stage is stage:
                break
        return self._switch(own)

    def is_of_change(self, proposal: Proposal) -> bool:
        """Return whether a proposal belongs to the current change of members, rather than to a requested switch."""
        return any(one is proposal for one in self.proposals)

    def transacted(self, own: OwnFacts, is_committed: bool, reason: str) -> list[Action]:
        """Return the actions that follow a switch (`Transact`).

        is_committed: whether the switch was committed; the same on all members.
        reason: the reason if it was rolled back.
        """
        if self.world is None:
            return []
        return self._enter(own, self.world) if is_committed else self._failed(self.proposals, reason)

    def restored(self, own: OwnFacts, is_whole: bool) -> list[Action]:
        """Return the actions that follow a restoration (`Restore`).

        is_whole: whether the state is restored. If not, a member has died, and a later generation will come.
        """
        if self.world is None:
            return []
        if not is_whole:
            self.stage, self.proposals = ChangeStage.OVER, ()
            return []
        return [self._record(), *self._enter(own, self.world)]

    def board_is_lost(self, reason: str) -> list[Action]:
        """Forget all records read from a key-value store whose connection was lost, and return the actions that
        reconnect to it."""
        self.proposals, self.tries, self._said = (), 0, set()
        if self.stage in (ChangeStage.FOLLOW, ChangeStage.MEET):
            self.stage = ChangeStage.LEARN
        given_up: list[Action] = [GiveUpPreparation(reason)]
        return given_up if self.world is None else [*given_up, Open(self.world)]

    def waits_for(self, boards: Sequence[Board]) -> str:
        """Return a description of what this member waits for before its next action.

        boards: the key-value stores of the next generation, as in `advance`.
        """
        world = self.world
        if world is None:
            return "the coordinator to publish a generation"
        if not boards:
            return f"the board of generation {world.generation}"
        if self.stage is ChangeStage.PROVE:
            return f"generation {world.generation}: the members that give copies, to check them"
        asked = {
            ChangeStage.AGREE: ("survivor", (*who_is_asked(world), *world.leaving), "to say what they hold"),
            ChangeStage.FOLLOW: (
                "built",
                world.members[world.survivors :],
                "to come to their loops, and a layout for all",
            ),
        }
        if self.stage not in asked:
            return f"generation {world.generation}: the others, at {self.stage.value}"
        key, members, what = asked[self.stage]
        names = {one: one if key == "survivor" else self.registry.numbers.get(one, one) for one in members}
        missing = [one for one, name in names.items() if not boards[0].all_posted(key, [name])]
        return f"generation {world.generation}: {', '.join(missing) or 'nobody'} {what}"

    # ---- a switch within the generation ------------------------------------------------------------------------------

    def _switch(self, own: OwnFacts) -> list[Action]:
        """Return the actions for a requested switch of the engine that is at a boundary. If that engine is idle, return
        the actions for the first idle engine of the process that has any."""
        here = own.engines[own.at]
        if here.rank is None:
            engines = () if self.world is not None else enumerate(own.engines)
            found = (self._follow_switch(place, engine) for place, engine in engines if engine.rank is None)
            return next(filter(None, found), [])
        if self.proposals or here.pending is None or (here.pending.late and not own.makes_steps):
            return []
        connecting = self._connect(own.at, here, here.pending)
        return connecting or self._meet_for_switch(own.at, here, here.pending, ahead=int(own.makes_steps))

    def _give_up_hopeless(self, own: OwnFacts, newest: Generation) -> list[Action]:
        """Give up, on all members, every requested switch that needs an idle member which the newest generation does
        not list."""
        there = {own.registry.numbers.get(member) for member in newest.members}
        asked = [(place, one.pending) for place, one in enumerate(own.engines) if one.pending is not None]
        hopeless = [(place, one) for place, one in asked if not there >= {*one.members} - {*one.source_members}]
        if not hopeless or own.is_aborted:
            return []
        record = {"commit": False, "reason": newest.reason}
        said = [Post(one.record_key, record, place, is_decision=True, is_present=True) for place, one in hopeless]
        return [*said, GiveUpPreparation(newest.reason)]

    def _connect(self, place: int, here: HeldState, asked: Proposal) -> list[Action]:
        """Return the action that connects the next world's members some steps before a requested switch.

        Rank 0 names the step at which all connect: its next step, if this is earlier than the step of the switch.
        """
        if here.lacks is None or asked.at is None:
            return []
        key = f"{asked.ahead_key}/step"
        if self._ahead[0] is not asked:
            here.settle()
            step = here.board.read(key)
            if step is None:
                is_late = here.step + 1 >= asked.at
                if here.rank != 0 or not (is_late or asked.is_prepared(here.board)):
                    return []
                step = IN_THE_PAUSE if is_late or not here.lacks() else here.step + 1
                return [Post(key, step, place, is_decision=True, is_present=True)]
            self._ahead = asked, int(step)
        is_now = IN_THE_PAUSE < self._ahead[1] <= here.step < asked.at
        return [Connect(place)] if is_now else []

    def _meet_for_switch(self, place: int, here: HeldState, asked: Proposal, ahead: int) -> list[Action]:
        """Begin a prepared switch at the requested step or, if no step was requested, at rank 0's next step once all
        members are prepared.

        No member can have passed rank 0's next step: every step needs rank 0's gradients, and each member reads the
        board again at every boundary.

        ahead: 1 if the members take steps, 0 if not.
        """
        meet = asked.at
        if meet is None:
            here.settle()
            if here.rank == 0 and not asked.is_prepared(here.board):
                return []
            meet = here.board.read(asked.meeting_key)
            if meet is None and here.rank == 0:
                return [Post(asked.meeting_key, here.step + ahead, place, is_decision=True, is_present=True)]
        return [Transact(place)] if meet is not None and here.step >= meet else []

    def _follow_switch(self, place: int, here: HeldState) -> list[Action]:
        """Return the actions of an idle member for a switch that the working members have agreed on."""
        asked, board = here.pending, here.board
        if asked is None:
            found = board.read(f"proposal/{here.attempt + 1}")
            if found is None:
                return []
            asked = from_record(Proposal, found)
            if here.number in asked.union:
                return [Follow(place, asked)]
        elif here.lacks is not None and board.all_posted(f"{asked.ahead_key}/{CONNECTING}/0", asked.source_members[:1]):
            return [Connect(place)]
        elif asked.has_begun(board):
            return [Transact(place)]
        record = board.read(asked.record_key)
        if record is None or (here.pending is not None and record["commit"]):
            return []
        return [PassBy(place, asked, record["commit"])]

    # ---- begin a change ----------------------------------------------------------------------------------------------

    def _is_later(self, own: OwnFacts, newest: Generation) -> bool:
        at = own.world if self.world is None else self.world
        if newest.generation <= max(self._passed_over, 0 if at is None else at.generation):
            return False
        is_first = self.world is None and newest.change == "planned" and own.is_switching
        return not is_first  # a switch requested by the user comes before a planned change

    def _set_out(self, own: OwnFacts, newest: Generation) -> list[Action]:
        self.forget()
        given_up = GiveUpPreparation(newest.reason)
        is_asked = newest.change == "failure" and own.member in newest.leaving
        if own.is_idle and own.member not in newest.members and not is_asked:
            self._passed_over = newest.generation
            return [given_up, EndProcess()] if own.is_leaving or not newest.members else [given_up]
        is_in_none = own.member not in newest.members and (own.is_aborted or own.member not in newest.leaving)
        if newest.change == "planned" and is_in_none:
            return [given_up, LetGo(), EndProcess()]  # the others have formed a world without its state
        if own.is_all_idle and newest.change == "planned" and not newest.survivors:
            why = f"generation {newest.generation}: the job that this process has made its engines for is over"
            return [given_up, Fail(ElasticError(f"{why}; start it again, and it begins anew"))]
        self.world, self.stage = newest, ChangeStage.LEARN if newest.change == "planned" else ChangeStage.AGREE
        return [given_up, Open(newest)]

    # ---- after a failure ---------------------------------------------------------------------------------------------

    def _agree(self, own: OwnFacts, world: Generation, boards: Sequence[Board]) -> list[Action]:
        stay = who_is_asked(world)
        if own.member not in (*stay, *world.leaving):  # a new member, or one that the coordinator did not know yet
            self.stage = ChangeStage.LEARN
            if own.member not in world.members:  # the others continue without it and its state
                return [LetGo(), EndProcess()]
            return [LetGo()] if own.is_all_idle or own.is_aborted else []
        if "survivor" not in self._said and boards[0].read(f"survivor/{own.member}") is None:
            self._said.add("survivor")
            released = () if own.world is None else own.world.leaving
            goes = own.is_all_idle and own.member not in world.members  # the report comes first, so that others know
            holds = [to_record(_survivor(own, held, gives=not goes)) for held in own.engines]
            return [
                Post(f"survivor/{own.member}", {"holds": holds, "released": released}),
                *([EndProcess()] if goes else []),
            ]
        answers = self._answers(stay, world, boards)
        if answers is None:
            return []
        said = {one: [from_record(Survivor, each) for each in word["holds"]] for one, word in answers.items()}
        holders = {one: records for one, records in said.items() if records}
        self.stage = ChangeStage.LEARN
        of_all = [record for records in holders.values() for record in records]
        is_held = any(record.rank is not None for record in of_all)
        if is_held and not own.is_aborted and not any(record.is_aborted for record in of_all):
            return []
        self._leader = next((one for one in stay if one in holders), "")
        of_engines = [{one: records[each] for one, records in holders.items()} for each in range(len(own.engines))]
        since, sources = replaced_before(of_all), [whole_state(of_engine) for of_engine in of_engines]
        found: list[Action] = [Void(since)] if since else []
        whole = tuple(source for source in sources if source is not None)
        if len(whole) == len(sources):
            return [*found, Hold(whole)]
        self._survivors, self._lost, self.stage = of_engines, sources.index(None), ChangeStage.PROVE
        return found

    def _answers(self, stay: Sequence[str], world: Generation, boards: Sequence[Board]) -> dict[str, Any] | None:
        """Return a map from the id of each member that may hold state to its report; None until all have reported.

        stay: the ids of the members that stay.

        A leaving member that has handed over its state may end before it reports. Its report is not needed if another
        member reports that it was released.
        """
        if not boards[0].all_posted("survivor", stay):
            return None
        found = {one: boards[0].read(f"survivor/{one}") or {} for one in stay}
        released = {one for said in found.values() for one in said["released"]}
        leaving = [one for one in world.leaving if one not in released]
        if not boards[0].all_posted("survivor", leaving):
            return None
        return found | {one: boards[0].read(f"survivor/{one}") or {} for one in leaving}

    def _prove(self, own: OwnFacts, world: Generation, boards: Sequence[Board]) -> list[Action]:
        """Choose the newest set of copies from which all engines can be restored, and have each member that provides
        copies check its own first.

        Only the chosen copies are read. A restoration therefore waits until each member has read its own copy, and
        until members that keep copies of dead members have read one more.
        """
        found = whole_copies(self._survivors) if self._leader else ()
        if not found:
            self.stage = ChangeStage.LEARN
            return self._go_back(own, world)
        key, mine = f"sound/{self._proofs}", own.engines[0].number
        givers = sorted({holder for whole in found for holder in whole.holders})
        if mine in givers and key not in self._said:
            self._said.add(key)
            if boards[0].read(f"{key}/{mine}") is None:
                wrong = [engine.damaged(whole) for engine, whole in zip(own.engines, found, strict=True)]
                return [Post(f"{key}/{mine}", wrong)]
        if not boards[0].all_posted(key, givers):
            return []
        said = {giver: boards[0].read(f"{key}/{giver}") or () for giver in givers}
        if any(ranks for of_engines in said.values() for ranks in of_engines):  # choose again without these
            self._proofs += 1
            for engine, whole in enumerate(found):
                damaged = {giver: of_engines[engine] for giver, of_engines in said.items()}
                self._survivors[engine] = without(self._survivors[engine], whole.mark, damaged)
            return self._prove(own, world, boards)
        self.stage, self._copies, self.restores = ChangeStage.LEARN, found, True
        return [LetGo()]

    def _go_back(self, own: OwnFacts, world: Generation) -> list[Action]:
        """Return the actions by which all engines return to a checkpoint, because one engine has lost state. If no
        checkpoint can be used, return an error."""
        lost, gone = own.engines[self._lost], joint_loss(self._survivors, partial(_name, own))
        if self._leader and lost.can_restore:
            self.restores = True
            return [LetGo(gone)]
        what = (
            "no remaining member can restore the existing checkpoint: start the job again from it"
            if lost.can_restore
            else "there is no checkpoint to go on from: start the job again from one of your own, and configure "
            f"{BACKUP_KEY}"
        )
        why = f"{world.reason}; in {lost.layout} parts of the state are lost{gone and f' ({gone})'}, and {what}"
        return [Fail(ElasticError(f"generation {world.generation}: {why}"))]

    # ---- learn and propose -------------------------------------------------------------------------------------------

    def _leads(self, own: OwnFacts) -> bool:
        """Return whether this member leads. The leader is the member of rank 0 or, if the state is restored from copies
        or a checkpoint, the first member that has built its engines."""
        return own.member == self._leader if self.restores else own.engines[0].rank == 0

    def _learn(self, own: OwnFacts, world: Generation, boards: Sequence[Board]) -> list[Action]:
        if not own.is_idle or self._leads(own):
            self.registry, self.stage = own.registry.extended(world.members), ChangeStage.FOLLOW
            return [Know(self.registry)]
        found = [boards[engine].read("job") for engine in range(len(own.engines))]
        records = tuple(record for record in found if record is not None)
        if len(records) < len(found):
            return []
        if records[0]["engines"] != len(found):
            why = (
                f"this process cannot join the job: it has made {len(found)} engines, and the job's processes "
                f"{records[0]['engines']}; make all of them before the first batch"
            )
            return [Fail(ConfigError(why))]
        self.registry, self.stage = from_record(Registry, records[0]["registry"]), ChangeStage.FOLLOW
        if own.member not in self.registry.numbers:  # for the others, this member has left
            return [EndProcess()]
        return [Know(self.registry, records), Post(f"built/{self.registry.numbers[own.member]}", True)]

    def _follow(self, own: OwnFacts, world: Generation, boards: Sequence[Board]) -> list[Action]:
        records = boards[0].read(f"change/{self.tries + 1}")
        if records is None:
            return self._lead(own, world, boards) if self._leads(own) else []
        proposals = tuple(from_record(Proposal, record) for record in records)
        decided = boards[0].read(proposals[0].record_key)
        if decided is not None and not decided["commit"]:
            return self._failed(proposals, decided["reason"])
        self.proposals, self.stage = proposals, ChangeStage.MEET
        return [Prepare(proposals)]

    def _lead(self, own: OwnFacts, world: Generation, boards: Sequence[Board]) -> list[Action]:
        """Return the actions of the member that leads the change: post what newcomers have to build, and post a
        proposal for each engine once the newcomers have built theirs and no switch is being prepared.

        A switch that was requested in the meantime comes first, because members read a proposal at different times, and
        one of them may already have begun that switch.
        """
        if "job" not in self._said:
            self._said.add("job")
            return [PostJob(self.registry)]
        newcomers = [
            self.registry.numbers[one] for one in world.members if one not in (*own.registry.numbers, own.member)
        ]
        if own.is_switching or (newcomers and not boards[0].all_posted("built", newcomers)):
            return []
        present = tuple((engine.layout, engine.members) for engine in own.engines)
        asked = DestinationFacts(
            world, self.registry, present, self.tries, self.restores, has_copies=bool(self._copies)
        )
        targets = self._destinations(asked)
        if targets is None:
            return []
        is_late = not self.tries and not self.restores and own.goes_late(world, targets)
        proposals = [
            Proposal(
                engine.attempt + 1,
                engine.layout,
                () if self.restores else engine.members,
                *target,
                None,
                forms_anew=own.is_aborted,
                late=is_late,
            )
            for engine, target in zip(own.engines, targets, strict=True)
        ]
        copies = [Post("copies", [to_record(whole) for whole in self._copies])] if self._copies else []
        return [*copies, Post(f"change/{self.tries + 1}", [to_record(proposal) for proposal in proposals])]

    # ---- the meeting -------------------------------------------------------------------------------------------------

    def _meet(self, own: OwnFacts, world: Generation, boards: Sequence[Board]) -> list[Action]:
        """Begin the change of members, on a working member, at the step that rank 0 names. This is rank 0's next step,
        which no member can have passed."""
        first, step = self.proposals[0], own.engines[0].step
        if not first.source_members:  # restored, and the board was lost before the record was written
            return self.restored(own, is_whole=True)
        meet = boards[0].read(first.meeting_key)
        if meet is None and own.makes_steps and not world.members:
            return self._meet_to_end(own, boards)
        if meet is None:
            engines = zip(self.proposals, boards, strict=True)
            is_next = own.engines[0].rank == 0 and all(proposal.is_prepared(board) for proposal, board in engines)
            return [Post(first.meeting_key, step + int(own.makes_steps), is_decision=True)] if is_next else []
        self.meets_at = int(meet)
        if step < meet:
            return []
        if not all(proposal.moves_nothing for proposal in self.proposals):
            return self._transact()
        return [self._record(), *self._enter(own, world)]

    def _meet_to_end(self, own: OwnFacts, boards: Sequence[Board]) -> list[Action]:
        """Choose the step at which all members end. Used when all were asked to leave and time is short.

        The members end at the first boundary that all of them have reached. A member that has waited in vain for the
        others names its own next step instead, which no member can have passed. The first step named by any member
        counts.
        """
        first, step, number = self.proposals[0], own.engines[0].step, own.engines[0].number
        stands = f"stands/{step}"
        if stands not in self._said:
            self._said.add(stands)
            return [Post(f"{stands}/{number}", True)]
        if boards[0].all_posted(stands, first.source_members):
            return [Post(first.meeting_key, step, is_decision=True)]
        return [Post(first.meeting_key, step + 1, is_decision=True)] if own.has_waited else []

    def _meet_idle(self, own: OwnFacts, world: Generation, boards: Sequence[Board]) -> list[Action]:
        """Return the actions of an idle member once a change of members is proposed: take part in the switch when it
        begins, restore or provide copies, or follow the outcome of a switch that does not need this member."""
        first = self.proposals[0]
        if not first.source_members and "restored" not in self._said:
            mine = self.registry.numbers[own.member]
            copies = tuple(from_record(WholeCopies, record) for record in boards[0].read("copies") or ())
            if mine in first.members:
                return [Restore(self.proposals, copies)]
            if any(mine in whole.members for whole in copies):
                self._said.add("restored")
                return [Serve(self.proposals, copies)]
        if own.is_switching and first.has_begun(boards[0]):
            return self._transact()
        record = boards[0].read(first.record_key)
        if record is None:
            return []
        return self._enter(own, world) if record["commit"] else self._failed(self.proposals, record["reason"])

    def _transact(self) -> list[Action]:
        if self.proposals[0].late:
            self.stage = ChangeStage.WINDOW
        return [Transact()]

    # ---- the end of a change -----------------------------------------------------------------------------------------

    def _record(self) -> Post:
        return Post(self.proposals[0].record_key, {"commit": True, "reason": ""}, is_decision=True)

    def _failed(self, proposals: Proposals, reason: str) -> list[Action]:
        self.proposals, self.stage, self.meets_at = (), ChangeStage.FOLLOW, None
        self.tries += 1
        return [Spend(proposals, self.tries, reason)]

    def _enter(self, own: OwnFacts, world: Generation) -> list[Action]:
        entered = Enter(world, self.registry, self.proposals)
        self.forget()
        if world.members and own.member not in world.members:
            return [EndProcess()]
        return [entered] if world.members else [entered, EndProcess(must_save=True)]


def who_is_asked(world: Generation) -> tuple[str, ...]:
    """Return the members that must report, after a failure, the state that they hold: those that may hold state, or all
    members if none of them can."""
    return world.members[: world.survivors] or world.members


def _name(own: OwnFacts, engine: int, mark: Mark, rank: int) -> str:
    """Return the id of the member that had a rank when a copy was taken; "" if the copy is from an earlier world, whose
    members this process does not know.

    engine: the index of the engine.
    mark: the point in training at which the copy was taken.
    """
    here, ids = own.engines[engine], {number: one for one, number in own.registry.numbers.items()}
    is_this = (mark.generation, mark.layout) == (here.generation, here.layout)
    return ids.get(here.members[rank], "") if is_this else ""


def _survivor(own: OwnFacts, held: HeldState, gives: bool) -> Survivor:
    """Return this member's report of the state that it holds of one engine.

    gives: whether this member stays and can provide its copies.
    """
    return Survivor(
        number=held.number,
        rank=held.rank,
        generation=held.generation,
        step=held.step,
        clean=held.is_clean,
        is_aborted=own.is_aborted,
        layout=held.layout,
        entered=0 if own.world is None else own.world.generation,
        copies=held.copies() if gives else (),
        frozen=held.frozen,
        registered=held.registered,
        since=held.since(),
    )
