"""A search for the layouts with the shortest predicted step that fit the members and their memory.

The search tries every combination of pipeline stages, data ranks and ZeRO stage; other axes keep their sizes. For each
combination `partition` finds the boundaries. Without pipeline stages, slow members get smaller shares of the samples. A
layout may leave members idle if that is faster. A layout is skipped if a lower bound on its step time is already above
the times of the best layouts found.

All results, even the order of ties, depend only on the arguments, so all members get the same answer.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ds_dynatrain.balance.deal import Deal, gathered_bytes, peak_bytes, shares_of, taken_bytes
from ds_dynatrain.balance.partition import PLENTY, Problem, partition
from ds_dynatrain.balance.profile import Floats, Profile
from ds_dynatrain.balance.step_time import FREE, LinkCosts, StepTime, column_seconds, pace_of, step_time
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.layout import STAGES, Layout
from ds_dynatrain.space.zero import group_size

_ROUNDING = 1 - 1e-9
"""Factor slightly below 1 that keeps lower bounds below the exact value despite rounding.

The same numbers summed in a different order differ in their last digits.
"""


@dataclass(frozen=True)
class Members:
    """The members among which layouts are chosen.

    speeds: the speed of each member.
    memory_bytes: bytes that each member has for the state, gradients and activations that `peak_bytes` counts.
    links: the costs of messages between members.
    are_placed: whether ranks follow the order of the members, whatever their speeds; otherwise the fastest come first.
    """

    speeds: tuple[float, ...]
    memory_bytes: int = PLENTY
    links: LinkCosts = FREE
    are_placed: bool = False

    def working(self, count: int) -> tuple[int, ...]:
        """Return the members that work if `count` members work, in the order of their ranks.

        The fastest come first unless `are_placed`. Slow members then share a stage, which gets fewer layers.
        """
        return self._order[:count]

    def at_ranks(self, layout: Layout) -> tuple[list[float], LinkCosts]:
        """Return the speeds at the ranks of a layout, and the links between them."""
        working = self.working(layout.world_size)
        return [self.speeds[member] for member in working], replace(self.links, members=working)

    @cached_property
    def are_alike(self) -> bool:
        """Whether all members are equally fast."""
        return len(set(self.speeds)) == 1

    @cached_property
    def _order(self) -> tuple[int, ...]:
        members = range(len(self.speeds))
        return tuple(members if self.are_placed else sorted(members, key=lambda member: -self.speeds[member]))

    def pace(self, layout: Layout) -> Floats:
        """Return [stages, data]: the speed of the slowest member in each stage at each data index."""
        return pace_of(layout, [self.speeds[member] for member in self.working(layout.world_size)])


@dataclass(frozen=True)
class Search:
    """The range of a search.

    pipes: the numbers of pipeline stages to try; None to try all.
    zero_stages: the ZeRO stages to try; None to try all.
    micro_batches: the number of micro-batches on a data rank; None for micro-batches of the timed size.
    pipeline: whether the model is a PipelineModule; other models have no stages.
    slack: the fraction by which the slowest stage may exceed the optimum so that fewer bytes move.
    horizon_steps: the number of steps over which the cost of a switch is spread; None to ignore that cost.
    count: the number of layouts to return.
    accumulation: a function from a layout to the number of micro-batches that a job makes in it.
    at_most_slower: the fraction by which a step may be slower with fewer members; None to use all members.
    """

    pipes: tuple[int, ...] | None = None
    zero_stages: tuple[int, ...] | None = None
    micro_batches: int | None = None
    pipeline: bool = True
    slack: float = 0.0
    horizon_steps: float | None = None
    count: int = 10
    accumulation: Callable[[Layout], int] | None = None
    at_most_slower: float | None = None

    def deal(self, profile: Profile, layout: Layout) -> Deal | None:
        """Return how a layout divides the samples over data ranks and micro-batches; None if the layout cannot be
        trained.

        A PipelineModule needs ZeRO stage 0 or 1 and, if ranks share experts, the same number of micro-batches on each
        of them. Other models have no stages.
        """
        number = self.micro_batches if self.accumulation is None else self.accumulation(layout)
        try:
            deal = Deal.of(profile, layout, number, self.pipeline)
        except LayoutError:
            return None
        if self.pipeline:
            return deal if layout.zero_stage < 2 and (layout.expert == 1 or len({*deal.shares}) == 1) else None
        return deal if layout.pipe == 1 else None


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits the members and their memory.

    deal: the division of the samples.
    members: the member at each rank; members not listed are idle.
    time: the predicted time of a step.
    stage_bytes: the peak memory of a rank on each stage, in bytes.
    switch_seconds: seconds that the switch to this layout takes.
    seconds: predicted step time in seconds, including the step's share of the switch.
    """

    layout: Layout
    deal: Deal
    members: tuple[int, ...]
    time: StepTime
    stage_bytes: tuple[int, ...]
    switch_seconds: float
    seconds: float

    @classmethod
    def of(
        cls,
        profile: Profile,
        layout: Layout,
        deal: Deal,
        members: Members,
        switch_seconds: float = 0.0,
        horizon_steps: float | None = None,
    ) -> FittingLayout:
        """Return a layout together with the predictions for it."""
        time, taken = step_time(profile, layout, deal, *members.at_ranks(layout)), peak_bytes(profile, layout, deal)
        seconds = time.seconds + (switch_seconds / horizon_steps if horizon_steps else 0.0)
        return cls(layout, deal, members.working(layout.world_size), time, taken, switch_seconds, seconds)

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the rank that needs the most."""
        return max(self.stage_bytes)

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key: faster layouts come first; ties go to fewer members, then to fewer stages, and so on."""
        layout = self.layout
        rest = (layout.world_size, layout.pipe, layout.zero_stage, self.deal.micro_batches, layout.boundaries)
        return (_rounded(self.seconds), *rest)


