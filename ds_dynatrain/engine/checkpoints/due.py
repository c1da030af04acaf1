"""When a fallback checkpoint is due, and whether it can be saved just now: decided on all working members alike.

All come by the same boundaries. By steps each of them knows by itself. By time the clock of rank 0 counts, and all look
at it together, about once a second. A save needs the board, and the one before it has to be over: where a member would
wait for either, all put the save off. What they tell each other goes over their world, since a coordinator that hangs
would hold up whoever asks the board.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as td

from ds_dynatrain.config import FallbackConfig
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.report import logger

LOOK_SECONDS = 1.0
MOST_STEPS = 64
"""From one look at rank 0's clock to the next: about so long, and at most so many steps."""
ANSWER_SECONDS = 2.0
BUSY_SECONDS = 10.0
"""So long the board may take to answer, and the save before to end; then the next one is put off."""
AGAIN_SECONDS = 30.0
"""After that it is tried again."""
ANYTHING = 1 << 62


class Due:
    """Of one engine."""

    def __init__(self, engine: EngineCore, settings: FallbackConfig) -> None:
        self._engine, self._settings = engine, settings
        self._segment = ""
        self._next_look: int | None = None
        self._looked = 0.0, 0
        self._again_at: float | None = None
        """When a save that was put off is tried again, by rank 0's clock; on all members None or not."""

    def is_now(self) -> bool:
        """Whether a save is due at this boundary, the first of its step. WorldChanged if a member is lost."""
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
        """Whether this member's own steps, or its clock, say that a save was due before now. It asks nobody."""
        engine, every = self._engine, self._settings.every_steps
        saved = engine.safe_at[1]
        return self._is_late() or (every is not None and engine.global_steps // every > saved // every)

    def can_be_saved(self, savers: list[Saver]) -> bool:
        """Whether nothing keeps any member waiting; else it is put off, which rank 0 logs. savers: of all engines that
        would be saved. WorldChanged if a member is lost."""
        engine = self._engine
        answers = engine.control.answers(ANSWER_SECONDS)
        is_idle = all([saver.settle(BUSY_SECONDS) for saver in savers]) if answers else True  # it may wait for it, too
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
        """By rank 0's clock."""
        now, seconds = time.monotonic(), self._settings.every_seconds
        if self._again_at is not None:
            return now >= self._again_at
        return seconds is not None and now - self._engine.safe_since >= seconds

    def _gap(self) -> int:
        """Steps until the next look, from how long those since the last one took."""
        (then, steps), now = self._looked, time.monotonic()
        step_seconds = max(1e-6, (now - then) / max(1, self._engine.global_steps - steps))
        self._looked = now, self._engine.global_steps
        every = self._settings.every_seconds
        seconds = LOOK_SECONDS if every is None else min(LOOK_SECONDS, every / 10)
        return max(1, min(MOST_STEPS, int(seconds / step_seconds)))

    def _least(self, one: int = ANYTHING, other: int = ANYTHING) -> tuple[int, int]:
        """The least of what all members say, twice."""
        said, world = torch.tensor([one, other]), self._engine.world
        if world is not None and world.default.size() > 1:
            td.all_reduce(said, td.ReduceOp.MIN, group=world.default)
        return int(said[0]), int(said[1])
