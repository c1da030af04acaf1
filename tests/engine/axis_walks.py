"""A walk over layouts of several axes in living ranks, each place on it held against a run that was *started* there.

As `walks`, for any model: a `Subject` says how it is built, what a step on it is, and where its local parameters lie in
the logical ones, found by other means than those under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_dynatrain.space import Layout
from tests.engine import jobs, oracle
from tests.engine.pipelines import buffer_bytes_taken
from tests.engine.pool import RankPool
from tests.engine.walks import continued
from tools.minimum import bytes_minimum

STEPS, LONG_STEPS = 2, 4
"""After each arrival; the long walks of the full set make more of them."""
WARM_STEPS = 3
BATCH = 12
"""Samples of a global batch, in one micro-batch a rank: 1, 2, 3 and 4 data ranks have equal shares."""
Losses = dict[int, list[float]]
Arithmetic = tuple[bool, int]
"""What rounding depends on."""


def one_step(engine: Any, batch: Any) -> float:
    """Forward, backward and step on a batch that a model takes as it is; the loss on this rank."""
    loss = engine(*batch) if isinstance(batch, list | tuple) else engine(batch)
    loss = getattr(loss, "loss", loss)
    engine.backward(loss)
    engine.step()
    return float(loss.item())


@dataclass(frozen=True)
class Answer:
    """What a model says to a probe: its output, and which experts tokens went to, layer by layer; both as digests."""

    output: str
    experts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """A model to walk with.

    build: the same weights on every rank. data: the samples of a position, without an end. places: see `oracle.Places`.
    settings: merged over the usual configuration, key by key at the top. step: one optimizer step on what the loader
    deals. at: the reference layout. probe: asks the model something that no layout may change the answer to.
    """

    build: Callable[[], nn.Module]
    data: Callable[[int], torch.utils.data.Dataset[Any]]
    places: oracle.Places | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    step: Callable[[Any, Any], float] = one_step
    at: Layout = field(default_factory=lambda: Layout(data=2, zero_stage=1))
    groups: Callable[[nn.Module], Any] | None = None
    probe: Callable[[Any], Answer] | None = None


def compare(
    pool: RankPool,
    find: Callable[[], Subject],
    path: Sequence[Layout],
    dtype: str = "fp32",
    furthest: float = 1e-6,
    seconds: float = 240,
    steps: int = STEPS,
) -> int:
    """Walk, and compare: states bit by bit, bytes with the minimum, the next losses with those of static runs.

    find: a module-level function that gives the subject, called on every rank. furthest: the largest relative distance
    of a loss. steps: after each arrival. Returns how many continuations are bitwise those of static runs.
    """
    same: dict[str, Any] = {"find": find, "dtype": dtype}
    state, position, answer = pool.once(reference_case, seconds=seconds, **same)[0]
    reference = {"state": state, "position": position}
    same |= {"steps": steps}
    static = {
        layout: continued(pool.once(static_case, layout=layout, seconds=seconds, following=reference, **same))
        for layout in dict.fromkeys(path[1:])
    }
    same |= reference
    switched = jobs.means_by_place(pool.run(walk_case, path=list(path), answer=answer, seconds=seconds, **same))
    assert list(switched) == list(range(1, len(path)))
    bitwise = 0
    for place, (source, target) in enumerate(pairwise(path), start=1):
        expected = static[target]
        assert jobs.furthest(switched[place], expected) <= furthest, f"{source} -> {target}"
        bitwise += switched[place] == expected
    return bitwise


# ---- cases: they run on every rank ----------------------------------------------------------------------------------


def configured(subject: Subject, dtype: str, layout: Layout, **block: Any) -> dict[str, Any]:
    """The configuration that starts in a layout; block: more for ours."""
    given = {"train_micro_batch_size_per_gpu": BATCH, "train_batch_size": BATCH, **subject.settings}
    made = jobs.config(dtype, (layout.data, layout.zero_stage), **given)
    start = {name: size for name, size in layout.to_dict().items() if size is not None}
    return {**made, "dynatrain": {**made["dynatrain"], "layout": start, **block}}


def started(subject: Subject, dtype: str, layout: Layout, **block: Any) -> Any:
    """A job in a layout; see `jobs.job` and `configured`."""
    model = subject.build()
    arguments = {} if subject.groups is None else {"model_parameters": subject.groups(model)}
    count = BATCH * (WARM_STEPS + LONG_STEPS + 2)
    return jobs.job(configured(subject, dtype, layout, **block), model, subject.data(count), groups=False, **arguments)


def reference_case(
    find: Callable[[], Subject], dtype: str
) -> tuple[oracle.State, dict[str, Any], Answer | None] | None:
    """A state after some steps, the loader's position there, and what the model says to the probe."""
    subject = find()
    with started(subject, dtype, subject.at) as made:
        batches = iter(made.loader)
        for _ in range(WARM_STEPS):
            subject.step(made.engine, next(batches))
        answer = subject.probe(made.engine) if subject.probe else None
        return oracle.gather(made.engine, subject.places), made.loader.state_dict(), answer
    return None


