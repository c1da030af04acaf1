"""The extension that saves checkpoints automatically at boundaries, the points between two optimizer steps.

`Due` decides when to save, and decides the same on all members. If SIGTERM requests a save, the members agree on its
step through the job's key-value store (board): a member that gets the signal posts a request, and rank 0 posts its next
step as the last one. No member can be past that step, because each step needs rank 0's gradients and every member reads
the board at every boundary. After the save all working members end.

If a process has several engines, the first engine that reaches such a step, and finds no other engine in a global
batch, saves for all. In a job whose members come and go, all engines are saved when the first one is (`joint_tags`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.worker_process import Termination
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.errors import CheckpointError, ConfigError, SwitchRefused, WorldChanged
from ds_dynatrain.extension import Backups, Extension
from ds_dynatrain.fallback.config import FallbackConfig
from ds_dynatrain.fallback.joint_tags import next_tag
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS

TERMINATED = 143
"""Exit code after SIGTERM: 128 + 15, the shell's convention."""
PATIENCE_STEPS = 8
"""Number of steps for which an ending engine waits for others that are always in a global batch, before it ends without
saving them. A due save that finds no boundary for this many steps is reported as waiting."""
END_STEPS = 2
"""Number of steps after SIGTERM within which all members save and end, if each step has a boundary."""
LOOK_SECONDS = 1.0
MOST_STEPS = 64
"""The most steps between two queries of rank 0's clock, which are about `LOOK_SECONDS` apart."""
ANSWER_SECONDS = 2.0
BUSY_SECONDS = 10.0
"""How long a save waits for the previous one to end before it is put off. The limit for the board's answer is
`ANSWER_SECONDS`."""
AGAIN_SECONDS = 30.0
"""Time after which a postponed save is tried again."""
ANYTHING = 1 << 62


