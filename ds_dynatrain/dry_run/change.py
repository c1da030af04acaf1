"""The dry run of one change of layout: from a job, two layouts and a topology to the answer.

`Question` holds the options of `ds-dynatrain plan`, and can also search for layouts to suggest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from ds_dynatrain.dry_run import answer
from ds_dynatrain.dry_run.answer import DryRunAnswer
from ds_dynatrain.dry_run.planned_job import PlannedJob, layout_of
from ds_dynatrain.errors import ConfigError, LayoutError, SwitchRefused
from ds_dynatrain.plan import (
    LinkClass,
    Picture,
    SwitchPlan,
    Topology,
    assign_slots,
    held_bytes,
    memory_of,
    picture_of,
    plan_switch,
)
from ds_dynatrain.plan.topology import ASSUMED, CLASSES
from ds_dynatrain.space import Layout
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.support.axes import smaller

DIGEST_BYTES_PER_SECOND, REBUILD_SECONDS, VOTE_SECONDS = 1.1e12, 0.2, 0.1
"""Coefficients for the expected duration, from docs/figures/training.md: the speed of digests on a device, the time to
rebuild DeepSpeed's optimizer, and the time of the votes."""
COEFFICIENTS = (
    "expected: moves take {:g} s and {:g} x the time of their bytes, one class of links after the other; digests "
    f"of both sides run at {DIGEST_BYTES_PER_SECOND / 1e12:g} TB/s; building the optimizer takes {REBUILD_SECONDS:g} s "
    f"and votes {VOTE_SECONDS:g} s (docs/figures/training.md; measured on at most four ranks)"
)
NOT_COUNTED = (
    "not counted: activations, gradients, padding, the reserve of an allocator; setting up process groups and kernels; "
    "training continues until the pause",
    "the global batch divides over the target's ranks",
)
MOST_FOR_ROUNDS, MOST_PAIRS = 256, 1000


def answered(job: PlannedJob, source: Layout, target: Layout, topology: Topology) -> DryRunAnswer:
    """Return the cost of a change from one layout to another, or the reason why it is refused.

    topology: the members of the cluster. The first ones train in the source layout.
    """
    refused, figures, ways = job.refusal(source, target), None, list[str]()
    given = "assumed" if topology.origin == ASSUMED else f"from {topology.origin}"
    names = {"memory": "inside a member", "node": "inside a node", "network": "between nodes"}
    rates = (f"{where} {getattr(topology, name).bytes_per_second / 1e9:g} GB/s" for name, where in names.items())
    coefficients = COEFFICIENTS.format(topology.overhead_seconds, topology.overhead_factor)
    said = [*job.assumed, f"links {given}: {', '.join(rates)}", coefficients, *NOT_COUNTED]
    cluster = len(topology.node_of)
    if max(source.world_size, target.world_size) > cluster:
        large = source if source.world_size > cluster else target
        why = f"{large} needs {large.world_size} members and the cluster has {cluster}"
        refused = SwitchRefused(why, f"nearest: {smaller(large, cluster)}")
    else:
        try:
            figures = _figures(job, source, target, topology)
        except (SwitchRefused, LayoutError) as error:
            refused = refused or (error if isinstance(error, SwitchRefused) else SwitchRefused(str(error)))
        if refused is None and figures is not None:
            refused, ways = _memory_refusal(job, source, target, figures)
    if refused is not None and refused.way_out:
        ways.insert(0, refused.way_out)
    return DryRunAnswer(
        model=job.model.name,
        parameters=job.model.parameters,
        source=source.to_dict(),
        target=target.to_dict(),
        fits=refused is None,
        refusal=refused.reason if refused is not None else "",
        ways_out=ways,
        figures=figures,
        assumptions=said,
    )


