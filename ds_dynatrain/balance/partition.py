"""The partition of layers into stages: minimize the time of the slowest stage, then the bytes that move.

A stage holds one or more consecutive layers. Stages may differ in speed and memory, so bisection of the bottleneck with
a greedy probe (as in DeepSpeed's former `partition_balanced`, and in DynMo) is not optimal: a stage that takes as many
layers as it can may leave the next stage a layer that does not fit on it. Dynamic programming over (stage, number of
layers so far) is optimal in both cases.

All results, even the order of ties, depend only on the arguments, so all members get the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_dynatrain.balance.profile import Floats, Ints
from ds_dynatrain.errors import LayoutError

PLENTY = 2**62
"""Number of bytes that no stage exceeds. Stands for unlimited memory."""


@dataclass(frozen=True, eq=False)
class Problem:
    """The layers to be divided, and the stages that are to hold them.

    names: the name of each layer.
    seconds: [stages, layers], the seconds of each layer on each stage, not negative.
    taken: [stages, layers], the bytes that each layer takes on each stage.
    room: [stages], the bytes that each stage can hold.
    moved: [layers], the bytes that are sent if a layer moves to another stage.
    """

    names: tuple[str, ...]
    seconds: Floats
    taken: Ints
    room: Ints
    moved: Ints

    def __post_init__(self) -> None:
        """Raise LayoutError if there are more stages than layers, or if `names` has a different number of layers."""
        stages, layers = self.seconds.shape
        if layers != len(self.names) or stages < 1 or layers < stages:
            raise LayoutError(
                f"{len(self.names)} layers cannot be cut into {stages} stages with a layer each; give at most "
                f"{len(self.names)}"
            )

    @classmethod
    def of(
        cls,
        seconds: npt.ArrayLike,
        stages: int,
        *,
        speeds: npt.ArrayLike = 1.0,
        taken: npt.ArrayLike = 0,
        room: npt.ArrayLike = PLENTY,
        moved: npt.ArrayLike = 1,
        names: Sequence[str] = (),
    ) -> Problem:
        """Return the problem for values that are broadcast to its arrays: speeds and room by stage, all others by
        layer.

        speeds: the speed of each stage, by which the seconds of a layer are divided.
        room: the bytes that each stage can hold.
        """
        layers = len(np.asarray(seconds))
        pace = np.broadcast_to(np.asarray(speeds, dtype=np.float64), stages)
        return cls(
            tuple(names) or tuple(f"layer {place}" for place in range(layers)),
            np.asarray(seconds, dtype=np.float64) / pace[:, None],
            np.broadcast_to(np.asarray(taken, dtype=np.int64), (stages, layers)),
            np.broadcast_to(np.asarray(room, dtype=np.int64), stages),
            np.broadcast_to(np.asarray(moved, dtype=np.int64), layers),
        )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.room)

    @property
    def layers(self) -> int:
        """The number of layers to divide."""
        return len(self.names)


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """Return boundaries of stages with equal numbers of layers, like DeepSpeed's "uniform".

    If the layers do not divide evenly, the first stages get one more.
    """
    small, larger = divmod(layers, stages)
    return tuple(stage * small + min(stage, larger) for stage in range(stages + 1))


@dataclass(frozen=True)
class Cut:
    """The best boundaries of pipeline stages, as found by `partition`.

    boundaries: the boundaries, as in a `Layout`.
    optimum: the smallest possible seconds of the slowest stage.
    """

    boundaries: tuple[int, ...]
    optimum: float


def partition(problem: Problem, present: Sequence[int] | None = None, slack: float = 0.0) -> Cut:
    """Return boundaries of stages such that the slowest stage takes at most (1 + slack) x the least possible time.

    Among these, the boundaries that move the fewest bytes are chosen. A tie goes to the smallest sum of squared
    seconds, so that stages are even, then to the boundaries whose last stage begins earliest, and so on forward.

    present: the current boundaries, with any number of stages; None if there are none, so that all layers move.

    Raises LayoutError, naming the layer, the stage and the bytes, if the layers do not fit into the stages.
    """
    optimum = _optimum(problem)
    return Cut(_cheapest(problem, optimum * (1 + slack), present), optimum)


def _optimum(problem: Problem) -> float:
    """Return the smallest possible seconds of the slowest stage.

    Let D[p][l] be the result for the first p stages and l layers. Then D[p][l] = min over k of max(D[p - 1][k], the
    seconds of stage p with the layers from k to l).
    """
    least = np.zeros(1)
    for stage in range(problem.stages):
        seconds = _stage_seconds(problem, stage)
        reached = np.maximum(least[:, None], seconds).min(axis=0)
        if not np.isfinite(reached).any():
            raise _infeasible(problem, stage, least)
        least = reached
    if not np.isfinite(least[-1]):
        raise _infeasible(problem, problem.stages, least)
    return float(least[-1])


def _cheapest(problem: Problem, limit: float, present: Sequence[int] | None) -> tuple[int, ...]:
    """Return the boundaries that move the fewest bytes, among those with no stage above `limit` seconds.

    A tie goes to the smallest sum of squared seconds. The dynamic program is that of `_optimum`, with pairs (bytes
    moved, squared seconds) instead of seconds.
    """
    stays = np.full(problem.layers, -1) if present is None else np.repeat(np.arange(len(present) - 1), np.diff(present))
    bytes_to, squares_to = np.zeros(1, dtype=np.int64), np.zeros(1)
    chosen = []
    for stage in range(problem.stages):
        seconds = _stage_seconds(problem, stage)
        came = _sums(problem.moved * (stays != stage))
        stops = came[stage + 1 : stage + 1 + seconds.shape[1]]
        total = bytes_to[:, None] + (stops[None, :] - came[stage : stage + len(seconds), None])
        total = np.where(seconds <= limit, np.minimum(total, PLENTY), PLENTY)
        least = total.min(axis=0)
        squares = np.where((total == least) & (total < PLENTY), squares_to[:, None] + seconds**2, np.inf)
        start = squares.argmin(axis=0)
        chosen.append(start + stage)
        bytes_to, squares_to = least, squares[start, np.arange(len(start))]
    stop, boundaries = problem.layers, [problem.layers]
    for stage in reversed(range(problem.stages)):
        stop = int(chosen[stage][stop - stage - 1])
        boundaries.append(stop)
    return tuple(reversed(boundaries))


def _stage_seconds(problem: Problem, stage: int) -> Floats:
    """Return the seconds of a stage for each pair of a first layer k and an end l (the first layer after the stage).

    They are infinite if the layers do not fit. Every stage holds at least one layer, so row 0 is k = stage, and column
    0 is l = stage + 1. The first stage has only the row k = 0.
    """
    rows = problem.layers - problem.stages + 1 if stage else 1
    starts = np.arange(stage, stage + rows)
    stops = np.arange(stage + 1, stage + 2 + problem.layers - problem.stages)
    sums, taken = _sums(problem.seconds[stage]), _sums(problem.taken[stage])
    found: Floats = sums[stops][None, :] - sums[starts][:, None]
    fits = (taken[stops][None, :] - taken[starts][:, None]) <= problem.room[stage]
    fits &= stops[None, :] > starts[:, None]
    found[~fits] = np.inf
    return found


def _sums(values: Floats | Ints) -> Any:
    """Return the sums of the first 0, 1, ... values."""
    return np.concatenate((np.zeros(1, values.dtype), np.cumsum(values)))


def _infeasible(problem: Problem, stage: int, least: Floats) -> LayoutError:
    """Return the error that says why no boundaries fit: stages before `stage` can be filled, but this one cannot.

    If `stage` is the number of stages, all of them can be filled, but layers are left over.

    least: the smallest bottleneck found for each number of layers on the earlier stages.
    """
    small = problem.taken.min(axis=0)
    worst = int((small - problem.room.max()).argmax())
    if not (problem.taken[:, worst] <= problem.room).any():
        return LayoutError(
            f"{problem.names[worst]!r} (layer {worst}) takes {small[worst]} bytes at the least, and no stage has more "
            f"than {problem.room.max()}: give more memory, more data ranks or a smaller micro-batch"
        )
    layer = min(int(np.flatnonzero(np.isfinite(least))[-1]) + stage, problem.layers - 1)
    name, last = f"{problem.names[layer]!r} (layer {layer})", min(stage, problem.stages - 1)
    where = f"all stages together end before {name} at the latest"
    if stage < problem.stages:
        where = (
            f"stages before {stage} end before {name} at the latest, and of what they may leave stage {stage} can hold "
            "nothing"
        )
    return LayoutError(
        f"no boundaries fit: {where}; that layer takes {problem.taken[last, layer]} bytes there, all layers "
        f"{small.sum()}, and the stages have {problem.room.tolist()}: give more memory, stages or data ranks, or a "
        "smaller micro-batch"
    )
