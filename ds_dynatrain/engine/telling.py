"""Where events of an engine go: on rank 0 to the log, the report file, DeepSpeed's monitors and the coordinator."""

from __future__ import annotations

from pathlib import Path

from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.report import EventWriter, SwitchEvent, log_event, log_gain, log_recompile, logger
from ds_dynatrain.report.monitors import rows


class Telling:
    """Of one engine; on other ranks nothing happens."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    def switched(self, event: SwitchEvent) -> None:
        """A switch was carried out, whichever way it ended."""
        if self._engine.rank != 0:
            return
        log_event(event)
        if self._writer is not None:
            self._writer.write(event)
        if self._engine.settings.report.monitor:
            self._write_to_monitors(event)
        PROCESS.membership.tell(self._engine, event)

    def given_up(self, event: SwitchEvent) -> None:
        """A switch was let go of before it was carried out."""
        if self._engine.rank == 0:
            log_event(event)

    def cancelled(self, event: SwitchEvent) -> None:
        """The job has ended before a switch that was asked for."""
        if self._engine.rank == 0:
            log_event(event)
            if self._writer is not None:
                self._writer.write(event)

    def recompiled(self, event: SwitchEvent) -> None:
        """What the first step after a switch has compiled again is known now."""
        if self._engine.rank == 0:
            log_recompile(event)
            if self._writer is not None:
                self._writer.write_recompile(event)

    def gained(self, event: SwitchEvent) -> None:
        """What a switch was worth is known now."""
        if self._engine.rank == 0:
            log_gain(event)
            if self._writer is not None:
                self._writer.write_gain(event)

    def _write_to_monitors(self, event: SwitchEvent) -> None:
        """No monitor may end a switch that all others have committed."""
        engine = self._engine.deepspeed
        try:
            engine.monitor.write_events(rows(event, int(engine.global_samples)))
        except Exception as error:  # whatever a monitor's own library raises
            logger.warning(
                "switch %d was not written to DeepSpeed's monitors (%r); check the monitors that the configuration "
                "enables",
                *(event.generation, error),
            )

    @property
    def _writer(self) -> EventWriter | None:
        path = self._engine.settings.report.jsonl
        return None if path is None else EventWriter(Path(path))