class Fallback(Extension):
    """Extension for the `fallback` block: one member's part in saving checkpoints automatically."""

    name = "fallback"

    def __init__(self, settings: DynatrainConfig) -> None:
        self._settings: FallbackConfig = settings.fallback
        self._is_elastic = False
        self._asked = "", -1
        self._standing, self._tries, self._is_saved = ("", -1), 0, False
        self._is_told, self._told_at = False, 0
        self._termination: Termination | None = None

    # ---- when an engine is made, and ends ----------------------------------------------------------------------------

    def check_launch(self, is_elastic: bool) -> None:
        """Record whether members come and go. If so, all engines of a process are saved and restored together."""
        self._is_elastic = is_elastic

    def check_beside(self, here: DynatrainConfig, there: DynatrainConfig, number: int) -> None:
        """Raise ConfigError if two engines are restored together and only one saves checkpoints, or both use the same
        folder."""
        ours, theirs = here.fallback, there.fallback
        if self._is_elastic and (theirs is None) != (ours is None):
            raise ConfigError(
                f"dynatrain.fallback: engine {number} of this process has {'one' if theirs is not None else 'none'} "
                f"and this one has {'one' if ours is not None else 'none'}, and all go back together; configure it for "
                "each of them, or for none"
            )
        if theirs is not None and ours is not None and Path(theirs.path).resolve() == Path(ours.path).resolve():
            raise ConfigError(
                f"dynatrain.fallback.path: {ours.path} is that of another engine of this process, and each would take "
                "the other's checkpoints for its own; give each engine a folder"
            )

    def attach(self, engine: Any) -> None:
        """Attach to the engine, and watch for SIGTERM if the block requests it.

        In an elastic launch SIGTERM asks only this member to leave, so it is not watched here.
        """
        super().attach(engine)
        self._engine: EngineParts = engine._parts
        self._due = Due(self._engine, self._settings)
        if self._settings.on_sigterm and not self._is_elastic:
            self._termination = Termination()
            self._termination.watch()

    def on_end(self) -> None:
        """Stop watching for SIGTERM, and leave the signal to the script again."""
        if self._termination is not None:
            self._termination.stop()

    # ---- saving ------------------------------------------------------------------------------------------------------

    def backups(self) -> Backups:
        """Return the folder of the checkpoints that this extension saves, and the number of checkpoints kept."""
        return Backups("fallback checkpoint", Path(self._settings.path), self._settings.keep)

    def save_if_due(self) -> None:
        """Save a checkpoint if one is due.

        A save that fails is logged, and training continues. Raises SystemExit after a save that SIGTERM requested.
        """
        self._unless_lost(self._save_if_due)

    def _save_if_due(self) -> None:
        engine, due = self._engine, self._due
        if self._is_the_end():
            self._save("/end")
            for other in self._others:
                other.save_before_the_end()
            raise SystemExit(TERMINATED)
        now = engine.segment, engine.global_steps
        if now not in (engine.safe_at, self._asked):
            self._asked = now
            savers = [each._engine.saver for each in (self, *self._beside)]
            if due.is_now() and due.can_be_saved(savers):
                self._save(in_background=self._settings.background)

    def save_now(self) -> None:
        """Save a checkpoint of this step, and wait until it is written.

        Does nothing if this method has already saved this step. A save that fails is logged, and the next call tries
        again.
        """
        self._unless_lost(self._save_now)

    def _save_now(self) -> None:
        now = self._engine.segment, self._engine.global_steps
        if self._standing != now:
            self._standing, self._tries, self._is_saved = now, 0, False
        if not self._is_saved:
            self._tries += 1
            self._is_saved = self._save(f"/now{self._tries}")

    def save_before_the_end(self) -> None:
        """Save a checkpoint because another engine of this process is about to end the script."""
        if self._engine.has_open_window:
            logger.warning(
                "no fallback checkpoint of step %d: a global batch is open; end the script after engine.step()",
                self._engine.global_steps,
            )
            return
        with self._engine.turn():
            self._save_now()

    def _unless_lost(self, save: Callable[[], None]) -> None:
        """Call `save`. In an elastic launch, give up this checkpoint if the world or the coordinator is lost."""
        try:
            save()
        except (WorldChanged, td.DistError) as lost:
            if not self._is_elastic:
                raise
            if isinstance(lost, WorldChanged) or not self._finds_board():
                step = self._engine.global_steps
                logger.warning("no fallback checkpoint of step %d (%s); the one before counts", step, lost)

    def _finds_board(self) -> bool:
        """Reconnect all engines to their boards (key-value stores) after the coordinator was lost. Return whether this
        succeeded."""
        self._engine.note_safe()
        try:
            for engine in PROCESS.engines:
                PROCESS.membership.reopen(engine)
        except SwitchRefused:
            return False
        return True

    def _save(self, more: str = "", in_background: bool = False) -> bool:
        """Save this engine and those saved with it, and return whether the save succeeded or was started in the
        background.

        more: a suffix that makes the key of this save unique.
        """
        engine, beside, keep = self._engine, self._beside, self._settings.keep
        key = f"fallback/{engine.segment}/{engine.global_steps}{more}"
        try:
            folders = [each.backups().path for each in (self, *beside)]
            tag = next_tag(engine, folders, keep, key) if beside else None
            self._write(tag, key, None if beside else keep, in_background)
            for other in beside:
                with other._engine.turn():
                    other._write(tag, f"{key}/beside", None, in_background)
            return True
        except CheckpointError as error:
            if engine.rank == 0:
                logger.error("no fallback checkpoint of step %d: %s", engine.global_steps, error)
            return False
        finally:
            engine.note_safe()

    def _write(self, tag: str | None, key: str, keep: int | None, in_background: bool) -> None:
        """Save a checkpoint of this engine only. Raises CheckpointError if saving fails."""
        self._engine.saver.save(self.backups().path, tag, key, "", keep, in_background)

    # ---- other engines of this process -------------------------------------------------------------------------------

    @property
    def _others(self) -> list[Fallback]:
        """The fallback extensions of the process's other engines."""
        found = [one.extension(self.name) for one in self._engine.others]
        return [each for each in found if each is not None]

    @property
    def _beside(self) -> list[Fallback]:
        """The fallback extensions of the engines that are saved together with this one."""
        return self._others if self._is_elastic else []

    # ---- what waits for a boundary -----------------------------------------------------------------------------------

    def waiting(self, steps: int) -> Iterator[str]:
        """Yield a description of each due save that waits for a boundary, the point between two optimizer steps."""
        engine = self._engine
        if self._hears_termination() and engine.global_steps - self._told_at > END_STEPS:
            yield "SIGTERM has come, all working members are to save and end"
        saves = not self._is_elastic or PROCESS.engines[0] is engine
        if saves and engine.rank == 0 and steps > PATIENCE_STEPS and self._due.is_overdue:
            yield "a fallback checkpoint is due"

    def _hears_termination(self) -> bool:
        """Return whether this member has received a SIGTERM that requests a save."""
        if self._termination is not None and self._termination.read() and not self._is_told:
            self._is_told, self._told_at = True, self._engine.global_steps
            logger.warning("SIGTERM: all working members save a checkpoint at the next step, and end")
        return self._is_told

    def _is_the_end(self) -> bool:
        """Return whether all members end at this step, because one of them has received SIGTERM."""
        if self._termination is None:
            return False
        engine, key = self._engine, f"fallback/{self._engine.segment}/end"
        if self._hears_termination():
            engine.control.decide(f"{key}/request", True)
        due, now = engine.control.read(key), engine.global_steps
        if due is None and engine.rank == 0 and engine.control.read(f"{key}/request"):
            engine.control.post(key, now + 1)
        if due is None or now < due:
            return False
        return now > due + PATIENCE_STEPS or not any(other.has_open_window for other in engine.others)


