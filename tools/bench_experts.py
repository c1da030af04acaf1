"""Experts that follow the tokens: how even the ranks get, what a step takes beside the prediction, and which moves pay.

python tools/bench_experts.py
python tools/bench_experts.py --rounds 5 --json build/experts.json --write docs/figures

It wants two idle cores and takes a few minutes. 8 experts in each of two layers under AutoEP on 2 ranks, whose routers
are told to follow Zipf's law, the heaviest experts side by side. Of each skew: the most tokens of a rank ÷ the mean now
and after swaps, beside the best of all maps; steps with both maps in turn, beside what is predicted from the first
ones; bytes of each switch ÷ the fewest that can move. Then 1,000 windows on a virtual clock whose routes drift
(`drifting_routes.py`): a move pays if the steps until the next move save more than it costs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import drifting_routes
from figures import keep, machine, table
from launch import launch

SKEWS, DRIFTS = (0.6, 1.0), (0.01, 0.03, 0.1)
OF_BEST, OFF, PAY = 1.02, 0.10, 0.90
"""Bars: tokens ÷ those of the best map; how far a step may be from its prediction; share of moves that pay."""
HEAD = (
    "skew",
    "most tokens ÷ mean: now",
    "after swaps",
    "best of all maps",
    "bound",
    "step, ms",
    "after, predicted",
    "after, measured",
    "bytes ÷ fewest",
)


def best(shares: Sequence[float]) -> float:
    """The most tokens of one of two ranks ÷ the mean, with the best map."""
    halves = (sum(shares[expert] for expert in half) for half in combinations(range(len(shares)), len(shares) // 2))
    return 2 * min(max(half, 1 - half) for half in halves)


def row(skew: float, said: Mapping[str, Any]) -> list[str]:
    """One line of the table; the layers are alike."""
    before, after = said["measured"]
    ratios, shares = said["ratios"][0], said["shares"][0]
    tokens = [f"{each:.3f}" for each in (*ratios[:2], best(shares), ratios[2])]
    steps = [f"{1e3 * each:.1f}" for each in (before, expected(said), after)]
    return [f"{skew}", *tokens, *steps, f"{max(sent / least for sent, least in said['bytes']):.2f}"]


def expected(said: Mapping[str, Any]) -> float:
    """Seconds of a step after swaps: those measured before, less what swaps save by prediction."""
    before, after = said["predicted"]
    return float(said["measured"][0] - (before - after))


def verdict(by_skew: Mapping[float, Mapping[str, Any]], drifts: Mapping[float, Sequence[float]]) -> str:
    """The bars, and what misses them."""
    pairs = [pair for said in by_skew.values() for pair in zip(said["ratios"], said["shares"], strict=True)]
    of_best = max(ratios[1] / best(shares) for ratios, shares in pairs)
    off = max(abs(said["measured"][1] / expected(said) - 1) for said in by_skew.values())
    sent = max(one / other for said in by_skew.values() for one, other in said["bytes"])
    lines = (
        (f"ranks get at most {of_best:.3f} of the tokens with the best map", OF_BEST, of_best <= OF_BEST),
        (f"steps after swaps are off the prediction by {off:.3f}", OFF, off <= OFF),
        (f"bytes ÷ fewest {sent:.2f}", 1.0, sent == 1.0),
        *(
            (f"drift {drift}: {paying:.0f} of {moves:.0f} moves pay", PAY, paying >= PAY * moves)
            for drift, (moves, paying, *_) in drifts.items()
        ),
    )
    return " ".join(f"{what}; bar {bar}: {'pass' if is_met else 'missed'}." for what, bar, is_met in lines)


def drifted(seeds: int) -> dict[float, tuple[float, ...]]:
    """Of each drift: moves, those that pay, mean step ÷ a balanced one, and that without any move."""
    found = {}
    for drift in DRIFTS:
        runs = [drifting_routes.drifting(seed, drift) for seed in range(seeds)]
        moves = [move for made, _, _ in runs for move in made]
        paying = sum(move.saved > drifting_routes.COST for move in moves)
        steps = (sum(each) / seeds / drifting_routes.STEP for each in zip(*(run[1:] for run in runs), strict=True))
        found[drift] = (len(moves), paying, *steps)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="in each of which both maps are timed (default 5)")
    parser.add_argument("--steps", type=int, default=12, help="of a map in a round (default 12)")
    parser.add_argument("--seeds", type=int, default=2, help="histories of 1,000 windows of each drift (default 2)")
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    asked = parser.parse_args()
    given = {"rounds": asked.rounds, "steps": asked.steps}
    by_skew = {skew: launch("expert_ranks.py", 2, 900, skew=skew, **given)[0][0] for skew in SKEWS}
    drifts = drifted(asked.seeds)
    steps = (f"{drift}: {step:.3f}, {still:.3f} without moves" for drift, (_, _, step, still) in drifts.items())
    text = (
        f"Measured on: {machine()}. {verdict(by_skew, drifts)} Simulated, {asked.seeds} × 1,000 windows, a step ÷ a "
        f"balanced one by drift: {'; '.join(steps)}.\n\n"
        f"{table(HEAD, [row(skew, said) for skew, said in by_skew.items()])}"
    )
    print(text)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps({"said": by_skew, "drifts": drifts}, indent=1), encoding="utf-8")
    if asked.write:
        keep(asked.write, "bench_experts", text)


if __name__ == "__main__":
    main()
