"""The fallback checkpoint: saved by itself at boundaries, so that there is one when it is needed.

All members come by the same boundaries. By steps, each of them knows from the number of steps whether a save is due. By
time, rank 0 alone looks at its clock: it posts that its next step is the one, which nobody can be past, since each step
needs rank 0's gradients and every member reads the board at every boundary. So it is with SIGTERM, if that is asked
for: whoever gets one says so, and after the save that follows all working members end. Of several engines in a process
the first one that comes to such a step, and finds none of the others in a global batch, saves for all. Where members
come and go, all engines are saved when the first one is (`joint`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ds_dynatrain.config import FallbackConfig
from ds_dynatrain.elastic.signals import Termination
from ds_dynatrain.engine.checkpoints.joint import next_tag
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.report import logger

if TYPE_CHECKING:
    from ds_dynatrain.engine.core import EngineCore
    from ds_dynatrain.engine.engine import DynatrainEngine


TERMINATED = 143
"""The exit code after SIGTERM, as a shell would have it: 128 + 15."""
PATIENCE_STEPS = 8
"""So many steps later an engine ends without the state of others that are in a global batch whenever it looks."""


class Fallback:
    """One member's part in it. Without a block in the configuration nothing happens."""

    def __init__(self, engine: DynatrainEngine, settings: FallbackConfig | None) -> None:
        self._engine = engine
        self._settings = settings
        self._here: tuple[str, int] = ("", 0)
        self._posted = 0
        self._since = time.monotonic()
        self._world = ""
        self._is_told = False
        self._termination: Termination | None = None
        if settings is not None and settings.on_sigterm and not engine.membership.takes_sigterm:
            self._termination = Termination()
            self._termination.watch()

    def stop(self) -> None:
        """SIGTERM is the user's own affair again."""
        if self._termination is not None:
            self._termination.stop()

    def settle(self) -> None:
        """The state of this step is safe, or was put together just now: no save is due before the next step."""
        self._here = self._engine.era, int(self._engine.global_steps)
        self._since = time.monotonic()

    def stand_at(self) -> None:
        """A boundary of a working member: save if it is due. A save that fails is logged, and training goes on.

        SystemExit after the save that SIGTERM asks for.
        """
        engine, settings = self._engine, self._settings
        if settings is not None and self._is_the_end():
            self._save(settings, engine.saver.save, "/end")
            for other in self._others:
                other.save_before_the_end()
            raise SystemExit(TERMINATED)
        if settings is None or self._here == (engine.era, int(engine.global_steps)):
            return
        by_time = self._is_due_by_time(settings)  # asked at each boundary, or what was posted for it would be left over
        if not (by_time or self._is_due_by_steps(settings)):
            return
        self._save(settings, engine.saver.start if settings.background else engine.saver.save)

    def save_now(self) -> None:
        """Before all working members end: save, and wait for it. One that fails is logged."""
        if self._settings is not None:
            self._save(self._settings, self._engine.saver.save, "/last")

    def _save(self, settings: FallbackConfig, how: Callable[..., object], more: str = "") -> None:
        engine = self._engine
        key = f"fallback/{engine.era}/{engine.global_steps}{more}"
        others = engine.membership.saved_with(engine)
        try:
            if not others:
                how(settings.path, None, key, "", settings.keep)
            else:
                tag = next_tag([engine, *others], settings.keep, key)
                how(settings.path, tag, key, "", None)
                for other in others:
                    other.save_beside(tag, key, in_background=how == engine.saver.start)
        except CheckpointError as error:
            if engine.rank == 0:
                logger.error("no fallback checkpoint of step %d: %s", engine.global_steps, error)
        self.settle()

    def save_beside(self, tag: str, key: str, in_background: bool) -> None:
        """The first engine saves just now, under that tag: this one, too. CheckpointError if it cannot."""
        engine, settings = self._engine, self._settings
        if settings is None:
            raise CheckpointError(f"engine {engine.job.number} has no dynatrain.fallback.path")
        save = engine.saver.start if in_background else engine.saver.save
        save(settings.path, tag, f"{key}/beside", "", None)

    def _is_the_end(self) -> bool:
        """Whether a member was told to end, and this is the step at which all do."""
        if self._termination is None:
            return False
        engine, key = self._engine, f"fallback/{self._engine.era}/end"
        if self._termination.read() and not self._is_told:
            self._is_told = True
            logger.warning("SIGTERM: all working members save a checkpoint at the next step, and end")
        if self._is_told:
            engine.control.decide(f"{key}/wish", True)
        due, now = engine.control.read(key), int(engine.global_steps)
        if due is None and engine.rank == 0 and engine.control.read(f"{key}/wish"):
            engine.control.post(key, now + 1)
        if due is None or now < due:
            return False
        return now > due + PATIENCE_STEPS or not any(other.has_open_window for other in self._others)

    @property
    def _others(self) -> list[EngineCore]:
        """The other engines of this process."""
        return [other for other in self._engine.turns.engines if other is not self._engine]

    def _is_due_by_steps(self, settings: FallbackConfig) -> bool:
        steps = int(self._engine.global_steps)
        return settings.every_steps is not None and steps > 0 and steps % settings.every_steps == 0

    def _is_due_by_time(self, settings: FallbackConfig) -> bool:
        engine = self._engine
        if settings.every_seconds is None:
            return False
        if self._world != engine.era:
            self._world, self._posted = engine.era, 0
        key, now = f"fallback/{engine.era}/due/{self._posted + 1}", int(engine.global_steps)
        due = engine.control.read(key)
        if due is not None and now >= due:
            self._posted += 1
            return bool(now == due)
        if due is None and engine.rank == 0 and time.monotonic() - self._since >= settings.every_seconds:
            engine.control.post(key, now + 1)
        return False
