"""The fallback checkpoint: saved by itself at boundaries, so that there is one when it is needed.

When, `due` decides on all members alike. With SIGTERM, if that is asked for, it is the board: whoever gets one says so,
rank 0 posts that its next step is the one, which nobody can be past, since each step needs rank 0's gradients and every
member reads the board at every boundary; after the save all working members end. Of several engines in a process the
first one that comes to such a step, and finds none of the others in a global batch, saves for all. Where members come
and go, all engines are saved when the first one is (`joint`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ds_dynatrain.config import FallbackConfig
from ds_dynatrain.elastic.process import Termination
from ds_dynatrain.engine.checkpoints.due import Due
from ds_dynatrain.engine.checkpoints.joint import next_tag
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.report import logger

TERMINATED = 143
"""The exit code after SIGTERM, as a shell would have it: 128 + 15."""
PATIENCE_STEPS = 8
"""So many steps later an engine ends without the state of others that are in a global batch whenever it looks, and so
many steps without a boundary are too many where a save is due."""
END_STEPS = 2
"""So many steps after SIGTERM all save and end, where each step has a boundary."""


class Fallback:
    """One member's part in it. Without a block in the configuration nothing happens."""

    def __init__(self, engine: EngineCore, saver: Saver, others: Callable[[], Sequence[Fallback]]) -> None:
        """others: those of the other engines of this process."""
        self.engine, self._saver, self._others = engine, saver, others
        self._settings = settings = engine.settings.fallback
        self._due = None if settings is None else Due(engine, settings)
        self._asked = "", -1
        self._standing, self._tries, self._is_saved = ("", -1), 0, False
        self._is_told, self._told_at = False, 0
        self._termination: Termination | None = None
        if settings is not None and settings.on_sigterm and not PROCESS.membership.takes_sigterm:
            self._termination = Termination()
            self._termination.watch()

    def stop(self) -> None:
        """SIGTERM is the user's own affair again."""
        if self._termination is not None:
            self._termination.stop()

    def at_boundary(self) -> None:
        """A boundary of a working member: save if it is due. A save that fails is logged, and training goes on.

        SystemExit after the save that SIGTERM asks for.
        """
        engine, settings = self.engine, self._settings
        if settings is not None and self._is_the_end():
            self._save(settings, self._saver.save, "/end")
            for other in self._others():
                other.save_before_the_end()
            raise SystemExit(TERMINATED)
        now = engine.segment, engine.global_steps
        if settings is None or self._due is None or now in (engine.safe_at, self._asked):
            return
        self._asked = now
        if self._due.is_now() and self._due.can_be_saved(self._savers):
            self._save(settings, self._saver.start if settings.background else self._saver.save)

    @property
    def _savers(self) -> list[Saver]:
        """Of all engines that are saved with this one."""
        others = self._others() if PROCESS.membership.saves_jointly else []
        return [self._saver, *(other._saver for other in others)]

    def save_now(self) -> None:
        """Where training stands still or ends, on all working members: save this step, and wait for it.

        Nothing if this has saved it already. A save that fails is logged, and the next call tries it again.
        """
        now = self.engine.segment, self.engine.global_steps
        if self._standing != now:
            self._standing, self._tries, self._is_saved = now, 0, False
        if self._settings is not None and not self._is_saved:
            self._tries += 1
            self._is_saved = self._save(self._settings, self._saver.save, f"/now{self._tries}")

    def save_before_the_end(self) -> None:
        """Another engine of this process is about to end the script."""
        if self.engine.has_open_window:
            logger.warning(
                "no fallback checkpoint of step %d: a global batch is open; end the script after engine.step()",
                self.engine.global_steps,
            )
            return
        with PROCESS.turn(self.engine):
            self.save_now()

    def _save(self, settings: FallbackConfig, how: Callable[..., object], more: str = "") -> bool:
        """Whether it was saved, or is being saved in the background."""
        engine = self.engine
        key = f"fallback/{engine.segment}/{engine.global_steps}{more}"
        others = self._others() if PROCESS.membership.saves_jointly else []
        is_saved = True
        try:
            if not others:
                how(settings.path, None, key, "", settings.keep)
            else:
                tag = next_tag([engine, *(other.engine for other in others)], settings.keep, key)
                how(settings.path, tag, key, "", None)
                for other in others:
                    other.save_beside(tag, key, in_background=how == self._saver.start)
        except CheckpointError as error:
            if engine.rank == 0:
                logger.error("no fallback checkpoint of step %d: %s", engine.global_steps, error)
            is_saved = False
        engine.settle_fallback()
        return is_saved

    def save_beside(self, tag: str, key: str, in_background: bool) -> None:
        """The first engine saves just now, under that tag: this one, too. CheckpointError if it cannot."""
        engine, settings = self.engine, self._settings
        if settings is None:
            raise CheckpointError(
                f"engine {engine.job.number} has no dynatrain.fallback.path; give each engine of the process one"
            )
        save = self._saver.start if in_background else self._saver.save
        with PROCESS.turn(engine):
            save(settings.path, tag, f"{key}/beside", "", None)

    def waiting(self, steps: int) -> Iterator[str]:
        """Yield, in words, what of this waits for a boundary. Called after each optimizer step; asks nobody.

        steps: how many were made since the last boundary.
        """
        engine = self.engine
        if self._hears_termination() and engine.global_steps - self._told_at > END_STEPS:
            yield "SIGTERM has come, all working members are to save and end"
        saves = not PROCESS.membership.saves_jointly or PROCESS.engines[0] is engine
        if saves and engine.rank == 0 and steps > PATIENCE_STEPS and self._due is not None and self._due.is_overdue:
            yield "a fallback checkpoint is due"

    def _hears_termination(self) -> bool:
        """Return whether this member was told to end by a SIGTERM that asks for a save."""
        if self._termination is not None and self._termination.read() and not self._is_told:
            self._is_told, self._told_at = True, self.engine.global_steps
            logger.warning("SIGTERM: all working members save a checkpoint at the next step, and end")
        return self._is_told

    def _is_the_end(self) -> bool:
        """Whether a member was told to end, and this is the step at which all do."""
        if self._termination is None:
            return False
        engine, key = self.engine, f"fallback/{self.engine.segment}/end"
        if self._hears_termination():
            engine.control.decide(f"{key}/request", True)
        due, now = engine.control.read(key), engine.global_steps
        if due is None and engine.rank == 0 and engine.control.read(f"{key}/request"):
            engine.control.post(key, now + 1)
        if due is None or now < due:
            return False
        return now > due + PATIENCE_STEPS or not any(other.engine.has_open_window for other in self._others())
