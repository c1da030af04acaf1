"""Reports of a switch: to the log, the report file, DeepSpeed's monitors and the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_dynatrain.report import CertificateSummary, EventWriter, Outcome, Side, SwitchEvent, log_event, logger
from ds_dynatrain.report.monitors import rows
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.preparation import SUMS, UNKNOWN, Preparation
from ds_dynatrain.reshard.preparation import Outcome as Measured
from ds_dynatrain.space import Layout


def event_of(
    engine: EngineCore,
    preparation: Preparation,
    measured: Measured,
    was: tuple[Layout, tuple[int, ...]],
    pause_ms: float,
    bytes_per_second: float,
) -> SwitchEvent:
    """Return the event of a switch as this member reports it. Bytes are sums over all members, phases are this member's
    own.

    bytes_per_second: the link speed with which the duration of the moves is predicted.
    """
    proposal = preparation.proposal
    everyone = measured.over_all or {**measured.measured(), **dict.fromkeys(SUMS, 0)}
    outcome: Outcome = "committed" if measured.committed else "rolled_back"
    certificate = None
    if measured.digest:
        certificate = CertificateSummary(len(engine.host.model_map.tensors), measured.kinds, measured.digest)
    return SwitchEvent(
        outcome=outcome,
        generation=proposal.generation,
        step=engine.global_steps,
        source=Side(was[0].to_dict(), was[1]),
        target=Side(proposal.layout.to_dict(), proposal.members),
        bytes_kept=everyone["kept"],
        bytes_local=everyone["local"],
        bytes_sent=everyone["sent"],
        bytes_minimum=everyone["planned"],
        bytes_bound=_known(everyone["bound"]),
        rank_zero_bytes=_known(everyone["rank_zero"]),
        bytes_busiest=everyone["busiest"],
        move_ms=everyone["move_ms"],
        predicted_move_ms=1e3 * everyone["busiest"] / bytes_per_second,
        phases_ms=measured.phases_ms,
        pause_ms=pause_ms,
        late_bytes=everyone["late_bytes"],
        late_ms=everyone["late_ms"],
        late_wait_ms=measured.late_wait_ms,
        certificate_ms=everyone["certificate_ms"],
        peak_memory_bytes=everyone["peak_memory"],
        communicators_built=everyone["communicators_built"],
        communicators_kept=everyone["communicators_kept"],
        connect_ms=everyone["connect_ms"],
        connect_pause_ms=everyone["connect_pause_ms"],
        memory_bound_bytes=everyone["memory_bound"],
        cause=proposal.cause,
        predicted_gain=proposal.predicted_gain,
        certificate=certificate,
        reason=measured.reason,
        warnings=tuple(measured.warnings),
    )


def _known(measured: int) -> int | None:
    return None if measured == UNKNOWN else measured


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
