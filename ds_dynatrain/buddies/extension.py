"""The extension that keeps copies on buddies: when copies are taken, which members keep them, and what users see of it.

All working members pass the same boundaries (the points between two optimizer steps) and decide from the same numbers:
the results of the last round are reduced over their world, so either all of them take copies at a step, or none does.
Older copies may be overwritten only when all members have all copies of a later boundary.

With several engines in a process the first one decides, at its own boundaries and while no other engine is in a global
batch. All engines take copies together, with the same buddies, and either all of these copies count or none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as td

from ds_dynatrain.adapters.groups.device import start_thread
from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus, is_lost_peer
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.buddies.assignment import buddies_of, memory_of_copies, wards_of
from ds_dynatrain.buddies.config import BuddiesConfig
from ds_dynatrain.buddies.rows import IN_A_FIXED_LAUNCH
from ds_dynatrain.buddies.shipping import Round, Ward
from ds_dynatrain.buddies.taking import UndigestedCopy, mark_of, take
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine.copies.copy import lacks_frozen
from ds_dynatrain.engine.copies.kept import Kept
from ds_dynatrain.engine.parts import EngineParts, open_engines
from ds_dynatrain.errors import ConfigError, DynatrainError, WorldChanged
from ds_dynatrain.extension import BACKUP_KEY, Extension, backups_of
from ds_dynatrain.membership.session import Session
from ds_dynatrain.membership.whole import Mark
from ds_dynatrain.plan import has_single_holders, needs_copies, outlives_a_node
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.feasible import available_bytes
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.space import Layout
from ds_dynatrain.transfer import GroupTransport


@dataclass(frozen=True)
class Protection:
    """The protection of an engine's state against a death, as this member sees it.

    buddies: a map from each member to the members that keep its copies.
    step: the newest step of which all copies are known to have arrived; None if there is none.
    is_protected: whether the death of one member costs only the steps after `step`.
    why: why the state is not protected, or why it needs no copies.
    memory_bytes: host memory for copies.
    sent_bytes: bytes sent in the last round.
    take_ms: how long the step waited for the last copy.
    ship_ms: how long the last round took.
    taken: number of rounds.
    skipped: number of rounds left out because the previous one had not ended.
    """

    buddies: dict[int, tuple[int, ...]]
    step: int | None
    is_protected: bool
    why: str
    memory_bytes: int
    sent_bytes: int
    take_ms: float
    ship_ms: float
    taken: int
    skipped: int


GROUP = "buddies"
"""Kind of process group: over all ranks, used by the thread that sends copies during training."""
MILLIONTHS = 1_000_000
NEW_WORLD = "no copy of this world is whole yet"
MOST_BY_DEFAULT = 0.5
"""Fraction of a node's free memory that copies may take if the user has not requested them."""
MUCH_OF_A_STEP = 0.1
"""Fraction of a step's time above which waiting for copies causes a warning."""


