"""The status of a job, as a coordinator tells it to whoever asks."""

from __future__ import annotations

from ds_dynatrain.elastic.membership import Membership
from ds_dynatrain.elastic.messages import ChangeStatus, MemberStatus, Status


def snapshot(membership: Membership, job: str, now: float) -> Status:
    """The status at a time: workers in the order of their ranks, then those without a rank by name."""
    world = membership.world
    ranks = () if world is None else world.members
    place = {member: rank for rank, member in enumerate(ranks)}
    members = [
        MemberStatus(
            member=entry.member,
            phase=membership.phase(entry),
            rank=place.get(entry.member),
            pid=entry.pid,
            entered=entry.report.entered,
            step=entry.report.step,
            layout=entry.report.layout,
            pause_ms=entry.report.pause_ms,
            protected=entry.report.protected,
            heard_seconds=max(0.0, now - entry.heard),
            waits_for=entry.report.waits_for,
        )
        for entry in membership.roster
    ]
    members.sort(key=lambda one: (one.rank is None, one.rank or 0, one.member))
    changes = tuple(
        ChangeStatus(
            generation=each.generation,
            change=each.change,
            size=len(each.members),
            seconds_ago=max(0.0, now - at),
            reason=each.reason,
        )
        for each, at in membership.changes
    )
    return Status(
        job=job,
        term=membership.term,
        min_nodes=membership.settings.min_nodes,
        max_nodes=membership.settings.max_nodes,
        generation=0 if world is None else world.generation,
        paused=world is not None and world.paused,
        finished=membership.is_finished,
        ranks=ranks,
        members=tuple(members),
        changes=changes,
    )
