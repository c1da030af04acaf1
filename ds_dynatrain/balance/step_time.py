"""Predictions of the seconds of a step in a layout, from a profile.

The passes follow the schedule of a pipeline. The optimizer's step and the messages between data ranks come after the
passes. A layer's seconds are proportional to the samples of a micro-batch and inversely proportional to the speed of
the layer's rank; experts take as long as on the rank with the most tokens. Nothing on a rank is assumed to overlap, so
communication that DeepSpeed overlaps is counted in full.

The schedule is that of DeepSpeed 0.19.8: `runtime/pipe/schedule.py` `TrainSchedule` (one forward, one backward) and
`runtime/pipe/engine.py` `_exec_schedule`. Stage s of P passes micro-batch m forward at step 2 m + s and backward at
step 2 m + 2 P - s - 1, so at each step a stage is either forward or backward. A stage sends its result at the following
step: to the next stage after taking a gradient from that stage, or to the previous stage before taking activations from
it.

A send waits until the message is received, as it does in gloo and, for messages that exceed its buffers, in NCCL: both
stages continue at the same moment. A late stage therefore delays its neighbours, even if they only send it something.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ds_dynatrain.balance.deal import Deal, cut_of
from ds_dynatrain.balance.experts import with_experts
from ds_dynatrain.balance.profile import Bools, Floats, Profile
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.kind import WEIGHT
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.zero import group_size


@dataclass(frozen=True)
class Link:
    """A connection between members.

    bytes_per_second: the rate of one member, in each direction.
    latency_seconds: the fixed time of one message.
    """

    bytes_per_second: float = math.inf
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Raise LayoutError if the rate is not above 0, or if the latency is negative or infinite."""
        if not self.bytes_per_second > 0:
            raise LayoutError(f"a link of {self.bytes_per_second} bytes per second: give more than 0")
        if not 0 <= self.latency_seconds < math.inf:
            raise LayoutError(f"a link with a latency of {self.latency_seconds} seconds: give 0 or more")

    def send(self, nbytes: float) -> float:
        """Return the seconds that one message of this many bytes takes."""
        return self.latency_seconds + nbytes / self.bytes_per_second

    def gather(self, nbytes: float, ranks: int) -> float:
        """Return the seconds of a ring all-gather, or of a ring reduce-scatter: ranks - 1 messages of one part each.

        nbytes: the bytes of all parts together.
        """
        return (ranks - 1) * self.send(nbytes / ranks) if ranks > 1 else 0.0


