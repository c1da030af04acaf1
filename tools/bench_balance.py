"""Measure balance: the solver's time, the gain on simulated pipelines of 24 and 48 blocks, and the predictions' errors.

python tools/bench_balance.py
python tools/bench_balance.py --ranks 8 --timed 40 --write docs/figures
python tools/bench_balance.py --picture docs/balance.svg

With --ranks, a pipeline of sleeping layers is trained in many layouts, and measured steps are compared with predicted
ones (two minutes). With --timed, a pipeline of two stages, whose layers use 1 ms of processor time or more, is timed in
this many rounds, to find out what windows cost, and whether their sums and predictions are right. 40 rounds take three
minutes, and need two idle cores. No step of the simulated pipelines is trained. There, a dense block takes as long as a
block of width 256 on a CPU core with 2 x 256 tokens (11.7 ms forward, 26.4 ms backward), each kind of change modifies
this by a formula below, there are 4 micro-batches per stage, and messages take no time. With --picture, only a chart of
the stages' times before and after balance is drawn.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from deepspeed.runtime.utils import partition_balanced
from diffusion import diffuse
from figures import keep, machine, table
from launch import launch
from stage_bars import Panel, draw

from ds_dynatrain.balance.choose import Members, Search, choose
from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.partition import Problem, partition, uniform
from ds_dynatrain.balance.profile import Floats, LayerCost, Profile
from ds_dynatrain.balance.step_time import step_time
from ds_dynatrain.space import Layout

FORWARD, BACKWARD, PARAMETERS = 0.0117, 0.0264, 12 * 256**2
SOLVED = ((32, 4, None), (128, 16, 0.050), (512, 64, 2.0))
"""The solved problems, as (layers, stages, bar in seconds)."""
PIPELINE = (48, 16)
DRAWN = (
    ("freezing, half", 24, 8),
    ("early exit", 24, 8),
    ("early exit", 48, 16),
    ("pruning to 0.1", 48, 16),
    ("sparse attention", 24, 16),
    ("embedding and head", 24, 4),
)
"""The cases in the chart: those in which balance gains."""
PER_STAGE = 4
"""Number of micro-batches per stage."""
SLEEPERS, BATCH, MICRO_BATCH, STEPS, WITHIN = 12, 64, 4, 5, 0.15
"""Number of sleeping layers, samples of a step and of a micro-batch, steps in a layout, and the largest relative error
of a prediction."""


@dataclass(frozen=True)
class Blocks:
    """The seconds and parameters of each layer of a model."""

    forward: Floats
    backward: Floats
    parameters: Floats

    @classmethod
    def dense(cls, count: int, share: Floats | float = 1.0) -> Blocks:
        """Return `count` blocks that take a fraction of a dense block's seconds.

        share: the fraction, the same for all blocks or for each.
        """
        ones = np.ones(count)
        return cls(FORWARD * share * ones, BACKWARD * share * ones, PARAMETERS * ones)

    def profile(self, micro_batches: int) -> Profile:
        """Return the profile of the layers, with one sample in a micro-batch."""
        rows = enumerate(zip(self.forward.tolist(), self.backward.tolist(), self.parameters.tolist(), strict=True))
        layers = tuple(
            LayerCost(
                name=f"layer.{place}",
                forward_seconds=forward,
                backward_seconds=backward,
                kind_bytes={"weight": 4 * int(parameters)},
                trained=backward > 0,
            )
            for place, (forward, backward, parameters) in rows
        )
        return Profile(layers=layers, train_batch_size=micro_batches, micro_batch_size=1)


def frozen(count: int) -> Blocks:
    """Return blocks of which the first half is frozen and has no backward pass."""
    dense = Blocks.dense(count)
    return Blocks(dense.forward, np.where(np.arange(count) < count // 2, 0.0, dense.backward), dense.parameters)


def early_exit(count: int) -> Blocks:
    """Return blocks at each of which 12 % of the remaining tokens exit."""
    return Blocks.dense(count, 0.88 ** np.arange(count, dtype=np.float64))


def pruned(count: int) -> Blocks:
    """Return pruned blocks: a log-normal fraction of each block's weights stays (sigma 0.6, mean 0.1).

    12 % of a block cannot be pruned.
    """
    kept = np.exp(np.random.default_rng(1).normal(0, 0.6, count))
    return Blocks.dense(count, 0.12 + 0.88 * np.minimum(1, 0.1 * kept / kept.mean()))


def sparse_attention(count: int) -> Blocks:
    """Return blocks with sparse attention: a third of a block, of which a log-normal fraction is computed.

    The fraction has sigma 0.8 and mean 0.3.
    """
    share = np.exp(np.random.default_rng(2).normal(0, 0.8, count))
    return Blocks.dense(count, 2 / 3 + np.minimum(1, 0.3 * share / share.mean()) / 3)


def mixture_of_depths(count: int) -> Blocks:
    """Return blocks of which every other one computes an eighth of the tokens."""
    return Blocks.dense(count, np.where(np.arange(count) % 2, 0.125, 1.0))


def ends(count: int) -> Blocks:
    """Return dense blocks, with an embedding and a head that have as many parameters as 3 blocks.

    The embedding takes no time; the head takes as long as 3 blocks.
    """
    dense = Blocks.dense(count)
    return Blocks(
        np.array([0, *dense.forward, 3 * FORWARD]),
        np.array([0, *dense.backward, 3 * BACKWARD]),
        np.array([3 * PARAMETERS, *dense.parameters, 3 * PARAMETERS]),
    )


CASES: dict[str, Callable[[int], Blocks]] = {
    "freezing, half": frozen,
    "early exit": early_exit,
    "pruning to 0.1": pruned,
    "sparse attention": sparse_attention,
    "mixture of depths": mixture_of_depths,
    "embedding and head": ends,
}


def solver_row(layers: int, stages: int, bar: float | None) -> list[object]:
    """Return a row with the solver's processor seconds for one cut: the median of five runs."""
    random, found = np.random.default_rng(layers), []
    for _ in range(5):
        problem = Problem.of(
            random.random(layers) + 0.1,
            stages,
            speeds=random.choice([0.5, 1.0, 1.0], stages),
            taken=random.integers(1, 10, layers),
            room=40 * layers // stages,
            moved=random.integers(1, 10, layers),
        )
        present = tuple(np.linspace(0, layers, stages + 1).astype(int).tolist())
        begin = time.process_time()
        partition(problem, present, 0.02)
        found.append(time.process_time() - begin)
    verdict = "" if bar is None else "pass" if median(found) <= bar else "missed"
    return [f"{layers} × {stages}", f"{1e3 * median(found):.1f}", "" if bar is None else f"{1e3 * bar:.0f}", verdict]


