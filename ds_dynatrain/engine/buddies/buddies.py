"""An engine's buddies: at boundaries, which are due; beside training, one round at a time; and what a user sees.

All working members come by the same boundaries and decide from the same numbers: what each says of the round before is
reduced over their world, so that all take their copies at the same steps, or none does. Only when all have all copies
of a moment may the older ones be written over.

Of several engines in a process the first one's decides, at its boundaries, when no other is in a global batch: there
all take their copies, with the same buddies, and these are whole together or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as td

from ds_dynatrain.adapters.watched import is_lost_peer
from ds_dynatrain.adapters.world import World
from ds_dynatrain.elastic.main_thread import OWN_WAITS
from ds_dynatrain.elastic.messages import Protected
from ds_dynatrain.engine.buddies.choice import Choice
from ds_dynatrain.engine.buddies.copy import lacks_frozen
from ds_dynatrain.engine.buddies.keeper import Keeper
from ds_dynatrain.engine.buddies.keeping import Keeping
from ds_dynatrain.engine.buddies.pairing import Pairing
from ds_dynatrain.engine.buddies.shipping import Round
from ds_dynatrain.engine.buddies.taking import mark_of
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.feasible import available_bytes
from ds_dynatrain.errors import ConfigError, WorldChanged
from ds_dynatrain.plan import has_single_holders, memory_of_copies, needs_copies, outlives_a_node
from ds_dynatrain.report import Protection, logger

MILLIONTHS = 1_000_000
NOT_REPLAYED = "steps are not replayed any more, and no copy is whole yet"
NEW_WORLD = "no copy of this world is whole yet"
MOST_BY_DEFAULT = 0.5
"""Share of a node's free memory that copies may take where nobody has asked for them."""
MUCH_OF_A_STEP = 0.1
"""A step that waits longer than this share of its time for copies is worth a warning."""