@dataclass(frozen=True)
class LinkCosts:
    """The links inside nodes and between them. By default all messages are free.

    inside: the link between two members of one node.
    between: the link between nodes.
    per_node: the number of members on a node, in the order of their numbers; None if all are on one node.
    members: the member at each rank; () if each rank is the member of the same number.
    """

    inside: Link = field(default_factory=Link)
    between: Link = field(default_factory=Link)
    per_node: int | None = None
    members: tuple[int, ...] = ()

    def of(self, ranks: Sequence[int]) -> Link:
        """Return the slowest link among these ranks: the link between nodes if the ranks are on several nodes."""
        if self.per_node is None:
            return self.inside
        nodes = {(self.members[rank] if self.members else rank) // self.per_node for rank in ranks}
        return self.inside if len(nodes) == 1 else self.between


@dataclass(frozen=True, eq=False)
class StageWork:
    """The seconds that the stages of one pipeline need for one micro-batch.

    forward: [stages], seconds of a forward pass.
    backward: [stages], seconds of a backward pass.
    send: [stages - 1], seconds to send the activations from stage s to s + 1, and to send the gradient back.
    returns: [stages - 1], whether a gradient is sent back. It is not if all earlier layers are frozen.
    """

    forward: Floats
    backward: Floats
    send: Floats
    returns: Bools


def simulate(work: StageWork, micro_batches: int) -> tuple[Floats, Floats]:
    """Simulate the passes of one batch through a pipeline, without the optimizer's step and the messages that follow.

    Returns two arrays [stages]: the seconds until a stage has finished its last pass and sent the result, and the
    seconds for which it computes.

    At each step a stage exchanges messages with only one neighbour: the previous stage if the step is forward,
    otherwise the next one. Both stages exchange the same two messages in the same order, so a step is one exchange and
    one pass.
    """
    stages = len(work.forward)
    step, stage = np.arange(-1, 2 * (micro_batches + stages - 1))[:, None], np.arange(stages)[None, :]
    forward = (step - stage) % 2 == 0
    micro_batch = np.where(forward, step - stage, step - 2 * stages + stage + 1) // 2
    valid = (micro_batch >= 0) & (micro_batch < micro_batches)
    passes = np.where(valid, np.where(forward, work.forward, work.backward), 0.0)[1:]
    taken = (valid & forward)[1:, 1:]  # activations wait for the later one of the two stages
    returned = valid[1:, :-1] & ~forward[1:, :-1] & work.returns  # a gradient waits for the earlier one
    meetings, lasting = taken | returned, taken * work.send + returned * work.send
    clock = np.zeros(stages)
    for meets, lasts, takes in zip(meetings, lasting, passes, strict=True):
        together = np.maximum(clock[:-1], clock[1:]) + lasts
        clock[:-1] = np.where(meets, together, clock[:-1])
        clock[1:] = np.where(meets, together, clock[1:])
        clock += takes
    return clock, passes.sum(axis=0)


FREE = LinkCosts()


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one step, in seconds: the sum of the first six fields.

    compute_seconds: the passes of the busiest rank, and loading its samples.
    waiting_seconds: the additional time until all stages have finished their passes: messages between stages, and the
        pipeline bubble.
    reduce_seconds: reducing the gradients.
    optimizer_seconds: the optimizer's step.
    gather_seconds: gathering the weights.
    beside_seconds: the rest of a pipeline's step (see `Profile`).
    busy: seconds for which the slowest rank of each stage computes, including the optimizer.
    efficiency: the fraction of the step for which a rank computes, as the mean over all ranks.
    """

    compute_seconds: float
    waiting_seconds: float
    reduce_seconds: float
    optimizer_seconds: float
    gather_seconds: float
    beside_seconds: float
    busy: tuple[float, ...]
    efficiency: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self._terms().values())

    @property
    def bottleneck(self) -> int:
        """The stage that computes the longest; the first such stage in a tie."""
        return int(np.argmax(self.busy))

    @property
    def step_ms(self) -> dict[str, float]:
        """The terms in milliseconds, keyed by name, followed by their sum, `total`."""
        return {name: 1e3 * seconds for name, seconds in [*self._terms().items(), ("total", self.seconds)]}

    def _terms(self) -> dict[str, float]:
        names = ("compute", "waiting", "reduce", "optimizer", "gather", "beside")
        return {name: getattr(self, f"{name}_seconds") for name in names}


def step_time(
    profile: Profile, layout: Layout, deal: Deal, speeds: Sequence[float] | None = None, links: LinkCosts = FREE
) -> StepTime:
    """Predict the time of a step in a layout.

    speeds: the speed of each rank; None if every member has speed 1.

    Raises LayoutError if the boundaries do not belong to this layout.
    """
    return _Model(with_experts(profile, layout), layout, deal, pace_of(layout, speeds), links).predict()


def column_seconds(
    profile: Profile, layout: Layout, deal: Deal, speeds: Sequence[float], links: LinkCosts = FREE
) -> tuple[Floats, Floats]:
    """Return, for each data index, when its passes end and how long one more micro-batch takes, in seconds.

    Raises LayoutError if the boundaries do not belong to this layout.
    """
    ends, busy = _Model(with_experts(profile, layout), layout, deal, pace_of(layout, speeds), links)._passes()
    return ends.max(axis=0), busy.max(axis=0) / np.array(deal.counts)


@dataclass(frozen=True, eq=False)
class _Model:
    """One prediction of a step.

    pace: [stages, data], the speed of the slowest rank in each stage at each data index.
    """

    profile: Profile
    layout: Layout
    deal: Deal
    pace: Floats
    links: LinkCosts

    def predict(self) -> StepTime:
        ends, busy = self._passes()
        compute, passed = float(busy.max()), float(ends.max())
        reduced = float((ends.max(axis=1) + self._reductions()).max())
        stepped, gathers = self._optimizer(), self._gathers()
        stepped_last = float(stepped.max())
        after = float((stepped.max(axis=1) + gathers).max())
        beside = self.profile.beside_seconds
        total = reduced + after + beside
        share = float((busy + stepped).mean()) / total if total else 1.0
        terms = (compute, passed - compute, reduced - passed, stepped_last, after - stepped_last, beside)
        return StepTime(*terms, tuple((busy + stepped).max(axis=1).tolist()), share)

    @cached_property
    def cut(self) -> tuple[int, ...]:
        return cut_of(self.profile, self.layout)

    def by_stage(self, values: Floats) -> Floats:
        """Sum values by layer, [layers], into values by stage, [stages]."""
        return np.add.reduceat(values, np.array(self.cut[:-1]))

    def _passes(self) -> tuple[Floats, Floats]:
        """Return two arrays [stages, data], in seconds: when the passes end, and how long each stage is busy.

        Data indices with equal work are simulated only once. In a pipeline all micro-batches have one size. Without
        stages, all data indices have the same number of micro-batches.
        """
        deal, has_stages = self.deal, self.layout.pipe > 1
        counts = np.array(deal.counts if has_stages else [deal.micro_batches] * self.layout.data)
        sizes = np.full(self.layout.data, deal.size) if has_stages else np.array(deal.shares) / deal.micro_batches
        lines = np.concatenate(([counts], [sizes], self.pace, self._inside))
        _, firsts, which = np.unique(lines, axis=1, return_index=True, return_inverse=True)
        played = [simulate(self._work(first, float(sizes[first])), int(counts[first])) for first in firsts.tolist()]
        ends, busy = (np.stack(each, axis=1)[:, which.ravel()] for each in zip(*played, strict=True))
        return ends, busy

    @cached_property
    def _inside(self) -> Bools:
        """Return [stages - 1, data]: whether a stage and the next one are on the same node."""
        if self.links.per_node is None:
            return np.ones((self.layout.pipe - 1, self.layout.data), dtype=np.bool_)
        members = np.array(self.links.members or range(self.layout.world_size))
        nodes = members.reshape(*self.pace.shape, -1)[:, :, 0] // self.links.per_node
        return np.asarray(nodes[:-1] == nodes[1:])

    def _work(self, column: int, size: float) -> StageWork:
        profile, scale, pace = self.profile, size / self.profile.micro_batch_size, self.pace[:, column]
        forward = self.by_stage(profile.forward_with_loading(self.layout.pipe))
        backward = self.by_stage(profile.seconds("backward_seconds"))
        last = np.array(self.cut[1:-1], dtype=np.int64) - 1  # the last layer of each stage except the last stage
        handed = profile.counts("output_bytes")[last] * scale
        sends = [self.links.inside if is_near else self.links.between for is_near in self._inside[:, column]]
        lasts = np.array([link.send(nbytes) for link, nbytes in zip(sends, handed, strict=True)])
        lasts += profile.message_seconds
        returns = np.logical_or.accumulate(profile.trained)[last]
        return StageWork(forward * scale / pace, backward * scale / pace, lasts, returns)

    def _gathered(self, values: Floats) -> Floats:
        """Return [stages]: seconds to gather these bytes, [layers], among the data ranks of each stage in a ring."""
        size, found = self.layout.ranks_per_stage, []
        for stage, nbytes in enumerate(self.by_stage(values)):
            link = self.links.of(range(stage * size, (stage + 1) * size))
            found.append(link.gather(float(nbytes), group_size(self.layout)))
        return np.array(found)

    def _reductions(self) -> Floats:
        """Return [stages]: seconds to reduce gradients in a step.

        Gradients are reduced once in ZeRO stages 0 and 1, and for every micro-batch in stages 2 and 3. In stages 1 and
        2, DeepSpeed reduces whole buckets, of which each rank keeps its part.
        """
        weights = self.profile.kind_bytes(WEIGHT)
        one_way = self._gathered(np.where(self.profile.trained, weights, 0).astype(np.float64))
        ways = 1 if self.layout.zero_stage == 3 else 2  # a reduction is a reduce-scatter followed by an all-gather
        return one_way * ways * (self.deal.micro_batches if self.layout.zero_stage > 1 else 1)

    def _gathers(self) -> Floats:
        """Return [stages]: seconds to gather weights in a step.

        Weights are gathered after the step in ZeRO stages 1 and 2, and in each pass of a micro-batch in stage 3.
        """
        weights = self.profile.kind_bytes(WEIGHT).astype(np.float64)
        if self.layout.zero_stage == 0:
            return np.zeros(self.layout.pipe)
        if self.layout.zero_stage < 3:
            return self._gathered(np.where(self.profile.trained, weights, 0))
        passed_back = np.where(self.profile.seconds("backward_seconds") > 0, weights, 0)
        return self.deal.micro_batches * (self._gathered(weights) + self._gathered(passed_back))

    def _optimizer(self) -> Floats:
        """Return [stages, data]: seconds of the optimizer's step for the trained elements that a rank updates."""
        seconds = self.by_stage(np.where(self.profile.trained, self.profile.seconds("optimizer_seconds"), 0.0))
        share = group_size(self.layout) if self.layout.zero_stage else 1
        return np.asarray(seconds[:, None] / share / self.pace)


def pace_of(layout: Layout, speeds: Sequence[float] | None) -> Floats:
    """Return [stages, data]: the speed of the slowest rank in each stage at each data index.

    speeds: the speed of each rank; None if every rank has speed 1.
    """
    if speeds is None:
        return np.ones((layout.pipe, layout.data))
    given = np.array(speeds, dtype=np.float64)
    if len(given) != layout.world_size:
        raise LayoutError(f"{layout} has {layout.world_size} ranks, and speeds are known of {len(given)}")
    return np.asarray(given.reshape(layout.pipe, layout.data, -1).min(axis=2))