def choice(members: int, layers: int, slowest: float = 1.0) -> str:
    """Return a sentence on how long it takes to find the best three layouts of this many members.

    slowest: the speeds of the members range from this number to 1.
    """
    profile = Blocks.dense(layers).profile(members)
    begin = time.process_time()
    speeds = tuple(np.linspace(1.0, slowest, members).tolist())
    choose(profile, Layout(zero_stage=1), Members(speeds), Search(zero_stages=(1,), count=3))
    unlike = "" if slowest == 1.0 else f", speeds from {slowest:g} to 1"
    return f"{members} members{unlike} {1e3 * (time.process_time() - begin):.0f} ms"


def simulated(name: str, blocks: Callable[[int], Blocks], count: int, stages: int) -> str:
    """Return text on how much longer a step takes without the exact cut: by parameters, by exchange, and at most."""
    changed = blocks(count)
    seconds = changed.forward + changed.backward
    uniform = tuple(map(int, partition_balanced(changed.parameters.tolist(), stages)))
    exact = step(changed, stages, partition(Problem.of(seconds, stages), uniform).boundaries)
    limit = loads(seconds, uniform).max() / max(seconds.max(), seconds.sum() / stages)
    ratios = [step(changed, stages, cut) / exact for cut in (uniform, diffuse(seconds, uniform).boundaries)]
    return f"{name} {ratios[0]:.2f}, {ratios[1]:.2f} ({limit:.2f})"


