"""The extension that lowers the clocks of members that wait for slower ones.

It uses the timing windows of `balance`, which are sequences of timed steps. At the end of a window all members know for
how many seconds each rank computed. Each member advances the same search for the clocks of all ranks (`clock_search`),
and sets its own clock. The next window begins once step times have settled at the new clocks, until the search is over.
If members, layout or costs change later, all clocks return to the highest, and a new search begins.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

from ds_dynatrain.adapters.groups.device import compute_device
from ds_dynatrain.balance.window import Busy
from ds_dynatrain.clocks import watcher
from ds_dynatrain.clocks.actuator import Actuator, made
from ds_dynatrain.clocks.clock_search import ClockSearch, waiting
from ds_dynatrain.clocks.config import ClocksConfig
from ds_dynatrain.clocks.rows import BESIDE_ANOTHER_ENGINE, BESIDE_MOVES
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.extension import Extension
from ds_dynatrain.report import logger


class Clocks(Extension):
    """The extension for the `clocks` block of a job.

    search: the state of the search; None before the first timing window in a world, and if the actuator is "off".
    """

    name = "clocks"
    search: ClockSearch | None = None
    _actuator: Actuator | None = None
    _watcher: subprocess.Popen[bytes] | None = None
    _busy: Busy | None = None
    """The results of the last timing window that was used."""
    _since: int | None = None
    """The step at which costs last changed; None while clocks are searched for."""

    def __init__(self, settings: DynatrainConfig) -> None:
        self._settings: ClocksConfig = settings.clocks
        self._balance = settings.balance

    # ---- when an engine is made, and ends ----------------------------------------------------------------------------

    def check_launch(self, is_elastic: bool) -> None:
        """Make the actuator, and remove a limit that a killed job has left on the device's clock.

        Raises ConfigError if nothing measures times or the actuator cannot set clocks, and UnsupportedError if clocks
        are lowered while layers move.
        """
        if self._settings.actuator == "off":
            return
        if self._balance is None or not self._balance.measures:
            raise ConfigError(
                "dynatrain.clocks: clocks follow from the times that balance measures, and nothing is measured; add "
                '"balance": {"mode": "advise"}'
            )
        self._device = compute_device().index or 0
        actuator = made(self._settings.actuator, self._device)
        if self._balance.acts and not actuator.is_dry:
            raise BESIDE_MOVES.error("dynatrain.clocks")
        try:
            actuator.give_back()
        except Exception as error:
            raise ConfigError(
                f'dynatrain.clocks.actuator: "{self._settings.actuator}" may not set the clock of device '
                f"{self._device} ({error}); for zeus start the job as root (SYS_ADMIN), or start zeusd as root and set "
                'ZEUSD_SOCK_PATH to its socket; "dry" needs no permission'
            ) from error
        self._actuator = actuator

    def check_beside(self, here: DynatrainConfig, there: DynatrainConfig, number: int) -> None:
        """Raise UnsupportedError if clocks are to be set, because the second engine's work on the device is not
        measured."""
        if self._settings.actuator != "off":
            raise BESIDE_ANOTHER_ENGINE.error("dynatrain.clocks")

    def described(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return a description of the supported clocks, which must be equal on all members."""
        if self._actuator is None:
            return {}
        clocks, unit = self._actuator.clocks, self._actuator.unit
        return {"clocks of the device": f"{len(clocks)} of {clocks[0]} to {clocks[-1]} {unit}"}

    def attach(self, engine: Any) -> None:
        """Attach to the engine, and start the watcher, which removes the clock's limit if this process is killed."""
        super().attach(engine)
        self._engine: EngineParts = engine._parts
        if self._actuator is not None and not self._actuator.is_dry:
            self._watcher = watcher.start(self._settings.actuator, self._device)

    def on_end(self) -> None:
        """Remove the limit on the device's clock, and end the watcher."""
        if self._watcher is not None:
            self._set(None)
            self._watcher.kill()
            self._watcher.wait()
            self._watcher = None

    # ---- in a job ----------------------------------------------------------------------------------------------------

    def on_change(self, change: Any) -> None:
        """Set the highest clock and begin a new search in the new world. An idle member keeps the highest clock."""
        self._begin()

    def after_step(self) -> None:
        """Continue the search if the step has ended a timing window."""
        actuator = self._actuator
        busy = None if actuator is None else self.engine.balancer.busy
        if actuator is None or busy is None or busy is self._busy:
            return
        self._busy = busy
        if self.search is None or not self.search.is_over:
            self._continue(actuator, busy)
        elif self._since is None:
            self._since = busy.since
        elif self._since != busy.since:
            self._begin()
            self.engine.balancer.expect_new_costs()

    def _begin(self) -> None:
        self.search = self._since = None
        self._set(None)

    def _continue(self, actuator: Actuator, busy: Busy) -> None:
        """Advance the search by one timing window. With a dry actuator, complete the search with predicted times."""
        least = self._balance.least_gain
        search = (self.search or ClockSearch.begun(actuator.clocks, len(busy.seconds))).after(busy.seconds, least)
        while actuator.is_dry and not search.is_over:
            search = search.after(search.predicted(busy.seconds), least)
        self.search = search
        if not actuator.is_dry:
            self._set(search.places[self._engine.rank])
            self.engine.balancer.expect_new_costs()
        if search.is_over and self._engine.rank == 0:
            self._tell(actuator, search, busy)

    def _set(self, place: int | None) -> None:
        """Set this member's clock to `clocks[place]`. None, or the last index, removes the limit instead."""
        actuator = self._actuator
        if actuator is None:
            return
        try:
            if place is None or place == len(actuator.clocks) - 1:
                actuator.give_back()
            elif self._watcher is not None and self._watcher.poll() is None:
                actuator.set(actuator.clocks[place])
            else:
                raise RuntimeError("the process that would give the clock back has ended")
        except Exception as error:  # the step goes on at the clock that there is
            logger.error("clocks: member %d cannot set its clock: %s", self._engine.candidates.mine, error)

    def _tell(self, actuator: Actuator, search: ClockSearch, busy: Busy) -> None:
        lowered = sorted(actuator.clocks[place] for place in search.places if place < len(search.clocks) - 1)
        logger.info(
            "clocks: step %d: %d of %d members %s lower clocks%s; members waited %.0f %% of the slowest one's time",
            *(self._engine.global_steps, len(lowered), len(search.places)),
            "would have" if actuator.is_dry else "have",
            f", {lowered[0]} to {lowered[-1]} of {search.clocks[-1]} {actuator.unit}" if lowered else "",
            100 * waiting(busy.seconds),
        )
