"""A walk over layouts in living ranks, each place on it held against a run that was *started* there.

Before each switch the same reference state is written into the engine and its loader set back, so that what follows a
switch to a layout can be compared with one static run from the same state, whatever layout the switch came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ds_dynatrain.space import Layout
from tests.engine import jobs, oracle
from tests.engine.models import Sequences, small_gpt
from tests.engine.pool import RankPool
from tools.minimum import bytes_minimum

STEPS, LONG_STEPS = 3, 8
"""After each arrival; the long walks of the full set make more of them."""
WARM_STEPS = 3
Losses = dict[int, list[float]]
Sizes = Mapping[str, int]
"""Arguments of `small_gpt`."""


def settings(dtype: str, **more: Any) -> dict[str, Any]:
    """12 samples in one micro-batch a rank: 1, 2, 3 and 4 ranks have equal shares. `more`: as in `jobs.config`.

    Keys of a `zero_optimization` in it are added to the usual ones.
    """
    zero = more.pop("zero_optimization", {})
    made = jobs.config(dtype, **{"train_micro_batch_size_per_gpu": 12, **more})
    return {**made, "zero_optimization": {**made["zero_optimization"], **zero}}


def starting(config: dict[str, Any], sizes: jobs.Sizes) -> dict[str, Any]:
    """A configuration with another layout to start in."""
    layout = {"data": sizes[0], "zero_stage": sizes[1]}
    return {
        **config,
        "zero_optimization": {**config["zero_optimization"], "stage": sizes[1]},
        "dynatrain": {**config["dynatrain"], "layout": layout},
    }


def compare(
    pool: RankPool,
    config: dict[str, Any],
    path: list[jobs.Sizes],
    model: Sizes | None = None,
    seconds: float = 120,
    furthest: float = 1e-6,
    steps: int = STEPS,
) -> int:
    """Walk, and compare: states bit by bit, bytes with the minimum, the next losses with those of static runs.

    furthest: the largest relative distance of a loss. steps: after each arrival. Returns how many continuations are
    bitwise those of static runs.
    """
    same: dict[str, Any] = {"config": config, "model": dict(model or {})}
    state, position = pool.once(reference_case, seconds=seconds, **same)[0]
    reference = {"state": state, "position": position}
    same |= {"steps": steps}
    static = {
        sizes: continued(pool.once(static_case, sizes=sizes, seconds=seconds, following=reference, **same))
        for sizes in dict.fromkeys(path[1:])
    }
    switched = jobs.means_by_place(pool.run(walk_case, path=path, seconds=seconds, **same, **reference))
    assert list(switched) == list(range(1, len(path)))
    bitwise = 0
    for place, (source, target) in enumerate(pairwise(path), start=1):
        expected = static[target]
        assert jobs.furthest(switched[place], expected) <= furthest, f"{source} -> {target}"
        bitwise += switched[place] == expected
    return bitwise


def continued(ranks: Sequence[list[float] | None]) -> list[float]:
    """The mean, step by step, over the ranks that worked in a layout: their shares are equal."""
    return jobs.means_by_place([{0: losses} if losses else None for losses in ranks])[0]


# ---- cases: they run on every rank ----------------------------------------------------------------------------------


def data() -> Sequences:
    return Sequences(12 * (WARM_STEPS + LONG_STEPS + 2))


def reference_case(config: dict[str, Any], model: Sizes) -> tuple[oracle.State, dict[str, Any]] | None:
    """A state after some steps, and the loader's position there."""
    with jobs.job(starting(config, (2, 1)), small_gpt(**model), data()) as made:
        jobs.train(made, WARM_STEPS)
        return oracle.gather(made.engine), made.loader.state_dict()
    return None


def static_case(
    config: dict[str, Any],
    model: Sizes,
    sizes: jobs.Sizes,
    state: oracle.State,
    position: dict[str, Any],
    steps: int,
) -> list[float]:
    """Losses of the next steps from the reference state, in an engine that starts in a layout; none if idle there."""
    with jobs.job(starting(config, sizes), small_gpt(**model), data()) as made:
        iterator = iter(made.loader)
        jobs.one_micro_batch(made.engine, next(iterator), jobs.Record())  # moments exist after it
        set_back(made, state, position)
        return some_steps(made, iterator, next(iterator), steps)
    return []


def walk_case(
    config: dict[str, Any],
    model: Sizes,
    path: list[jobs.Sizes],
    state: oracle.State,
    position: dict[str, Any],
    steps: int,
) -> Losses:
    """Walk the path; per place on it the losses of the steps after arriving. Everything else is checked here."""
    found: Losses = {}
    with jobs.job(starting(config, path[0]), small_gpt(**model), data()) as made:
        engine, iterator = made.engine, iter(made.loader)
        batch = next(iterator)  # a member that starts idle wakes in here
        if engine.generation == 1:
            jobs.one_micro_batch(engine, batch, jobs.Record())
        while True:
            number = engine.generation - 1
            if number:
                _check_arrival(engine, path[number], state, came_from=path[number - 1])
                found[number] = some_steps(made, iterator, batch, steps)
            if number + 1 == len(path):
                return found
            set_back(made, state, position)
            assert oracle.differences(state, oracle.gather(engine), counters=False) == []
            counters = oracle.gather(engine).counters
            least = _least_bytes(engine, path[number + 1], state)
            jobs.ask(engine, path[number + 1])
            batch = next(iterator)
            if engine.generation == number + 2:  # this member went from one place to the next, not idle in between
                _check_event(engine, path[number], path[number + 1], least)
                now = {name: getattr(engine, name) for name in counters}
                assert now == counters
    return found


def set_back(made: jobs.Job, state: oracle.State, position: dict[str, Any]) -> None:
    """Put reference state and position into a working member."""
    oracle.put(made.engine, state)
    made.loader.load_state_dict(position)


def some_steps(made: jobs.Job, iterator: Any, batch: Any, steps: int) -> list[float]:
    """The local loss of each of the next steps, the first on a batch that is there already."""
    record = jobs.Record()
    for number in range(steps):
        batch = next(iterator) if number else batch
        jobs.one_micro_batch(made.engine, batch, record)
    return [loss for parts in record.losses.values() for loss, _ in parts]


def _least_bytes(engine: Any, sizes: jobs.Sizes, state: oracle.State) -> int:
    target = Layout(data=sizes[0], zero_stage=sizes[1])
    kinds = sorted({kind for _, kind in state.tensors if engine._parts.vps.is_held(engine.layout, kind)})
    if engine.layout.zero_stage == 3 and sizes[1] == 3:
        kinds.append("stale_grad")
    planned = engine.plan(target)
    return bytes_minimum(engine._parts.vps, planned.layout, planned.members, kinds)


def _check_arrival(engine: Any, sizes: jobs.Sizes, state: oracle.State, came_from: jobs.Sizes) -> None:
    assert (engine.layout.data, engine.layout.zero_stage) == sizes
    kept = came_from[1] > 0  # stage 0 has no place for the gradients that offload keeps
    assert oracle.differences(state, oracle.gather(engine), counters=False, last_gradients=kept) == []


def _check_event(engine: Any, source: jobs.Sizes, target: jobs.Sizes, least: int) -> None:
    event = engine.last_switch
    assert event.outcome == "committed", event.reason
    assert [(side.layout["data"], side.layout["zero_stage"]) for side in (event.source, event.target)] == [
        source,
        target,
    ]
    assert event.warnings == ()
    assert event.certificate is not None
    assert event.bytes_sent == event.bytes_minimum == least
