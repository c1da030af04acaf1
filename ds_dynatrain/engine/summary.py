"""The event of a switch, put together from what all of its members measured."""

from __future__ import annotations

from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.meeting import Outcome as Measured
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.plan import estimate
from ds_dynatrain.report import CertificateSummary, Outcome, Side, SwitchEvent
from ds_dynatrain.space import Layout


def event_of(
    engine: EngineCore,
    preparation: Preparation,
    measured: Measured,
    was: tuple[Layout, tuple[int, ...]],
    pause_ms: float,
) -> SwitchEvent:
    """The event as this member reports it: bytes are sums over all members, phases its own."""
    proposal = preparation.proposal
    records = list(measured.members.values())
    kinds = measured.kinds
    plan = preparation.plans.get(kinds)
    outcome: Outcome = "committed" if measured.committed else "rolled_back"
    certificate = None
    if measured.digest:
        certificate = CertificateSummary(len(engine.host.model_map.tensors), tuple(kinds), measured.digest)
    bound = 0
    if plan is not None:
        bound = estimate(plan, engine.settings.memory_budget_bytes, 1.0).highest_peak_bytes
    return SwitchEvent(
        outcome=outcome,
        generation=proposal.generation,
        step=engine.global_steps,
        source=Side(was[0].to_dict(), was[1]),
        target=Side(proposal.layout.to_dict(), proposal.members),
        bytes_kept=sum(record["kept"] for record in records),
        bytes_local=sum(record["local"] for record in records),
        bytes_sent=sum(record["sent"] for record in records),
        bytes_minimum=plan.bytes_sent if plan is not None else 0,
        phases_ms=measured.phases_ms,
        pause_ms=pause_ms,
        certificate_ms=max((record["certificate_ms"] for record in records), default=measured.certificate_ms),
        peak_memory_bytes=max((record["peak_memory"] for record in records), default=measured.peak_memory),
        memory_bound_bytes=bound,
        certificate=certificate,
        reason=measured.reason,
        warnings=tuple(measured.warnings),
    )