def choose(
    profile: Profile,
    present: Layout,
    members: Members,
    search: Search | None = None,
    refused: Callable[[Layout], bool] = lambda layout: False,
    switch_seconds: Callable[[Layout], float] = lambda layout: 0.0,
) -> tuple[FittingLayout, ...]:
    """Return the layouts with the shortest predicted steps, best first.

    If `search.at_most_slower` is given, the result begins with one more layout: the one with the fewest members among
    those whose step exceeds the best one by at most that fraction.

    present: the layout before the switch. Its axes other than pipe and data are kept.
    refused: function that returns whether a switch would refuse a layout for reasons that `Search.deal` does not know.
    switch_seconds: function from a layout to the seconds of a switch from `present`; not called for `present` itself.

    Raises LayoutError if nothing fits, with the reason for the largest layout tried.
    """
    search = search or Search()

    def best(count: int) -> tuple[FittingLayout, ...]:
        among = replace(members, speeds=members.speeds[:count])
        return _Choosing(profile, present, among, search, refused, switch_seconds).best()

    found = best(len(members.speeds))
    if search.at_most_slower is None:
        return found
    most, fewest = _rounded((1 + search.at_most_slower) * found[0].seconds), found[0]

    def is_enough(count: int) -> bool:
        nonlocal fewest
        try:
            fitting = best(count)[0]
        except LayoutError:
            return False
        if _rounded(fitting.seconds) > most:
            return False
        fewest = min(fewest, fitting, key=lambda each: each.layout.world_size)
        return True

    # bisection is possible: with more members a step is never slower, because some of them may be idle
    bisect.bisect_left(range(1, fewest.layout.world_size), True, key=is_enough)
    return fewest, *found


def problem_of(profile: Profile, layout: Layout, deal: Deal, members: Members) -> Problem:
    """Return the problem that `partition` solves for a layout: the seconds and bytes of each layer on each stage."""
    passes = profile.forward_with_loading(layout.pipe) + profile.seconds("backward_seconds")
    stepped = np.where(profile.trained, profile.seconds("optimizer_seconds"), 0.0)
    samples = max(deal.shares) / profile.micro_batch_size
    seconds = samples * passes + stepped / (group_size(layout) if layout.zero_stage else 1)
    return Problem.of(
        seconds,
        layout.pipe,
        speeds=(members.pace(layout) * max(deal.shares) / np.array(deal.shares)).min(axis=1),
        taken=taken_bytes(profile, layout, deal),
        room=members.memory_bytes - gathered_bytes(profile, layout),
        moved=profile.counts("total_bytes"),
        names=profile.names,
    )