def panel(name: str, count: int, stages: int) -> Panel:
    """Return a chart of the simulated milliseconds that each stage takes for a micro-batch."""
    blocks = CASES[name](count)
    seconds = blocks.forward + blocks.backward
    before = tuple(map(int, partition_balanced(blocks.parameters.tolist(), stages)))
    after = partition(Problem.of(seconds, stages), before).boundaries
    shown = [(1e3 * loads(seconds, cut)).tolist() for cut in (before, after)]
    return Panel(f"{name}, {count} on {stages}", *shown)


def loads(seconds: Floats, cut: Sequence[int]) -> Floats:
    """Return the seconds that each stage takes for a micro-batch."""
    return np.array([seconds[start:stop].sum() for start, stop in itertools.pairwise(cut)])


def step(blocks: Blocks, stages: int, cut: tuple[int, ...]) -> float:
    """Return the simulated seconds of a step."""
    profile = blocks.profile(PER_STAGE * stages)
    layout = Layout(zero_stage=1, pipe=stages, boundaries=cut)
    return step_time(profile, layout, Deal.of(profile, layout, pipeline=True)).seconds


def sleepers() -> Profile:
    """Return the profile of sleeping layers: 12 ms and 24 ms per micro-batch, a tenth less with each layer."""
    share = 0.9 ** np.arange(SLEEPERS, dtype=np.float64)
    layers = tuple(
        LayerCost(
            name=f"sleeper.{place}",
            forward_seconds=0.012 * each,
            backward_seconds=0.024 * each,
            kind_bytes={"weight": 0},
        )
        for place, each in enumerate(share.tolist())
    )
    return Profile(layers=layers, train_batch_size=BATCH, micro_batch_size=MICRO_BATCH)


def layouts_to_try(profile: Profile, ranks: int) -> list[Layout]:
    """Return the best layouts, and worse boundaries for each shape that uses most ranks. The last layout uses all
    ranks.
    """
    best = choose(profile, Layout(zero_stage=1), Members((1.0,) * ranks), Search(zero_stages=(1,), count=10))
    found = [each.layout for each in best]
    random = np.random.default_rng(4)
    for layout in [each for each in found if each.pipe > 1]:
        inner = random.choice(np.arange(1, SLEEPERS), layout.pipe - 1, replace=False)
        found.append(layout.replace(boundaries=uniform(SLEEPERS, layout.pipe)))
        found.append(layout.replace(boundaries=(0, *sorted(map(int, inner)), SLEEPERS)))
    return sorted(dict.fromkeys(found), key=lambda each: each.world_size == ranks)


def measured(ranks: int) -> str:
    """Train the pipeline of sleeping layers, and return text that compares predicted and measured steps."""
    profile = sleepers()
    walk = layouts_to_try(profile, ranks)
    notes = launch(
        "balance_ranks.py",
        ranks,
        900,
        forward=[each.forward_seconds / MICRO_BATCH for each in profile.layers],
        backward=[each.backward_seconds / MICRO_BATCH for each in profile.layers],
        walk=[each.to_dict() for each in walk],
        steps=STEPS,
        batch=BATCH,
        micro_batch=MICRO_BATCH,
    )
    lines, rows = [line for member in notes.values() for line in member], list[tuple[Layout, float, float]]()
    for place, layout in enumerate(walk):
        mine = [line["seconds"] for line in lines if line["place"] == place]
        rows.append((layout, step_time(profile, layout, Deal.of(profile, layout, pipeline=True)).seconds, median(mine)))
    ratios = [took / said for _, said, took in rows]
    quickest, proposed = min(took for *_, took in rows), min(rows, key=lambda row: row[1])[2]
    off = max(abs(each - 1) for each in ratios)
    return (
        f"{ranks} processes, {len(rows)} layouts; predictions are wrong by {100 * off:.0f} % at the most "
        f"(bar {100 * WITHIN:.0f} %: {'pass' if off <= WITHIN else 'missed'}); "
        f"the layout that is best by prediction takes {proposed / quickest:.3f} of the quickest measured (bar 1.05: "
        f"{'pass' if proposed <= 1.05 * quickest else 'missed'})."
    )