def _figures(job: PlannedJob, source: Layout, target: Layout, topology: Topology) -> answer.ChangeFigures:
    every, names = sorted(topology.node_of), topology.names
    vps = job.space(source, target, every[: source.world_size])
    assigned = assign_slots(vps, target, every, topology.node_of)
    plan = plan_switch(vps, target, assigned.members, nodes=topology.node_of)
    places = topology.node_index(np.array(plan.members, dtype=np.int64))
    found = picture_of(plan, places)
    before, after = (Counter(topology.node_of[each] for each in side) for side in (vps.members, plan.target_members))
    apart = np.where(np.eye(len(found.by_node), dtype=bool), 0, found.by_node).astype(np.int64)
    out, into = np.zeros((2, len(names)), np.int64)
    out[: len(apart)], into[: len(apart)] = apart.sum(1), apart.sum(0)
    sent, least = int(found.gives.sum()), _least_by_sizes(plan)
    most = int(np.maximum(found.gives, found.takes).argmax())
    nodes = [
        answer.NodeBytes(name=name, before=before[name], after=after[name], sent=int(out[at]), received=int(into[at]))
        for at, name in enumerate(names)
        if before[name] or after[name]
    ]
    return answer.ChangeFigures(
        members=list(plan.target_members),
        bytes=answer.MovedBytes(
            kept=int(found.kept.sum()),
            cast=int(found.cast.sum()),
            in_node=int(found.sent[0].sum()),
            between_nodes=int(found.sent[1].sum()),
            sent=sent,
            minimum=assigned.bytes_bound,
            excess={
                "parts that lie elsewhere": sent - least - assigned.placement_bytes - assigned.rank_zero_bytes,
                "groups on few nodes": assigned.placement_bytes,
                "rank 0 keeps its rank": assigned.rank_zero_bytes,
            },
        ),
        busiest=answer.BusiestMember(
            member=plan.members[most],
            node=topology.node_of[plan.members[most]],
            sent=int(found.gives[most]),
            received=int(found.takes[most]),
            sent_between_nodes=int(found.sent[1, most]),
            received_between_nodes=int(found.received[1, most]),
        ),
        memory=_memory(job, plan, found, topology),
        seconds=_seconds(plan, found, topology, places),
        nodes=nodes,
        freed=[name for name in names if before[name] and not after[name]],
        pairs=_pairs(apart, names, nodes),
        rounds=_rounds(plan, topology),
    )


def _least_by_sizes(plan: SwitchPlan) -> int:
    """Return the bytes that must be sent only because some members hold more state after the switch than before."""
    sides, total = plan.sides, 0
    for kind in sides.kinds:
        before = np.append(held_bytes(sides.space, sides.vps.layout, [kind.name]), 0)[sides.source_ranks]
        after = held_bytes(sides.space, sides.layout, [kind.name])
        if kind.derived_from is not None:
            master = sides.vps.kind(kind.derived_from)
            after = after - held_bytes(sides.space, sides.layout, [master.name]) // master.itemsize * kind.itemsize
        total += int(np.maximum(after - before, 0).sum())
    return total


def _memory(job: PlannedJob, plan: SwitchPlan, found: Picture, topology: Topology) -> answer.PeakMemory:
    """Return the peak memory of the member with the highest peak."""
    rows = memory_of(plan, found, job.budget_bytes)
    peak = rows.sum(0)
    most, device = int(peak.argmax()), topology.device_memory_bytes
    return answer.PeakMemory(
        member=plan.members[most],
        before=int(rows[0, most]),
        after=int(rows[1, most]),
        peak=int(peak[most]),
        lean=int((rows[:2].max(0) + rows[2]).max()),
        device=None if device is None else int(device),
    )