@dataclass(frozen=True, eq=False)
class _Choosing:
    """The state of one search. The fields without a description are the arguments of `choose`.

    reasons: a map from number of members to the reason why the first layout tried with that many members does not fit.
    seen: the layouts tried so far.
    """

    profile: Profile
    present: Layout
    members: Members
    search: Search
    refused: Callable[[Layout], bool]
    switch_seconds: Callable[[Layout], float]
    reasons: dict[int, str] = field(default_factory=dict)
    seen: set[Layout] = field(default_factory=set)

    def best(self) -> tuple[FittingLayout, ...]:
        found: list[FittingLayout] = []
        sizes = [(self._least_seconds(*size), size) for size in self._sizes()]
        for least, size in sorted(sizes, key=lambda each: each[0]):
            if len(found) == self.search.count and _rounded(least) > _rounded(found[-1].seconds):
                break
            for layout, deal in self._candidates(*size):
                if len(found) == self.search.count and self._is_too_slow(found[-1].seconds, layout, deal):
                    continue
                found = sorted([*found, *self._fitted(layout, deal)], key=lambda choice: choice.order)
                del found[self.search.count :]
        if not found:
            raise LayoutError(self._why_none())
        return tuple(found)

    def _least_seconds(self, pipe: int, data: int) -> float:
        """Return a lower bound, in seconds, on all passes of a step with this many stages and data ranks.

        It is the larger of two times: all work spread over the fastest members, and the largest layer on the fastest
        member with the mean share of samples.
        """
        passes = self.profile.passes
        batch, fastest = self.profile.train_batch_size / self.profile.micro_batch_size, sorted(self.members.speeds)
        together = passes.sum() / sum(fastest[-pipe * data :])
        return float(batch * max(together, passes.max() / data / fastest[-1])) * _ROUNDING

    def _is_too_slow(self, seconds: float, layout: Layout, deal: Deal) -> bool:
        """Return whether every choice of boundaries makes a step longer than this many seconds.

        With n micro-batches, stage s finishes n l_s + (l_0 + ... + l_(s-1)) after the start at the earliest, where l_s
        are the seconds of stage s. If the stage holds the layers from k up to stop, this is n (S_stop - S_k) + S_k,
        where S are cumulative sums over layers. The test therefore fills the stages in order, each with as many layers
        as it can take.
        """
        if self._can_match_shares(layout):
            return False
        samples = np.array(deal.shares) / self.profile.micro_batch_size
        alone = samples / self.members.pace(layout).max(axis=0)
        slowest = int(alone.argmax())
        number = max(deal.counts[slowest], 1)
        room = seconds / _ROUNDING * number / alone[slowest]  # in seconds of a timed micro-batch, for all micro-batches
        done = 0.0
        for _ in range(layout.pipe):
            reach = bisect.bisect_right(self._sums, done + (room - done) / number * (1 + 1e-12))
            done = self._sums[max(reach - 1, 0)]
        return done < self._sums[-1]

    @cached_property
    def _sums(self) -> list[float]:
        """Cumulative seconds of the first 0, 1, ... layers, without backward passes that no earlier layer needs."""
        waits = np.logical_or.accumulate(self.profile.trained)
        backward = np.where(waits, self.profile.seconds("backward_seconds"), 0.0)
        return [0.0, *np.cumsum(self.profile.seconds("forward_seconds") + backward).tolist()]

    def _can_match_shares(self, layout: Layout) -> bool:
        return layout.pipe > 1 and layout.data > 1 and not self.members.are_alike

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Yield the pairs (number of pipeline stages, number of data ranks) to try."""
        per_data = self.present.sequence * self.present.tensor
        most = min(len(self.members.speeds) // per_data, self.profile.train_batch_size * len(self.profile.layers))
        for pipe in self.search.pipes or range(1, min(most, len(self.profile.layers)) + 1):
            for data in range(1, min(most // pipe, self.profile.train_batch_size) + 1):
                if (data * per_data) % self.present.expert == 0:
                    yield pipe, data

    def _candidates(self, pipe: int, data: int) -> Iterator[tuple[Layout, Deal]]:
        """Yield the layouts that can be trained, without boundaries, each with its division of the samples."""
        for zero_stage in self.search.zero_stages or STAGES:
            layout = self.present.replace(pipe=pipe, data=data, zero_stage=zero_stage, boundaries=None)
            even = layout.replace(shares=None)
            shared = {each: self.search.deal(self.profile, each) for each in dict.fromkeys((even, layout))}
            if data > 1 and not self.members.are_alike and (deal := shared[even]) is not None:
                if (fair := self._fair(layout, deal)) != deal.shares:  # these shares suit the members' speeds
                    layout = layout.replace(shares=fair)
                    shared.setdefault(layout, self.search.deal(self.profile, layout))
            yield from ((each, deal) for each, deal in shared.items() if deal is not None)

    def _fair(self, layout: Layout, deal: Deal) -> tuple[int, ...]:
        """Return the samples of each data index such that all finish at about the same time, if their stages have equal
        loads.

        After its first micro-batch, a pipeline is as fast as its slowest stage.
        """
        pace = self.members.pace(layout)
        slowest = pace.min(axis=0)
        if not self.search.pipeline:
            return shares_of(slowest.tolist(), self.profile.train_batch_size)
        fill = (1 / pace).sum(axis=0) - 1 / slowest
        counts = shares_of(slowest.tolist(), sum(deal.counts), fill.tolist())
        return _samples(deal, counts)

    def _fitted(self, layout: Layout, deal: Deal) -> Iterator[FittingLayout]:
        """Yield the layouts that fit, with the best boundaries.

        The current layout is also yielded with its current boundaries if these still fit. They may no longer fit,
        because they were chosen for other costs.
        """
        found = {layout.replace(boundaries=cut): deal for cut in self._boundaries(layout, deal)}
        for each in [*found]:
            found |= self._with_matched_shares(each, deal)
        if self.present.replace(boundaries=None) == layout and (layout.pipe == 1 or self.present.boundaries):
            found[self.present] = deal
        for each, its in found.items():
            if each in self.seen:
                continue
            self.seen.add(each)
            switch = 0.0 if each == self.present else self.switch_seconds(each)
            choice = FittingLayout.of(self.profile, each, its, self.members, switch, self.search.horizon_steps)
            if choice.peak_bytes > self.members.memory_bytes:
                continue
            if self.refused(each):
                self.reasons.setdefault(layout.world_size, f"{each} would be refused")
                continue
            yield choice

    def _with_matched_shares(self, layout: Layout, deal: Deal) -> dict[Layout, Deal]:
        """Return variants of a layout whose shares of samples suit its boundaries: with these boundaries, and with new
        ones.

        Returns {} if the shares would not change, or if there is only one stage, only one data rank or only one speed.
        """
        if not self._can_match_shares(layout):
            return {}
        ends, each = column_seconds(self.profile, layout, deal, *self.members.at_ranks(layout))
        begins = ends - each * np.array(deal.counts)
        counts = shares_of((1 / each).tolist(), sum(deal.counts), begins.tolist())
        shared = layout.replace(shares=_samples(deal, counts))
        its = self.search.deal(self.profile, shared)
        if counts == deal.counts or its is None:
            return {}
        return {shared.replace(boundaries=cut): its for cut in (layout.boundaries, *self._boundaries(shared, its))}

    def _boundaries(self, layout: Layout, deal: Deal) -> tuple[tuple[int, ...] | None, ...]:
        """Return a tuple with the best boundaries as its only element, or () if no boundaries fit.

        A layout with one stage keeps its current boundaries.
        """
        try:
            problem = problem_of(self.profile, layout, deal, self.members)
            cut = partition(problem, self.present.boundaries, self.search.slack).boundaries
        except LayoutError as error:
            self.reasons.setdefault(layout.world_size, f"{layout}: {error}")
            return ()
        return (cut if layout.pipe > 1 else self.present.boundaries if self.present.pipe == 1 else None,)

    def _why_none(self) -> str:
        count, present, number = len(self.members.speeds), self.present, self.search.micro_batches
        if not self.reasons:
            parts = "" if number is None else f" in {number} micro-batches of each data index"
            return (
                f"no layout for {count} members deals out {self.profile.train_batch_size} samples{parts}: a stage has "
                f"sequence {present.sequence} x tensor {present.tensor} ranks for each data index, and micro-batches "
                "in a pipeline have one size"
            )
        most = max(self.reasons)
        return f"no layout fits {count} members; of the largest that was tried: {self.reasons[most]}"


def _samples(deal: Deal, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the samples of each data index, given its number of micro-batches."""
    size = max(deal.shares) // deal.micro_batches
    return tuple(size * count for count in counts)


def _rounded(seconds: float) -> float:
    """Round seconds to 12 digits, so that values that differ only in the order of additions are equal."""
    return float(f"{seconds:.12g}")