def timed(rounds: int) -> str:
    """Time a pipeline of two stages with even and with proposed boundaries. Return text on the cost of timing windows
    and on the accuracy of their times.
    """
    begin, heavy = time.perf_counter(), [0.003] * 4 + [0.001] * 8
    given: dict[str, Any] = {"seconds": heavy, "rounds": rounds, "batch": 8 * MICRO_BATCH, "micro_batch": MICRO_BATCH}
    notes = launch("balance_timed_ranks.py", 2, 1800, **given)
    worst, missed, bars = dict[str, float](), 0, dict[str, float]()
    for place in range(len(notes[0])):
        for lines in notes.values():
            said = lines[place]
            found = {
                "a step between windows takes more by": (said["between"] / said["off"] - 1, 0.003),
                "in a window by": (said["window"] / said["off"] - 1, 0.03),
                "layers beside busy are off by": (abs(said["summed"] / said["busy"] - 1), 0.05),
                "predicted steps by": (abs(said["predicted"] / said["off"] - 1), WITHIN),
            }
            missed += sum(value > bar for value, bar in found.values())
            for name, (value, bar) in found.items():
                worst[name], bars[name] = max(value, worst.get(name, value)), bar
    told = ", ".join(f"{name} {value:.4f} (bar {bars[name]})" for name, value in worst.items())
    return (
        f"at most, over {len(notes[0])} boundaries and two stages, {told}; {missed} missed. {rounds} rounds, "
        f"{time.perf_counter() - begin:.0f} s."
    )


def main() -> None:
    """Measure, simulate, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the tables: docs/figures")
    parser.add_argument("--ranks", type=int, help="train layers that sleep in so many processes, and time the steps")
    parser.add_argument("--timed", type=int, help="time a pipeline of two stages in so many rounds, such as 40")
    parser.add_argument("--picture", type=Path, help="an SVG to draw, such as docs/balance.svg")
    asked = parser.parse_args()
    if asked.picture:
        title = "What each stage takes for a micro-batch (simulated: nothing of this was trained)"
        panels = [panel(*each) for each in DRAWN]
        draw(asked.picture, title, panels, "boundaries by parameters", "the exact cut by time")
        return
    solved = [solver_row(*row) for row in SOLVED]
    choices = "; ".join(choice(members, 48, slowest) for members, slowest in ((64, 1.0), (1024, 1.0), (1024, 0.8)))
    speedups = "; ".join(simulated(name, blocks, *PIPELINE) for name, blocks in CASES.items())
    text = (
        f"Measured on: {machine()}. Processor time. The best three layouts of 48 layers: {choices}.\n\n"
        f"{table(('layers × stages', 'ms', 'bar', ''), solved)}\n\n"
        f"Simulated, nothing of this was trained: a step by parameters, and by exchange between neighbors, ÷ "
        f"a step by the exact cut (at most): {speedups}."
    )
    if asked.ranks:
        text += f"\n\nMeasured beside predicted, layers that sleep: {measured(asked.ranks)}"
    if asked.timed:
        text += f" Timed, layers that burn processor time on two stages: {timed(asked.timed)}"
    print(text)
    if asked.write:
        keep(asked.write, "bench_balance", text)


if __name__ == "__main__":
    main()