def static_case(
    find: Callable[[], Subject],
    dtype: str,
    layout: Layout,
    state: oracle.State,
    position: dict[str, Any],
    steps: int = STEPS,
) -> list[float]:
    """Losses of the next steps from the reference state, in an engine that starts in a layout; none if idle there."""
    subject = find()
    with started(subject, dtype, layout) as made:
        batches = iter(made.loader)
        subject.step(made.engine, next(batches))  # moments exist after it
        set_back(made, subject, state, position)
        return some_steps(made, subject, batches, next(batches), steps)
    return []


def walk_case(
    find: Callable[[], Subject],
    dtype: str,
    path: list[Layout],
    state: oracle.State,
    position: dict[str, Any],
    answer: Answer | None,
    steps: int,
) -> Losses:
    """Walk the path; per place on it the losses of the steps after arriving. Everything else is checked here."""
    subject, found = find(), dict[int, list[float]]()
    answers = {_arithmetic(subject.at, dtype): answer} if answer else {}
    with started(subject, dtype, path[0]) as made:
        engine, batches = made.engine, iter(made.loader)
        batch = next(batches)  # a member that starts idle wakes in here
        if engine.generation == 1:
            subject.step(engine, batch)
        held: frozenset[str] | None = None  # buffers before the last switch; None if this member was idle
        least = 0
        while True:
            number = engine.generation - 1
            if number:
                assert engine.layout == path[number]
                by_layers = isinstance(engine.module, PipelineModule)
                taken = buffer_bytes_taken(engine, held or ()) if by_layers else 0
                if held is not None:
                    _check_event(engine, path[number - 1], path[number], least + taken)
                assert oracle.differences(state, oracle.gather(engine, subject.places), counters=False) == []
                _check_answer(subject, engine, dtype, answers)
                found[number] = some_steps(made, subject, batches, batch, steps)
            if number + 1 == len(path):
                return found
            set_back(made, subject, state, position)
            assert oracle.differences(state, oracle.gather(engine, subject.places), counters=False) == []
            _check_answer(subject, engine, dtype, answers)
            least = _least_bytes(engine, path[number + 1], state)
            held = frozenset(name for name, _ in engine.module.named_buffers())
            engine.switch(path[number + 1], at=engine.global_steps)
            batch = next(batches)
            if engine.generation != number + 2:  # it was idle for a while
                held = None
    return found


def set_back(made: jobs.Job, subject: Subject, state: oracle.State, position: dict[str, Any]) -> None:
    """Put reference state and position into a working member."""
    oracle.put(made.engine, state, subject.places)
    made.loader.load_state_dict(position)


def some_steps(made: jobs.Job, subject: Subject, batches: Iterator[Any], batch: Any, steps: int) -> list[float]:
    """The local loss of each of the next steps, the first on a batch that is there already."""
    losses = []
    for number in range(steps):
        batch = next(batches) if number else batch
        losses.append(subject.step(made.engine, batch))
    return losses


def _check_answer(subject: Subject, engine: Any, dtype: str, answers: dict[Arithmetic, Answer]) -> None:
    """The reference state gives the same answer everywhere; in 16 bits products of other shapes are rounded otherwise.

    Tensor ranks add parts up: their outputs are others, and in 32 bits tokens go to the same experts all the same.
    answers: those that were given before, by `_arithmetic`; this one is added.
    """
    if subject.probe is None:
        return
    answer = subject.probe(engine)
    expected = answers.setdefault(_arithmetic(engine.layout, dtype), answer)
    for other in answers.values() if dtype == "fp32" else (expected,):
        assert answer.experts == other.experts, f"{engine.layout}: tokens go to other experts"
    assert answer.output == expected.output or dtype != "fp32", f"{engine.layout}: another output"


def _arithmetic(layout: Layout, dtype: str) -> Arithmetic:
    """Stage 3 has a `linear` of its own, which in 16 bits may send tokens elsewhere."""
    return dtype != "fp32" and layout.zero_stage == 3, layout.tensor


def _least_bytes(engine: Any, target: Layout, state: oracle.State) -> int:
    kinds = sorted({kind for _, kind in state.tensors if engine._parts.vps.is_held(engine.layout, kind)})
    if engine.layout.zero_stage == target.zero_stage == 3:
        kinds.append("stale_grad")
    return bytes_minimum(engine._parts.vps, target, engine.plan(target).members, kinds)


def _check_event(engine: Any, source: Layout, target: Layout, least: int) -> None:
    event = engine.last_switch
    assert event.outcome == "committed", event.reason
    assert [Layout.from_dict(side.layout) for side in (event.source, event.target)] == [source, target]
    assert event.warnings == ()
    assert event.certificate is not None
    assert event.bytes_sent == event.bytes_minimum == least
