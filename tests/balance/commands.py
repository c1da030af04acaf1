"""The commands of DeepSpeed's `TrainSchedule` as arithmetic, to walk through one by one beside the simulation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ds_dynatrain.balance.deal import in_flight


class Command(NamedTuple):
    """One instruction by the name of DeepSpeed's class; micro_batch and buffer are None of those at the end."""

    name: str
    micro_batch: int | None = None
    buffer: int | None = None


def commands(stages: int, micro_batches: int, stage: int) -> Iterator[list[Command]]:
    """What a stage does, step by step, as `TrainSchedule.steps` says it."""
    first, last, buffers = stage == 0, stage == stages - 1, buffer_count(stages, micro_batches, stage)
    total = 2 * (micro_batches + stages - 1)
    for step in range(total):
        (micro_batch, forward), (before, _) = _at(step, stage, stages), _at(step - 1, stage, stages)
        now, was = 0 <= micro_batch < micro_batches, 0 <= before < micro_batches
        present, past = (micro_batch, micro_batch % buffers), (before, before % buffers)
        found = [
            (forward and was and not first, "SendGrad", past),
            (forward and now and not first, "RecvActivation", present),
            (not forward and now and not last, "RecvGrad", present),
            (not forward and was and not last, "SendActivation", past),
            (forward and now and (first or last), "LoadMicroBatch", present),
            (now, "ForwardPass" if forward else "BackwardPass", present),
        ]
        done = [Command(name, *about) for holds, name, about in found if holds]
        ends = ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep") if step == total - 1 else ()
        yield [*done, *map(Command, ends)]


def buffer_count(stages: int, micro_batches: int, stage: int) -> int:
    """Pipeline buffers that DeepSpeed reserves: two at least."""
    return max(2, in_flight(stages, micro_batches, stage))


def _at(step: int, stage: int, stages: int) -> tuple[int, bool]:
    """(micro-batch, whether it goes forward) at a step; one that there is not where the stage has nothing to do."""
    if (step - stage) % 2 == 0:
        return (step - stage) // 2, True
    return (step - 2 * stages + stage + 1) // 2, False