class Due:
    """Decides whether a fallback checkpoint of an engine is due, and whether it can be saved. The answers are the same
    on all members.

    All members pass the same boundaries. Each member counts steps itself. Rank 0's clock decides whether a save is due
    by time; all members query the clock together, about once a second. A save needs the board (the members' key-value
    store), and the previous save must have ended. If a member would have to wait for one of the two, all members
    postpone the save. Members use collectives of their world to inform each other, because a coordinator that hangs
    would block a member that asks the board.
    """

    def __init__(self, engine: EngineCore, settings: FallbackConfig) -> None:
        self._engine, self._settings = engine, settings
        self._segment = ""
        self._next_look: int | None = None
        self._looked = 0.0, 0
        self._again_at: float | None = None
        """Time, by rank 0's clock, at which to retry a postponed save; None if no save was postponed. All members agree
        on whether it is None."""

    def is_now(self) -> bool:
        """Return whether a save is due at this boundary, the first one of its step. Raises WorldChanged if a member is
        lost."""
        engine, steps = self._engine, self._engine.global_steps
        if self._segment != engine.segment:
            self._segment, self._again_at = engine.segment, None
            self._next_look = steps if self._settings.every_seconds is not None else None
        every = self._settings.every_steps
        by_steps = every is not None and steps > 0 and steps % every == 0 and self._again_at is None
        if self._next_look is None or steps < self._next_look:
            return by_steps
        by_time, gap = self._least(int(self._is_late()), self._gap()) if engine.rank == 0 else self._least()
        self._next_look = steps + gap
        return by_steps or bool(by_time)

    @property
    def is_overdue(self) -> bool:
        """Whether a save was already due, by this member's own steps and clock. Sends no message."""
        engine, every = self._engine, self._settings.every_steps
        saved = engine.safe_at[1]
        return self._is_late() or (every is not None and engine.global_steps // every > saved // every)

    def can_be_saved(self, savers: list[Saver]) -> bool:
        """Return whether a save can begin without making a member wait. Otherwise put the save off, and log this on
        rank 0.

        savers: the savers of all engines that would be saved.

        Raises WorldChanged if a member is lost.
        """
        engine = self._engine
        answers = engine.control.answers(ANSWER_SECONDS)
        is_idle = all([saver.settle(BUSY_SECONDS) for saver in savers]) if answers else True  # it may need the board
        all_are_idle, all_answer = self._least(int(is_idle), int(answers))
        if all_are_idle and all_answer:
            self._again_at = None
            self._next_look = None if self._settings.every_seconds is None else engine.global_steps + 1
            return True
        why = (
            f"the one before is still being written after {BUSY_SECONDS:g} s more"
            if all_answer
            else f"the board has not answered a member for {ANSWER_SECONDS:g} s"
        )
        if engine.rank == 0:
            where = f"fallback checkpoint of step {engine.global_steps}"
            logger.warning("%s: %s; it is put off for %g s, and training goes on", where, why, AGAIN_SECONDS)
        self._again_at, self._next_look = time.monotonic() + AGAIN_SECONDS, engine.global_steps + 1
        return False

    def _is_late(self) -> bool:
        """Return whether a save is due by time. Called on rank 0, whose clock counts."""
        now, seconds = time.monotonic(), self._settings.every_seconds
        if self._again_at is not None:
            return now >= self._again_at
        return seconds is not None and now - self._engine.safe_since >= seconds

    def _gap(self) -> int:
        """Return the number of steps until the next query of rank 0's clock, estimated from the duration of steps since
        the last query."""
        (then, steps), now = self._looked, time.monotonic()
        step_seconds = max(1e-6, (now - then) / max(1, self._engine.global_steps - steps))
        self._looked = now, self._engine.global_steps
        every = self._settings.every_seconds
        seconds = LOOK_SECONDS if every is None else min(LOOK_SECONDS, every / 10)
        return max(1, min(MOST_STEPS, int(seconds / step_seconds)))

    def _least(self, one: int = ANYTHING, other: int = ANYTHING) -> tuple[int, int]:
        """Return, for each of the two numbers, its minimum over all members. This is a collective over the world."""
        said, world = torch.tensor([one, other]), self._engine.world
        if world is not None and world.default.size() > 1:
            td.all_reduce(said, td.ReduceOp.MIN, group=world.default)
        return int(said[0]), int(said[1])
