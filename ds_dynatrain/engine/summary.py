"""The event of a switch, put together from what all of its members measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_dynatrain.plan import estimate
from ds_dynatrain.report import CertificateSummary, Outcome, Side, SwitchEvent
from ds_dynatrain.space import Layout

if TYPE_CHECKING:
    from ds_dynatrain.engine.engine import DynatrainEngine
    from ds_dynatrain.engine.preparation import Preparation
    from ds_dynatrain.engine.transaction import Outcome as Measured

CERTIFICATE_PHASES = ("digest", "verify")


def event_of(
    engine: DynatrainEngine,
    preparation: Preparation,
    measured: Measured,
    was: tuple[Layout, tuple[int, ...]],
    pause_ms: float,
) -> SwitchEvent:
    """The event as this member reports it: sums over members where bytes are meant, the slowest where time is."""
    proposal = preparation.proposal
    records = list(measured.members.values())
    kinds = next(iter(preparation.plans)) if preparation.plans else ()
    plan = preparation.plans.get(kinds)
    outcome: Outcome = "committed" if measured.committed else "rolled_back"
    certificate = None
    if measured.digest:
        certificate = CertificateSummary(len(engine.model_map.tensors), tuple(kinds), measured.digest)
    bound = 0
    if plan is not None:
        bound = estimate(plan, engine.settings.memory_budget_bytes, 1.0).highest_peak_bytes
    phases = _slowest(records, measured.phases_ms)
    return SwitchEvent(
        outcome=outcome,
        generation=proposal.generation,
        step=int(engine.global_steps),
        source=Side(was[0].to_dict(), was[1]),
        target=Side(proposal.layout.to_dict(), proposal.members),
        bytes_kept=sum(record["kept"] for record in records),
        bytes_local=sum(record["local"] for record in records),
        bytes_sent=sum(record["sent"] for record in records),
        bytes_minimum=plan.bytes_sent if plan is not None else 0,
        phases_ms=phases,
        pause_ms=pause_ms,
        certificate_ms=sum(phases.get(name, 0.0) for name in CERTIFICATE_PHASES),
        peak_memory_bytes=max((record["peak_memory"] for record in records), default=measured.peak_memory),
        memory_bound_bytes=bound,
        certificate=certificate,
        reason=measured.reason,
        warnings=tuple(measured.warnings),
    )


def _slowest(records: list[dict[str, Any]], own: dict[str, float]) -> dict[str, float]:
    return {
        name: max([value, *(record["phases_ms"].get(name, 0.0) for record in records)]) for name, value in own.items()
    }