def _seconds(plan: SwitchPlan, found: Picture, topology: Topology, places: Ints) -> answer.ChangeSeconds:
    """Return the minimum transfer time per link class, and the expected duration of each phase of the switch."""
    busy = topology.busy_seconds(places, np.vstack([found.kept, found.sent]), np.vstack([found.kept, found.received]))
    floors = dict(zip(CLASSES, busy.max(1, initial=0.0).tolist(), strict=True))
    sides = plan.sides
    digested = [held_bytes(sides.space, layout, plan.kinds).max() for layout in (sides.vps.layout, sides.layout)]
    phases = {
        "votes": VOTE_SECONDS,
        "rebuild": REBUILD_SECONDS,
        "moves": topology.expected_seconds(busy),
        "certificate": float(sum(digested)) / DIGEST_BYTES_PER_SECOND,
    }
    return answer.ChangeSeconds(**floors, floor=max(floors.values()), phases=phases, expected=sum(phases.values()))


def _pairs(apart: Ints, names: tuple[str, ...], nodes: list[answer.NodeBytes]) -> list[tuple[int, int, int]]:
    """Return (sending node, receiving node, bytes) for the pairs of nodes that exchange the most."""
    number = {node.name: at for at, node in enumerate(nodes)}
    busy = np.flatnonzero(apart)
    most = busy[np.argsort(-apart.ravel()[busy], kind="stable")][:MOST_PAIRS]
    found = []
    for at in most.tolist():
        sender, receiver = divmod(at, apart.shape[1])
        found.append((number[names[sender]], number[names[receiver]], int(apart.ravel()[at])))
    return found


def _rounds(plan: SwitchPlan, topology: Topology) -> list[answer.ExchangeRound]:
    """Return the rounds of exchanges, in order; an empty list if there are many members.

    Pairs of members with the same first two parts of their key in `plan.plan.rounds` exchange at the same time.
    """
    count = len(plan.members)
    if count > MOST_FOR_ROUNDS:
        return []
    members = np.array(plan.members, dtype=np.int64)
    by_pair = picture_of(plan, np.arange(count)).by_node
    one, other = np.nonzero(np.triu(np.maximum(by_pair, by_pair.T), 1))
    nodes, found = topology.node_index(members), dict[tuple[bool, int], float]()
    for a, b in zip(one.tolist(), other.tolist(), strict=True):
        is_near = bool(nodes[a] == nodes[b])
        link = topology.node if is_near else topology.network
        seconds = max(by_pair[a, b], by_pair[b, a]) / link.bytes_per_second + link.latency_seconds
        key = is_near, int(members[a] ^ members[b])
        found[key] = max(found.get(key, 0.0), float(seconds))
    return [
        answer.ExchangeRound(between_nodes=not is_near, seconds=found[is_near, at]) for is_near, at in sorted(found)
    ]


def _memory_refusal(
    job: PlannedJob, source: Layout, target: Layout, figures: answer.ChangeFigures
) -> tuple[SwitchRefused | None, list[str]]:
    """Return (the refusal, what would fit instead) if the devices have too little memory, otherwise (None, [])."""
    memory = figures.memory
    if memory.device is None or memory.peak <= memory.device:
        return None, []
    ways = []
    if memory.lean <= memory.device:
        ways.append(f'a lean switch, through a checkpoint: {memory.lean / 1e9:.1f} GB ("memory": "lean")')
    for stage in range(target.zero_stage + 1, 4):
        other = target.replace(zero_stage=stage)
        if job.refusal(source, other) is None:
            vps = job.space(source, other, range(source.world_size))
            after = int(held_bytes(vps, other, vps.present_kinds(other)).max())
            if memory.before + after + job.budget_bytes <= memory.device:
                ways.append(f"{other}: at most {(memory.before + after + job.budget_bytes) / 1e9:.1f} GB")
    return SwitchRefused(
        f"member {memory.member} needs {memory.peak / 1e9:.1f} GB at the peak ({memory.before / 1e9:.1f} before, "
        f"{memory.after / 1e9:.1f} after, the rest in flight), and its device has {memory.device / 1e9:.1f} GB"
    ), ways or ["more ranks, or a higher ZeRO stage"]


# ---- options of the command ------------------------------------------------------------------------------------------

