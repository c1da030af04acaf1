"""The status of a job, as a coordinator tells it to whoever asks."""

from __future__ import annotations

from ds_dynatrain.elastic.membership import Membership
from ds_dynatrain.elastic.messages import MOST_PARTED, ChangeStatus, MemberStatus, StartingNode, Status
from ds_dynatrain.elastic.world import nodes_of


def snapshot(membership: Membership, job: str, now: float) -> Status:
    """Return the status at `now`: workers in the order of their ranks, then those without a rank by name."""
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
    parted = sorted(membership.links.parted)
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
        starting=_starting(membership, now),
        changes=changes,
        parted=tuple(f"{one} and {other} do not reach each other" for one, other in parted[:MOST_PARTED]),
    )


def _starting(membership: Membership, now: float) -> tuple[StartingNode, ...]:
    """Return the nodes with an agent and without a worker, the one that has waited longest first."""
    started = nodes_of(membership.roster.members)
    waiting = sorted((since, node) for node, since in membership.watched.items() if node not in started)
    return tuple(StartingNode(node=node, seconds=max(0.0, now - since)) for since, node in waiting)