class Buddies:
    """Of one engine, for the whole job. of_all: those of all engines that are open, the first one's first."""

    def __init__(self, engine: EngineCore, of_all: Callable[[], Sequence[Buddies]] = tuple) -> None:
        self.keeper = Keeper(engine)
        self.kept = self.keeper.kept
        self._engine, self._settings, self._of_all = engine, engine.settings.buddies, of_all
        self._choice = Choice(engine, self.kept)
        self._worlds: list[World | None] = []
        """Of all engines."""
        self._pairing = Pairing(engine, lambda: [one._engine for one in self._all])
        self._keeping: Keeping | None = None
        self._why = NEW_WORLD
        self._is_protected = self._is_behind = self._has_said_cost = False
        self._cannot = ""
        """Why no copies are taken in this world, where they are on by default."""
        self._lacks = ""
        """Why copies alone do not protect this world."""
        self._last_warning = ""
        self._whole_of: dict[int, tuple[int, ...]] = {}
        """The same of the newest moment that is whole; of a world before, maybe."""
        self._seen: tuple[str, tuple[int, ...], int] = ("", (), -1)
        self._next: int | None = None
        """The step at which a copy is due; None: at once."""
        self._rounds: Sequence[Round] = ()
        """One of each engine, on their way."""
        self._left_at, self._share = 0.0, 0.0
        self._taken = self._skipped = 0
        self._last_error = ""

    @property
    def _all(self) -> Sequence[Buddies]:
        return self._of_all() or (self,)

    @property
    def _first(self) -> Buddies:
        """Those that decide for all."""
        return self._all[0]

    @property
    def _keepers(self) -> list[Keeper]:
        return [one.keeper for one in self._all]

    def check(self) -> None:
        """Refuse a first world that cannot have the buddies that the user asked for; `open_for_work` calls it.

        Raise UnsupportedError if its steps cannot be replayed, ConfigError if it has too few members, or this node too
        little host memory for its copies and those of the engines that are there already. Where buddies are on by
        default nothing is refused: `_why_not` finds what they lack, in every world.
        """
        if self._settings.mode is None:
            return
        self._choice.check()
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
        """Return the bytes that copies of all engines take at each rank. nodes: the node of each rank."""
        engines = [*(one._engine for one in self._of_all() if one is not self), self._engine]
        alone, copies = [has_single_holders(one.vps, one.layout) for one in engines], self._settings.copies
        is_needed = any(needs_copies(one.vps, one.layout, nodes) for one in engines)
        needs = [
            memory_of_copies(one.vps, one.layout, nodes, copies, everything=is_needed and not has_alone)
            for one, has_alone in zip(engines, alone, strict=True)
        ]
        return [sum(of_rank) for of_rank in zip(*needs, strict=True)]

    def _why_not(self) -> str:
        """Return why this world has no copies where they are on by default, or nothing; all members find the same.

        Collective over the world of the engine where there are two nodes or more.
        """
        engine, world = self._engine, self._engine.world
        where = [engine.candidates.nodes[member] for member in engine.members]
        if self._settings.mode is not None or world is None:
            return ""
        if len(set(where)) == 1:
            return f"all members that train are on node {where[0]!r}; start another node, and copies begin"
        has = torch.zeros(2, len(where), dtype=torch.int64)
        held = sum(keeper.kept.nbytes for keeper in self._keepers)
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
        """A boundary of a working member, between two global batches; once for each step.

        After what else takes place there, so that no switch waits for a copy that was taken just before it. If a member
        is lost meanwhile, what follows of that is found where collectives of training fail, too.
        """
        engine, keepers = self._engine, self._keepers
        now = engine.segment, engine.global_steps
        if now in ((self._seen[0], self._seen[2]), engine.formed_at):
            return
        begin, registered = time.perf_counter(), tuple(len(each.engine.registered) for each in keepers)
        if (now[0], registered) != self._seen[:2]:
            self._next = None
        if registered != self._seen[1]:
            self.forget()  # what the copies are of is not registered any more
        waited = sum(each.take_seconds for each in keepers)
        self._seen, self._share = (now[0], registered, now[1]), waited / max(begin - self._left_at, 1e-6)
        try:
            self._look()
        except RuntimeError as error:
            if not isinstance(error, WorldChanged) and not is_lost_peer(error):
                raise
            logger.debug("no copy of step %d: %s", engine.global_steps, error)
        self._left_at = time.perf_counter()

    def settle(self, is_aborted: bool = False) -> None:
        """The world is about to be left: wait until nothing is under way in its group, for the usual time-out.
        is_aborted: by a loss.

        What is replayed counts as it is now until copies of another world are whole.
        """
        if is_aborted:
            self._pairing.close()  # what goes to idle members would not end by itself
        self.keeper.settle()
        self._choice.end()

    def while_idle(self, host: str) -> None:
        """On a member that waits for work: offer to keep copies. host: its own address. It may be called often.

        OSError if it cannot be reached, torch's DistError if the board is gone.
        """
        engine = self._engine
        self._pairing.close()
        if self._pairing.passes_over or engine.control.member not in engine.candidates.members:
            return
        if self._keeping is None:
            self._keeping = Keeping(self.kept)
        self._keeping.offer(engine.control, host)

    @property
    def stretch(self) -> tuple[int, ...]:
        """In which the next copies are, of all engines."""
        return mark_of(self._first._engine).stretch

    def replace(self) -> None:
        """Another state of an engine is loaded, on all members that work: no copy from before counts, of any."""
        for keeper in self._keepers:
            keeper.kept.void_before(self.stretch)
        self.forget()

    def forget(self) -> None:
        """No copy that this process has counts any more, of any engine."""
        self._first._forget()

    def _forget(self) -> None:
        for keeper in self._keepers:
            keeper.settle()
            keeper.kept.forget()
        for each in self._rounds:
            each.is_void = True
        self._choice.replay = None
        self._is_protected, self._why = False, "another state was loaded: no copy of it is whole yet"

    def _look(self) -> None:
        worlds = [keeper.engine.world for keeper in self._keepers]
        if len(worlds) != len(self._worlds) or any(a is not b for a, b in zip(worlds, self._worlds, strict=True)):
            self._enter()
        if self._choice.is_on:
            self._take_idle(False)
            self._follow()
            return
        pairing = self._pairing
        if self._rounds:
            self._see(self._rounds)
        if pairing.sees_change() and not self._rounds:
            self._see_idle()
        pairing.look()
        if not pairing.by_member and pairing.is_ready:  # one works, and nobody has to be asked
            self._take_idle(True)
        step = self._engine.global_steps
        if pairing.by_member and (self._next is None or step >= self._next):
            self._next = step + self._choice.every
            if not self._rounds:
                self._begin()
            else:
                self._skipped += 1

    def _enter(self) -> None:
        """Another world of an engine: who keeps whose copies there. Who has just come knows of no longer interval of
        the others'.
        """
        self._choice.end()
        keepers, self._rounds, self._next = self._keepers, (), None
        self._worlds = [keeper.engine.world for keeper in keepers]
        self._cannot = self._why_not()
        self._see_idle()
        self._choice.enter(bool(self._pairing.by_member))

    def _see_idle(self) -> None:
        """Settle who keeps whose copies in another world, or beside other idle members in it."""
        engine, keepers, here = self._engine, self._keepers, {*self._engine.candidates.members}
        nodes = [engine.candidates.nodes[member] for member in engine.members]
        is_needed = any(needs_copies(keeper.engine.vps, keeper.engine.layout, nodes) for keeper in keepers)
        self._pairing.enter(is_needed and not self._cannot)
        self._lacks = next((lack for keeper in keepers if (lack := _lack(keeper.engine, nodes))), "")
        for keeper in keepers:
            keeper.enter(self._pairing.by_member)
        kept, was_protected = [{member, *buddies} for member, buddies in self._whole_of.items()], self._is_protected
        self._is_protected = was_protected and all(len(here & holders) > 1 for holders in kept)
        self._why = "" if self._is_protected else NEW_WORLD
        if self._cannot or self._lacks:
            self._is_protected, self._why = False, self._cannot or self._lacks
        elif not is_needed:
            layouts = " and ".join(dict.fromkeys(str(keeper.engine.layout) for keeper in keepers))
            self._is_protected, self._why = True, f"in {layouts} every element has several holders: nothing is copied"
        elif len(engine.members) == 1 and not self._pairing.idle:
            self._is_protected, self._why = False, "one member alone works: nobody could keep its copy"
        if self._cannot or self._lacks or (was_protected and not self._is_protected):
            self._warn()
        elif engine.rank == 0 and not self._pairing.by_member and not self._pairing.idle:
            logger.info("buddies: %s", self._why)

    def _warn(self) -> None:
        """Say what a death would cost, on rank 0; once for each reason in a row."""
        why, fallback = self._why, self._engine.settings.fallback
        if self._engine.rank != 0 or why == self._last_warning:
            return
        self._last_warning = why
        cost = (
            "ends the job and loses what was not saved; set dynatrain.fallback.path to have checkpoints saved"
            if fallback is None
            else f"takes training back to the newest fallback checkpoint in {fallback.path}"
        )
        until = "" if self._cannot or self._lacks else "until copies are whole, "
        logger.warning("buddies: unprotected: %s; %sa death %s", why, until, cost)

    def _take_idle(self, has_idle: bool) -> None:
        """Let idle members be buddies, or not; on all that work alike, with no round under way."""
        if has_idle != self._pairing.has_idle:
            self._pairing.take_idle(has_idle)
            for keeper in self._keepers:
                keeper.enter(self._pairing.by_member, self._pairing.idle)

    # ---- steps that are replayed -------------------------------------------------------------------------------------

    def watched_step(self) -> AbstractContextManager[None]:
        """Around the optimizer's step."""
        return self._choice.watched_step()

    def finish_step(self) -> None:
        """See `Replay.finish`."""
        if self._choice.replay is not None:
            self._choice.replay.finish()

    def _follow(self) -> None:
        """Where steps are replayed. All begins with copies of one moment, which a step waits for."""
        keeper = self.keeper
        if self._choice.goes_on():
            if (replay := self._choice.replay) is not None:
                keeper.take_seconds, keeper.ship_seconds = replay.seconds, replay.ship_seconds
                keeper.sent_bytes, self._taken = replay.sent_bytes, self._taken + 1
            else:
                self._is_protected, self._why, self._next = False, NOT_REPLAYED, None
            return
        self._begin()
        with OWN_WAITS.waiting("sending copies to buddies"):
            keeper.join()
        if self._rounds:
            self._see(self._rounds)
        if self.kept.whole == mark_of(self._engine):
            self._choice.begin(keeper.buddies)

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Of all engines that have a world, which is of all of them or none."""
        for keeper in self._keepers:
            keeper.engine.agree()
        first = mark_of(self._engine)
        self._rounds = [
            keeper.begin(
                first if keeper is self.keeper else mark_of(keeper.engine, first), keeper.engine.world, self._pairing
            )
            for keeper in self._keepers
            if keeper.engine.world is not None
        ]
        self._taken += 1

    def _see(self, found: Sequence[Round]) -> None:
        """How the last rounds have ended, if they have for all; what each says of them is reduced over the world."""
        share, is_over = -int(self._share * MILLIONTHS), all(each.is_over for each in found)
        is_whole = is_over and all(each.is_whole for each in found)
        said = torch.tensor([int(is_over), int(is_whole), int(self._pairing.is_ready), share])
        if self._engine.world is not None:
            td.all_reduce(said, td.ReduceOp.MIN, group=self._engine.world.default)
        is_over, is_whole, is_ready = (bool(value) for value in said[:3])
        if not is_over:
            return
        is_void = any(each.is_void for each in found)
        is_whole &= not is_void
        self._rounds = ()
        for keeper, each in zip(self._keepers, found, strict=True):
            keeper.see(each, is_whole)
        if is_whole:
            self._whole_of = dict(self._pairing.by_member)
        self._tell(found, is_whole)
        self._say_cost(-int(said[3]) / MILLIONTHS)
        self._choice.weigh(-int(said[3]) / MILLIONTHS, sum(keeper.take_seconds for keeper in self._keepers))
        if is_whole:
            self._take_idle(is_ready)
        elif self._pairing.has_idle and not is_void:
            self._take_idle(False)
            self._pairing.give_idle_up()

    def _say_cost(self, share: float) -> None:
        """Warn once, on rank 0, where a step waits long for copies. share: of the step, on the rank that waits most."""
        if self._engine.rank or self._has_said_cost or self._choice.is_on or share < MUCH_OF_A_STEP:
            return
        self._has_said_cost = True
        logger.warning(
            "buddies: %.0f %% of a step is waiting for the copies that protect the job from a death; raise "
            'dynatrain.buddies.every_steps, or set dynatrain.buddies.mode to "off"',
            100 * share,
        )

    def _tell(self, found: Sequence[Round], is_whole: bool) -> None:
        """Log each change of the protection, once."""
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

    @property
    def is_said_to_protect(self) -> Protected:
        """For the status of the job; nothing on a member that holds no state."""
        if self._engine.idle:
            return ""
        return "yes" if self.protection.is_protected else "no"

    @property
    def _mode(self) -> str:
        """What is done in this world."""
        return "replay" if self._choice.is_on else "copy"

    @property
    def protection(self) -> Protection:
        """For people, and for scripts that watch."""
        first, keeper, replay = self._first, self.keeper, self._choice.replay
        whole = self.kept.whole if replay is None else replay.mark
        is_known = keeper.world is self._engine.world
        return Protection(
            mode=first._mode,
            buddies=dict(first._pairing.by_member) if is_known else {},
            step=None if whole is None else whole.step,
            is_protected=is_known and first._is_protected,
            why=first._why if is_known else NEW_WORLD,
            every_steps=1 if replay is not None else first._choice.every,
            memory_bytes=self.kept.nbytes + (0 if replay is None else replay.nbytes),
            sent_bytes=keeper.sent_bytes,
            take_ms=1e3 * keeper.take_seconds,
            ship_ms=1e3 * keeper.ship_seconds,
            taken=first._taken,
            skipped=first._skipped,
        )


def _lack(engine: EngineCore, nodes: Sequence[str]) -> str:
    """Return which part of an engine's state is in no copy and goes with a node, or nothing. nodes: of each rank."""
    layout = engine.layout
    if not lacks_frozen(engine.vps, layout) or outlives_a_node(layout.replace(zero_stage=0), nodes):
        return ""
    return f"in {layout} the frozen weights of one place are all on one node, and no copy has them"
