"""Measure how fast a job trains after an event: a member is lost or becomes slow, or layers become more expensive.

python tools/bench_after.py
python tools/bench_after.py --cases "1 of 4 lost" --write docs/figures

The layout that `balance.choose` selects is trained, and so are all other layouts that could be faster. Layers sleep, so
many ranks on few cores show the true times of a pipeline. A layout is left out only if the sleep of its busiest rank
alone exceeds a step of the chosen layout, which is verified with measured steps. Two rules are compared: dropping the
lost member's column (torchft), which is also trained; and letting the peers of its stage take over its micro-batches
(ReCycle), which is computed as the micro-batches of the busiest rank times the seconds of its layers, plus all other
stages once. Takes ten minutes.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from figures import keep, machine, table
from launch import launch

from ds_dynatrain.balance.choose import Members, Search, choose
from ds_dynatrain.balance.deal import Deal, peak_bytes, shares_of
from ds_dynatrain.balance.profile import LayerCost, Profile
from ds_dynatrain.balance.step_time import step_time
from ds_dynatrain.space import Layout

FORWARD, BACKWARD, LAYERS = 0.008, 0.016, 6
"""Seconds of a layer for a micro-batch in both passes, and the number of layers."""
BATCH, MICRO_BATCH, STEPS = 64, 4, 5
BAR, ROOM = 0.95, 1.25
"""Fraction of the best measured throughput that must be reached, and the factor by which a step may exceed the
prediction."""
MEMORY = 1.5
"""Memory of a member, as a multiple of what it needs in the first layout, so that no member can hold all layers."""
SLOW_STEPS, ANSWERED_WITHIN, SLOW_FROM = 20, 5, 30
"""Steps for which a member must be slow, steps within which the job must then react, and the first slow step."""


@dataclass(frozen=True)
class Case:
    """An event, and the layout in which it happens.

    before: the layout before the event.
    speeds: the speeds of the remaining members, slow ones last.
    share: the seconds of each layer, as a multiple of the usual ones.
    """

    name: str
    before: Layout
    speeds: tuple[float, ...]
    share: tuple[float, ...] = (1.0,) * LAYERS

    @property
    def profile(self) -> Profile:
        """The profile of the layers, which is known because they sleep."""
        layers = tuple(
            LayerCost(
                name=f"sleeper.{place}",
                forward_seconds=FORWARD * share,
                backward_seconds=BACKWARD * share,
                kind_bytes={"weight": 100},
            )
            for place, share in enumerate(self.share)
        )
        return Profile(layers=layers, train_batch_size=BATCH, micro_batch_size=MICRO_BATCH)

    def predict(self, layout: Layout) -> float:
        """Return the predicted seconds of a step."""
        speeds = self.speeds[: layout.world_size]
        return step_time(self.profile, layout, Deal.of(self.profile, layout, pipeline=True), speeds).seconds

    def busiest(self, layout: Layout) -> float:
        """Return the seconds that the busiest rank sleeps in a step. No step is shorter."""
        speeds = self.speeds[: layout.world_size]
        return max(step_time(self.profile, layout, Deal.of(self.profile, layout, pipeline=True), speeds).busy)

    def chosen(self) -> Layout:
        """Return the layout that a job would choose."""
        members = Members(self.speeds, self.memory_bytes)
        return choose(self.profile, self.before, members, Search(zero_stages=(1,), count=1))[0].layout

    @property
    def memory_bytes(self) -> int:
        """The memory of a member in bytes."""
        return int(MEMORY * self.needed(self.before))

    def needed(self, layout: Layout) -> int:
        """Return the bytes on the rank that needs the most."""
        deal = Deal.of(self.profile, layout, pipeline=True)
        return max(peak_bytes(self.profile, layout, deal))

    def dropped(self) -> Layout | None:
        """Return the layout without the column of the lost or slow member.

        Returns None if there is only one column, or if no member is lost or slow.
        """
        is_hurt = len(self.speeds) < self.before.world_size or min(self.speeds) < 1
        return self.before.replace(data=self.before.data - 1) if is_hurt and self.before.data > 1 else None

    def taken_over(self) -> float | None:
        """Return the seconds of a step by ReCycle's rule, without filling bubbles. The lost or slow member is on the
        last stage.
        """
        lost = self.before.world_size - len(self.speeds)
        if lost >= self.before.data or self.dropped() is None:
            return None
        stages = [sum(self.share[start:stop]) for start, stop in itertools.pairwise(self.before.boundaries or ())]
        whole, data = BATCH // MICRO_BATCH, self.before.data
        pace = [1.0] * (data - lost) if lost else [1.0] * (data - 1) + [min(self.speeds)]
        most = [whole / data] * (len(stages) - 1) + [whole / sum(pace)]  # counted for a member of speed 1
        return (FORWARD + BACKWARD) * max(
            micro_batches * mine + sum(stages) - mine for micro_batches, mine in zip(most, stages, strict=True)
        )

    def candidates(self) -> Iterator[Layout]:
        """Yield all possible boundaries for each number of stages, with as many data ranks as the members allow."""
        for pipe in range(1, min(len(self.speeds), LAYERS) + 1):
            for data in range(len(self.speeds) // pipe, 0, -1):
                found = [each for each in self._cuts(pipe, data) if self._is_possible(each)]
                yield from found
                if found:
                    break

    def _cuts(self, pipe: int, data: int) -> Iterator[Layout]:
        for inner in itertools.combinations(range(1, LAYERS), pipe - 1):
            cut = (0, *inner, LAYERS) if pipe > 1 else None
            layout = Layout(zero_stage=1, pipe=pipe, data=data, boundaries=cut)
            yield layout
            pace = [min(self.speeds[stage * data + column] for stage in range(pipe)) for column in range(data)]
            shares = tuple(MICRO_BATCH * each for each in shares_of(pace, BATCH // MICRO_BATCH))
            if len(set(shares)) > 1 and min(pace) < max(pace):
                yield layout.replace(shares=shares)

    def _is_possible(self, layout: Layout) -> bool:
        return Search().deal(self.profile, layout) is not None and self.needed(layout) <= self.memory_bytes


EVEN = (0, 3, 6)
CASES = (
    Case("1 of 4 lost", Layout(zero_stage=1, pipe=2, data=2, boundaries=EVEN), (1.0,) * 3),
    Case("1 of 6 lost", Layout(zero_stage=1, pipe=3, data=2, boundaries=(0, 2, 4, 6)), (1.0,) * 5),
    Case("2 of 8 lost", Layout(zero_stage=1, pipe=2, data=4, boundaries=EVEN), (1.0,) * 6),
    Case("1 of 4 half as fast", Layout(zero_stage=1, pipe=2, data=2, boundaries=EVEN), (1.0, 1.0, 1.0, 0.5)),
    Case(
        "layers 0 and 1 three times as heavy",
        Layout(zero_stage=1, pipe=2, data=2, boundaries=EVEN),
        (1.0,) * 4,
        (3.0, 3.0, 1.0, 1.0, 1.0, 1.0),
    ),
)


def measured(case: Case, walk: list[Layout]) -> dict[Layout, float]:
    """Train in all these layouts, one after the other in one job. Return the median seconds of a step in each."""
    notes = launch(
        "balance_ranks.py",
        len(case.speeds),
        1800,
        forward=[each.forward_seconds / MICRO_BATCH for each in case.profile.layers],
        backward=[each.backward_seconds / MICRO_BATCH for each in case.profile.layers],
        speeds=case.speeds,
        walk=[each.to_dict() for each in walk],
        steps=STEPS,
        batch=BATCH,
        micro_batch=MICRO_BATCH,
    )
    lines = [line for member in notes.values() for line in member]
    return {
        layout: median(line["seconds"] for line in lines if line["place"] == place) for place, layout in enumerate(walk)
    }


def row(case: Case) -> tuple[list[object], bool]:
    """Return (a row of the table, whether it meets the bar)."""
    chosen, dropped = case.chosen(), case.dropped()
    if chosen.pipe == 1:
        chosen = chosen.replace(boundaries=None)
    everything = list(dict.fromkeys([*case.candidates(), chosen]))
    limit = ROOM * case.predict(chosen)
    walk = [each for each in everything if case.busiest(each) <= limit]
    compared = [each for each in (dropped, case.before) if each is not None and each.world_size <= len(case.speeds)]
    walk = sorted(dict.fromkeys([*walk, *compared]), key=lambda each: each.world_size == len(case.speeds))
    took = measured(case, walk)
    best = min(took, key=lambda each: took[each])
    share, is_sure = took[best] / took[chosen], took[chosen] <= limit
    over = case.taken_over()
    cells: list[object] = [
        case.name,
        f"{case.before.pipe} × {case.before.data}",
        str(chosen),
        f"{1e3 * case.predict(chosen):.0f}",
        f"{1e3 * took[chosen]:.0f}",
        str(best) if best != chosen else "the same",
        f"{len(walk)} of {len(everything)}",
        f"{share:.3f}",
        f"{took[best] / took[dropped]:.2f}" if dropped is not None else "",
        f"{took[best] / over:.2f}" if over is not None else "",
        f"{took[best] / took[case.before]:.2f}" if case.before in took else "",
    ]
    return cells, share >= BAR and is_sure


def answered() -> tuple[str, bool]:
    """Describe what a job does about a member that becomes twice as slow, and whether it reacts in time."""
    given = {"from_step": SLOW_FROM, "steps": 90, "pace": 2.0, "slow_steps": SLOW_STEPS}
    first = launch("balance_slow_ranks.py", 2, 600, "cpu", **given).get(0, [])
    if not first:
        return "Nothing was done about it in 60 steps: missed.", False
    steps, limit = int(first[0]["step"]) - SLOW_FROM, SLOW_STEPS + ANSWERED_WITHIN
    gain, predicted = (first[0][name] for name in ("measured_gain", "predicted_gain"))
    by_the_clock = "not measured" if gain is None else f"{100 * gain:.0f} % by the clock"
    text = (
        f"One of two members that compute takes twice as long from a step on: answered after {steps} steps, with "
        f"`slow_steps` {SLOW_STEPS}, by {first[0]['layout']}; predicted gain {100 * predicted:.0f} %, {by_the_clock} "
        f"(bar: within {limit} steps: {'pass' if steps <= limit else 'missed'})."
    )
    return text, steps <= limit


def main() -> None:
    """Train, measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="*", default=names, help="; ".join(names))
    asked = parser.parse_args()
    begin = time.perf_counter()
    found = [row(case) for case in CASES if case.name in asked.cases]
    text, is_in_time = answered()
    head = ["what happened", "before, pipe × data", "chosen", "predicted ms", "measured ms", "best measured", "trained"]
    head += ["chosen, of the best", "column dropped", "peers take over", "as it was"]
    missed = sum(not passed for _, passed in found) + (not is_in_time)
    bars = f"Bars: {BAR} of the best measured throughput, and that answer; {missed} missed."
    page = (
        f"Measured on: {machine()}. {text} {bars} {time.perf_counter() - begin:.0f} s.\n\n"
        f"{table(head, [cells for cells, _ in found])}"
    )
    print(page)
    if asked.write:
        keep(asked.write, "bench_after", page)


if __name__ == "__main__":
    main()