MOST_SUGGESTED, MOST_PLANNED = 8, 48


@dataclass(frozen=True)
class Question:
    """A change of a job's layout in a cluster, as the user asked for it.

    target: None if layouts are to be suggested.
    topology: None to assume as many equal nodes as the layouts need.
    """

    job: PlannedJob
    source: Layout
    target: Layout | None
    topology: Topology | None
    members_per_node: int = 8
    bytes_per_second: float | None = None

    @staticmethod
    def read(
        model: str,
        source: str,
        target: str | None,
        config: Path | None,
        cluster: Path | None,
        bytes_per_second: float | None,
        members_per_node: int,
    ) -> Question:
        """Read the options. Raises DynatrainError, which names the option or file, if one cannot be used."""
        job = PlannedJob.read(model, config)
        stage = None if config is None else int(job.zero.get("stage", 0))
        present = layout_of(source, stage)
        wanted = None if target is None else layout_of(target, present=present)
        topology = None if cluster is None else Topology.read(cluster)
        return Question(job, present, wanted, topology, members_per_node, bytes_per_second)

    def answer(self) -> DryRunAnswer:
        """Return what the change would cost. Raises ConfigError if no target is given."""
        if self.target is None:
            raise ConfigError("--to is missing; give the layout to plan, or --suggest and --gpus")
        topology, each = self.topology, self.members_per_node
        if topology is None:
            given = {} if self.bytes_per_second is None else {"network": LinkClass(self.bytes_per_second)}
            most = max(self.source.world_size, self.target.world_size)
            topology = Topology.uniform(-(-most // each), each, **given)
        return answered(self.job, self.source, self.target, topology)

    def held(self) -> list[tuple[Layout, dict[str, int]]]:
        """Return, for each ZeRO stage of the source, the bytes of each state kind on the rank that holds the most."""
        found = []
        for stage in range(4):
            layout = self.source.replace(zero_stage=stage)
            if self.job.refusal(layout, layout) is None:
                space = self.job.space(layout, layout, range(layout.world_size))
                kinds = {name: int(held_bytes(space, layout, [name]).max()) for name in space.present_kinds(layout)}
                total = int(held_bytes(space, layout, space.present_kinds(layout)).max())
                found.append((layout, {**kinds, "in all": total}))
        return found

    def suggestions(self, ranks: int) -> list[DryRunAnswer]:
        """Return dry runs of layouts with `ranks` ranks that fit into memory, ordered by the switch's expected time.

        Only `MOST_PLANNED` layouts are tried: those that differ from the present layout in the fewest sizes.
        """
        found = sorted(self._layouts(ranks), key=self._distance)[:MOST_PLANNED]
        answers = [replace(self, target=layout).answer() for layout in found]
        costs = [(each.figures.seconds.expected, each) for each in answers if each.fits and each.figures is not None]
        return [each for _, each in sorted(costs, key=lambda pair: pair[0])[:MOST_SUGGESTED]]

    def _layouts(self, ranks: int) -> Iterator[Layout]:
        """Yield all layouts with this many ranks, except the present one, in which the job can train."""
        sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
        pipes = [size for size in sizes if size <= self.job.model.blocks]
        experts = sizes if self.job.model.has_experts else [1]
        tensors = [size for size in sizes if size <= max(8, self.members_per_node)]
        for pipe, tensor, expert, stage in product(pipes, tensors, experts, range(1, 4)):
            data = ranks // (pipe * tensor)
            if data * pipe * tensor != ranks or (data * tensor) % expert:
                continue
            layout = Layout(zero_stage=stage, data=data, pipe=pipe, tensor=tensor, expert=expert)
            if layout != self.source and self.job.refusal(self.source, layout) is None:
                yield layout

    def _distance(self, layout: Layout) -> tuple[int, str]:
        was, now = self.source.to_dict(), layout.to_dict()
        return sum(was[name] != now.get(name) for name in was), str(layout)
