"""DeepSpeed's pipeline schedule as arithmetic, and what it takes: a simulation, event by event.

Read off DeepSpeed 0.19.8: `runtime/pipe/schedule.py` `TrainSchedule` (one forward, one backward) and
`runtime/pipe/engine.py` `_exec_schedule`. Stage s of P passes micro-batch m forward at step 2 m + s and backward at
step 2 m + 2 P - s - 1, so at each step a stage is either forward or backward. What it has computed it sends at the
step after: to the next stage, after it has taken a gradient from there, or to the one before, before it takes
activations from there.

A send waits until it is taken, as it does in gloo and, for messages beyond its buffers, in NCCL: both stages go on at
the same moment. So a stage that is late holds up its neighbours, also where they only hand something over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_dynatrain.balance.profile import Floats
from ds_dynatrain.errors import LayoutError


def step_count(stages: int, micro_batches: int) -> int:
    """Steps of a schedule: each micro-batch comes by twice, and the last stage is as far behind the first twice."""
    return 2 * (micro_batches + stages - 1)


def in_flight(stages: int, micro_batches: int, stage: int) -> int:
    """The most micro-batches that a stage has passed forward and not yet backward: their activations are held."""
    return min(stages - stage, micro_batches)


@dataclass(frozen=True, eq=False)
class StageWork:
    """What the stages of one pipeline do for one micro-batch; LayoutError for shapes that do not agree.

    forward, backward: [stages], seconds of a pass. send, send_back: [stages - 1], seconds of the activations from stage
    s to s + 1, and of the gradient from there. returns: [stages - 1], whether there is such a gradient; where all
    before is frozen nobody waits for one.
    """

    forward: Floats
    backward: Floats
    send: Floats
    send_back: Floats
    returns: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        """Check the shapes."""
        stages = len(self.forward)
        lengths = [len(each) for each in (self.backward, self.send, self.send_back, self.returns)]
        if not stages or lengths != [stages, *[stages - 1] * 3]:
            raise LayoutError(
                f"{stages} stages with backward, send, send_back, returns of the lengths {lengths}; give "
                f"{[stages, *[stages - 1] * 3]}"
            )


@dataclass(frozen=True, eq=False)
class Simulated:
    """How one batch goes through a pipeline, by simulation: all passes, without what follows them.

    ends: [stages], seconds after which a stage has made its last pass and handed on what came of it. busy: [stages],
    seconds that it computes.
    """

    ends: Floats
    busy: Floats


def simulate(work: StageWork, micro_batches: int) -> Simulated:
    """Play the schedule through; LayoutError without a micro-batch.

    At a step a stage meets one neighbour alone: the one before if it is forward, else the next. Both have the same
    two messages for each other in the same order, so a step is one meeting and one pass.
    """
    if micro_batches < 1:
        raise LayoutError(f"{micro_batches} micro-batches: a batch has at least one; give 1 or more")
    stages, total = len(work.forward), step_count(len(work.forward), micro_batches)
    step, stage = np.arange(-1, total)[:, None], np.arange(stages)[None, :]
    forward = (step - stage) % 2 == 0
    micro_batch = np.where(forward, step - stage, step - 2 * stages + stage + 1) // 2
    valid = (micro_batch >= 0) & (micro_batch < micro_batches)
    passes = np.where(valid, np.where(forward, work.forward, work.backward), 0.0)[1:]
    taken = (valid & forward)[1:, 1:]  # activations come to the later one of two stages
    returned = valid[1:, :-1] & ~forward[1:, :-1] & work.returns  # a gradient comes to the earlier one
    meetings, lasting = taken | returned, taken * work.send + returned * work.send_back
    clock = np.zeros(stages)
    for meets, lasts, takes in zip(meetings, lasting, passes, strict=True):
        together = np.maximum(clock[:-1], clock[1:]) + lasts
        clock[:-1] = np.where(meets, together, clock[:-1])
        clock[1:] = np.where(meets, together, clock[1:])
        clock += takes
    return Simulated(clock, passes.sum(axis=0))
