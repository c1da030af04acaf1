"""Reports of a switch: to the log, the report file, DeepSpeed's monitors and the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_dynatrain.report import CertificateSummary, EventWriter, Side, SwitchEvent, log_event, logger
from ds_dynatrain.report.monitors import rows
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.preparation import SUMS, UNKNOWN, Outcome, Preparation
from ds_dynatrain.space import Layout


def event_of(
    engine: EngineCore,
    preparation: Preparation,
    measured: Outcome,
    was: tuple[Layout, tuple[int, ...]],
    pause_ms: float,
    bytes_per_second: float,
) -> SwitchEvent:
    """Return the event of a switch as this member reports it. Bytes are sums over all members, phases are this member's
    own.

    bytes_per_second: the link speed with which the duration of the moves is predicted.
    """
    proposal = preparation.proposal
    found: dict[str, Any] = measured.over_all or {**measured.measured(), **dict.fromkeys(SUMS, 0)}
    unknown: dict[str, Any] = {name: None for name, value in found.items() if value == UNKNOWN}
    certificate = None
    if measured.digest:
        certificate = CertificateSummary(len(engine.host.model_map.tensors), measured.kinds, measured.digest)
    return SwitchEvent(
        outcome="committed" if measured.committed else "rolled_back",
        generation=proposal.generation,
        step=engine.global_steps,
        source=Side(was[0].to_dict(), was[1]),
        target=Side(proposal.layout.to_dict(), proposal.members),
        **{**found, **unknown},
        predicted_move_ms=1e3 * found["bytes_busiest"] / bytes_per_second,
        phases_ms=measured.phases_ms,
        pause_ms=pause_ms,
        late_wait_ms=measured.late_wait_ms,
        cause=proposal.cause,
        predicted_gain=proposal.predicted_gain,
        certificate=certificate,
        reason=measured.reason,
        warnings=tuple(measured.warnings),
    )


def tell(
    engine: EngineCore,
    event: SwitchEvent,
    log: Callable[[SwitchEvent], None] = log_event,
    write: Callable[[EventWriter, SwitchEvent], None] | None = EventWriter.write,
) -> None:
    """Report an event to the log and the report file. Takes effect only on rank 0.

    log: logs the event.
    write: writes the event's line into the report file; None to write no line.
    """
    if engine.rank != 0:
        return
    log(event)
    path = engine.settings.report.jsonl
    if write is not None and path is not None:
        write(EventWriter(Path(path)), event)


def write_to_monitors(engine: Any, event: SwitchEvent) -> None:
    """Write an event to DeepSpeed's monitors; log an error of a monitor, since it must not undo a committed switch."""
    try:
        engine.monitor.write_events(rows(event, int(engine.global_samples)))
    except Exception as error:  # a monitor's library may raise any exception
        logger.warning(
            "switch %d was not written to DeepSpeed's monitors (%r); check the monitors that the configuration enables",
            *(event.generation, error),
        )