class Buddies(Extension):
    """The extension that keeps copies of one engine's state on other members, its buddies, throughout the job."""

    name = "buddies"
    group = GROUP
    _engine: EngineParts

    def __init__(self, settings: DynatrainConfig) -> None:
        self.kept = Kept()
        self._settings: BuddiesConfig = settings.buddies
        self._worlds: list[World | None] = []
        """The worlds of all engines when buddies were last assigned."""
        self._by_member: dict[int, tuple[int, ...]] = {}
        """Map from each member to the members that keep its copies, for all engines; the same on all working
        members."""
        self._why = NEW_WORLD
        self._is_protected = self._is_behind = self._has_said_cost = False
        self._cannot = ""
        """Reason why no copies are taken in this world although they are on by default; "" if they are taken."""
        self._lacks = ""
        """Reason why copies alone do not protect the state in this world; "" if they do."""
        self._last_warning = ""
        self._whole_of: dict[int, tuple[int, ...]] = {}
        """Value of `_by_member` when the newest complete copies were taken, perhaps in an earlier world."""
        self._seen: tuple[str, tuple[int, ...], int] = ("", (), -1)
        self._next: int | None = None
        """The step at which the next copy is due; None if it is due immediately."""
        self._rounds: Sequence[Round] = ()
        """The rounds of copies that are under way, one for each engine."""
        self._left_at, self._share = 0.0, 0.0
        self._taken = self._skipped = 0
        self._last_error = ""
        self.world: World | None = None
        """The world in which copies of this engine are taken."""
        self.buddies: tuple[tuple[int, ...], ...] = ()
        """The buddies of each rank of that world; () if nothing is copied."""
        self.take_seconds, self.ship_seconds, self.sent_bytes = 0.0, 0.0, 0
        self._thread: threading.Thread | None = None
        self._last_failure = ""

    def attach(self, engine: Any) -> None:
        """Attach to the engine, and give it access to the copies that this process keeps."""
        super().attach(engine)
        self._engine = engine._parts
        self._engine.kept = self.kept

    @property
    def _all(self) -> Sequence[Buddies]:
        """The `Buddies` extensions of all engines of the process, in the order of the engines. While this engine is
        being built, only its own."""
        open_ones = [found for one in open_engines() if isinstance(found := one.extension(self.name), Buddies)]
        return open_ones or (self,)

    @property
    def _first(self) -> Buddies:
        """The `Buddies` of the process's first engine, which decides for all engines."""
        return self._all[0]

    @property
    def _is_alone(self) -> bool:
        """Whether some elements are held by one member only, so that the death of this member would lose them."""
        return has_single_holders(self._engine.vps, self._engine.layout)

    def check_launch(self, is_elastic: bool) -> None:
        """Raise UnsupportedError in a launch of fixed size, whose members never change."""
        if not is_elastic:
            raise IN_A_FIXED_LAUNCH.error()

    def check_beside(self, here: DynatrainConfig, there: DynatrainConfig, number: int) -> None:
        """Raise ConfigError if two engines of a process have different `buddies` blocks, or only one has a block."""
        if here.buddies != there.buddies:
            blocks = ["none" if each.buddies is None else each.buddies.model_dump() for each in (here, there)]
            raise ConfigError(
                f"dynatrain.buddies: {blocks[0]} here, and {blocks[1]} in engine {number}; all engines of a process go "
                "back together, to copies of one boundary: give each of them the same block, or none"
            )

    def on_start(self) -> None:
        """Raise ConfigError if the first world cannot keep the copies that the user requested.

        The reason is too few members, or too little host memory on this node for the copies of this engine and of
        earlier engines. Copies that are only on by default raise nothing; `_why_not` gives the reason in every world.
        """
        if self._settings.mode is None:
            return
        engine, nodes = self._engine, self._engine.candidates.nodes
        where, mine = [nodes[member] for member in engine.members], nodes[engine.control.member]
        copies, others = self._settings.copies, len(where) - 1
        if 0 < others < copies:
            raise ConfigError(
                f"dynatrain.buddies.copies: {copies} others are to keep each copy, and {others + 1} members work; "
                f"start on {copies + 1} at least (MIN in torchrun --nnodes=MIN:MAX), or ask for {others}"
            )
        here = [need for need, node in zip(self._needs(where), where, strict=True) if node == mine]
        if sum(here) > (free := available_bytes()):
            raise ConfigError(
                f"dynatrain.buddies: the {len(here)} ranks on node {mine!r} need {sum(here)} bytes for copies of what "
                f"they and their wards hold alone, and {free} are available; start on more nodes, or leave it out"
            )

    def _needs(self, nodes: Sequence[str]) -> list[int]:
        """Return the bytes that the copies of all engines take on each rank.

        nodes: the node of each rank.
        """
        every = [*(one for one in self._all if one is not self), self]
        engines, copies = [one._engine for one in every], self._settings.copies
        is_needed = any(needs_copies(one.vps, one.layout, nodes) for one in engines)
        needs = [
            memory_of_copies(one._engine.vps, one._engine.layout, nodes, copies, is_needed and not one._is_alone)
            for one in every
        ]
        return [sum(of_rank) for of_rank in zip(*needs, strict=True)]

    def _why_not(self) -> str:
        """Return why no copies are taken in this world although they are on by default; "" if they are taken.

        All members return the same text. This is a collective over the engine's world if the world has two nodes or
        more.
        """
        engine, world = self._engine, self._engine.world
        where = [engine.candidates.nodes[member] for member in engine.members]
        if self._settings.mode is not None or world is None:
            return ""
        if len(set(where)) == 1:
            return f"all members that train are on node {where[0]!r}; start another node, and copies begin"
        has = torch.zeros(2, len(where), dtype=torch.int64)
        held = sum(one.kept.nbytes for one in self._all)
        has[:, engine.rank] = torch.tensor([held, available_bytes()])
        td.all_reduce(has, group=world.default)
        needs = self._needs(where)
        for node in dict.fromkeys(where):
            ranks = [rank for rank, name in enumerate(where) if name == node]
            most = int(MOST_BY_DEFAULT * (int(has[0, ranks].sum()) + int(has[1, ranks].min())))
            if (need := sum(needs[rank] for rank in ranks)) > most:
                return (
                    f"copies would take {need} bytes on node {node!r}, more than half of the memory that is free there "
                    f'({2 * most}); to have them all the same, set dynatrain.buddies.mode to "copy"'
                )
        return ""

    # ---- at a boundary -----------------------------------------------------------------------------------------------

    def at_boundary(self) -> None:
        """Take a copy if one is due. Working members call this between two global batches, once for each step.

        This is the last call at a boundary, so that no switch waits for a copy taken just before it. The loss of a
        member raises nothing here, because the next collective of training also detects the loss.
        """
        engine, every = self._engine, self._all
        now = engine.segment, engine.global_steps
        if now in ((self._seen[0], self._seen[2]), engine.formed_at):
            return
        begin, registered = time.perf_counter(), tuple(len(each._engine.registered) for each in every)
        if (now[0], registered) != self._seen[:2]:
            self._next = None
        if registered != self._seen[1]:
            self.forget()  # the copies belong to another registration of parameters
        waited = sum(each.take_seconds for each in every)
        self._seen, self._share = (now[0], registered, now[1]), waited / max(begin - self._left_at, 1e-6)
        try:
            self._look()
        except RuntimeError as error:
            if not isinstance(error, WorldChanged) and not is_lost_peer(error):
                raise
            logger.debug("no copy of step %d: %s", engine.global_steps, error)
        self._left_at = time.perf_counter()

    def before_leaving_world(self) -> None:
        """Wait until no copy is in transit in the world, at most for `dynatrain.timeout_seconds`."""
        self.wait_for_round()

    def before_load(self) -> None:
        """Void all copies, because they would bring back the state that the load replaces. This is a collective of the
        working members."""
        engine = self._engine
        if (first := open_engines()[0]) is not engine:  # copies of all engines follow the first engine's places
            first.repeat_places()
        say = partial(PROCESS.membership.say_replaced, self.stretch)
        Session(engine.control, f"replaced/{engine.segment}", engine.members, "load").first("said", say, "saying so")
        self.replace()

    def memory_in(self, layout: Layout, members: tuple[int, ...]) -> int:
        """Return the bytes that copies take in a layout, on the member that needs the most."""
        engine, places = self._engine, self._engine.candidates.nodes
        others = [one for one in PROCESS.engines if one is not engine]
        has_alone = has_single_holders(engine.vps, layout)
        everything = not has_alone and any(has_single_holders(one.vps, one.layout) for one in others)
        nodes = [places[member] for member in members]
        return max(memory_of_copies(engine.vps, layout, nodes, self._settings.copies, everything))

    @property
    def stretch(self) -> tuple[int, ...]:
        """The stretch of training (the time between two loads of state) to which the next copies of all engines
        belong."""
        return mark_of(self._first._engine).stretch

    def replace(self) -> None:
        """Void the copies of all engines. Called after all working members have loaded a state into one of the
        engines."""
        for one in self._all:
            one.kept.void_before(self.stretch)
        self.forget()

    def forget(self) -> None:
        """Drop all copies that this process keeps, for every engine, and void the copies that are in transit."""
        first = self._first
        for one in self._all:
            one.wait_for_round()
            one.kept.forget()
        for each in first._rounds:
            each.is_void = True
        first._is_protected, first._why = False, "another state was loaded: no copy of it is whole yet"

    def wait_for_round(self) -> None:
        """Wait until the round of copies in progress has ended, at most for `dynatrain.timeout_seconds`."""
        if self._thread is not None:
            self._thread.join(self._engine.settings.timeout_seconds)
            self._thread = None

    def _look(self) -> None:
        worlds = [one._engine.world for one in self._all]
        if len(worlds) != len(self._worlds) or any(a is not b for a, b in zip(worlds, self._worlds, strict=True)):
            self._enter()
        if self._rounds:
            self._see(self._rounds)
        step = self._engine.global_steps
        if self._by_member and (self._next is None or step >= self._next):
            self._next = step + self._settings.every_steps
            if not self._rounds:
                self._begin()
            else:
                self._skipped += 1

    def _enter(self) -> None:
        """Assign buddies in an engine's new world, and determine whether they protect its state."""
        every, self._rounds, self._next = self._all, (), None
        self._worlds = [one._engine.world for one in every]
        self._cannot = self._why_not()
        engine, here = self._engine, {*self._engine.candidates.members}
        nodes = [engine.candidates.nodes[member] for member in engine.members]
        is_needed = any(needs_copies(one._engine.vps, one._engine.layout, nodes) for one in every)
        self._by_member = self._dealt(nodes) if is_needed and not self._cannot else {}
        self._lacks = next((lack for one in every if (lack := _lack(one._engine, nodes))), "")
        for one in every:
            one.wait_for_round()
            one.world, members = one._engine.world, one._engine.members
            one.buddies = tuple(tuple(map(members.index, self._by_member[each])) for each in members if self._by_member)
        was_protected = self._is_protected
        if self._cannot or self._lacks:
            self._is_protected, self._why = False, self._cannot or self._lacks
        elif not is_needed:
            layouts = " and ".join(dict.fromkeys(str(one._engine.layout) for one in every))
            self._is_protected, self._why = True, f"in {layouts} every element has several holders: nothing is copied"
        elif len(engine.members) == 1:
            self._is_protected, self._why = False, "one member alone works: nobody could keep its copy"
        else:
            kept = [{member, *buddies} for member, buddies in self._whole_of.items()]
            self._is_protected = was_protected and all(len(here & holders) > 1 for holders in kept)
            self._why = "" if self._is_protected else NEW_WORLD
        if self._cannot or self._lacks or (was_protected and not self._is_protected):
            self._warn()
        elif engine.rank == 0 and not self._by_member:
            logger.info("buddies: %s", self._why)

    def _dealt(self, nodes: Sequence[str]) -> dict[int, tuple[int, ...]]:
        """Return a map from each member to the members that keep its copies.

        nodes: the node of each rank.
        """
        members, asked = self._engine.members, self._settings.copies
        buddies = buddies_of(nodes, asked)
        if self._engine.rank == 0 and buddies and len(buddies[0]) < asked:
            logger.warning(
                "buddies: %d others keep each copy in this world, and dynatrain.buddies.copies asks for %d; start more "
                "members, or ask for fewer",
                *(len(buddies[0]), asked),
            )
        return {member: tuple(members[each] for each in its) for member, its in zip(members, buddies, strict=False)}

    def _warn(self) -> None:
        """Log on rank 0 what a death would cost. Logs again only after the reason has changed."""
        why, backups = self._why, backups_of(self._engine.extensions)
        if self._engine.rank != 0 or why == self._last_warning:
            return
        self._last_warning = why
        cost = (
            f"ends the job and loses what was not saved; set {BACKUP_KEY} to have checkpoints saved"
            if backups is None
            else f"takes training back to the newest {backups.what} in {backups.path}"
        )
        until = "" if self._cannot or self._lacks else "until copies are whole, "
        logger.warning("buddies: unprotected: %s; %sa death %s", why, until, cost)

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Take copies of all engines' states, and start sending them. Either all engines have a world, or none does."""
        for one in self._all:
            one._engine.agree()
        first = mark_of(self._engine)
        self._rounds = [
            one._ship(first if one is self else mark_of(one._engine, first), one._engine.world)
            for one in self._all
            if one._engine.world is not None
        ]
        self._taken += 1

    def _ship(self, mark: Mark, world: World) -> Round:
        """Take a copy of this engine's state, and start the thread that sends it while training continues.

        mark: the boundary at which the copy is taken.

        If no state of this engine is held by one member alone, all of its state is copied, because all engines of a
        process are restored together.
        """
        self.wait_for_round()
        engine, begin = self._engine, time.perf_counter()
        rank, members, wards = engine.rank, engine.members, wards_of(self.buddies, engine.rank)
        own, rooms = self.kept.begin(mark, len(wards))
        taken: UndigestedCopy | None = None
        failure = ""
        try:
            with PROCESS.turn(engine):
                taken = take(engine, own, mark, everything=not self._is_alone)
            self.kept.frozen, self.kept.frozen_of = taken.frozen, (engine.layout, rank)
        except (DynatrainError, RuntimeError, MemoryError, OSError) as error:  # RuntimeError: torch lacks memory
            failure = str(error)
        if failure and failure != self._last_failure:
            logger.error(
                "buddies: member %d has no copy of step %d (%s); a death costs what follows the last whole copies",
                *(members[rank], mark.step, failure),
            )
        self._last_failure = failure
        kept_here = [Ward(members[ward], ward, room) for ward, room in zip(wards, rooms, strict=True)]
        stop = None if world.status is None else partial(_stop_if_lost, world.status)
        way, buddies = GroupTransport(world.group(GROUP), members, stop), [members[each] for each in self.buddies[rank]]
        found = Round(mark, taken, buddies, kept_here, way, self.kept)
        self._thread = start_thread(found.run, "dynatrain-buddies")
        self.take_seconds = time.perf_counter() - begin
        return found

    def _see(self, found: Sequence[Round]) -> None:
        """Record the results of the last rounds of copies if the rounds have ended on all members. This is a collective
        over the world."""
        is_over = all(each.is_over for each in found)
        is_whole = is_over and all(each.is_whole for each in found)
        said = torch.tensor([int(is_over), int(is_whole), -int(self._share * MILLIONTHS)])
        if self._engine.world is not None:
            td.all_reduce(said, td.ReduceOp.MIN, group=self._engine.world.default)
        is_over, is_whole = (bool(value) for value in said[:2])
        if not is_over:
            return
        is_whole &= not any(each.is_void for each in found)
        self._rounds = ()
        for one, each in zip(self._all, found, strict=True):
            one.sent_bytes, one.ship_seconds = each.sent_bytes, each.seconds
            if is_whole:
                one.kept.whole = each.mark
        if is_whole:
            self._whole_of = self._by_member
        self._tell(found, is_whole)
        share = -int(said[2]) / MILLIONTHS  # of a step's time that the slowest rank spends waiting for copies
        if self._engine.rank == 0 and not self._has_said_cost and share >= MUCH_OF_A_STEP:
            self._has_said_cost = True
            logger.warning(
                "buddies: %.0f %% of a step is waiting for the copies that protect the job from a death; raise "
                'dynatrain.buddies.every_steps, or set dynatrain.buddies.mode to "off"',
                100 * share,
            )

    def _tell(self, found: Sequence[Round], is_whole: bool) -> None:
        """Log every change of the protection against a death, once."""
        step, error = found[0].mark.step, next((each.error for each in found if each.error), "")
        if error != self._last_error:
            self._last_error = error
            if error:
                logger.error(
                    "buddies: the copies of step %d are not whole (%s); the last whole ones count", step, error
                )
        was_protected, was_behind = self._is_protected, self._is_behind
        self._is_protected, self._is_behind = was_protected or (is_whole and not self._lacks), not is_whole
        self._why = "" if self._is_protected else self._why
        if self._engine.rank != 0:
            return
        if self._is_protected and not was_protected:
            self._last_warning = ""
            logger.info("buddies: protected from step %d on: the death of a member loses no more than follows it", step)
        elif self._is_protected and self._is_behind and not was_behind:
            whole = self.kept.whole
            since = "the last that are" if whole is None else f"step {whole.step}"
            logger.warning("buddies: the copies of step %d are not whole; a death costs what follows %s", step, since)

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def protects(self) -> Literal["", "no", "yes"]:
        """Return "yes" if the state survives the death of one member, as far as this member knows, else "no"; "" on an
        idle member."""
        if self._engine.idle:
            return ""
        return "yes" if self.protection.is_protected else "no"

    @property
    def protection(self) -> Protection:
        """The protection of the state against a death, as far as this member knows. This is the value of
        `engine.buddies`."""
        first, whole = self._first, self.kept.whole
        is_known = self.world is self._engine.world
        return Protection(
            buddies=dict(first._by_member) if is_known else {},
            step=None if whole is None else whole.step,
            is_protected=is_known and first._is_protected,
            why=first._why if is_known else NEW_WORLD,
            memory_bytes=self.kept.nbytes,
            sent_bytes=self.sent_bytes,
            take_ms=1e3 * self.take_seconds,
            ship_ms=1e3 * self.ship_seconds,
            taken=first._taken,
            skipped=first._skipped,
        )


def _lack(engine: EngineCore, nodes: Sequence[str]) -> str:
    """Return a description of the part of an engine's state that has no copy and would be lost with a node; "" if there
    is none.

    nodes: the node of each rank.
    """
    layout = engine.layout
    if not lacks_frozen(engine.vps, layout) or outlives_a_node(layout.replace(zero_stage=0), nodes):
        return ""
    return f"in {layout} the frozen weights of one place are all on one node, and no copy has them"


def _stop_if_lost(status: GroupStatus) -> None:
    if status.is_lost:
        raise WorldChanged("a member of this world is gone, or a collective of it has failed")
