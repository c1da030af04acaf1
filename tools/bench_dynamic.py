"""Measure balance with layers that change: six kinds of change on two stages, each after its last change.

python tools/bench_dynamic.py
python tools/bench_dynamic.py --only freezing early_exit --json build/dynamic.json --write docs/figures

Needs two idle cores, and takes about ten minutes. Layers are those of `examples/dynamic`, so their savings are real
processor time. For each kind, the table compares: a step predicted from timed layers with a measured step, at even and
at the best boundaries; 300 steps in which balance acts, including windows and pauses, with the best boundaries, found
by trying all; the measured with the predicted gain of each move; and even with the best boundaries, by measured time
and by the slowest stage. DeepSpeed's initial boundaries are even.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from figures import keep, machine, table
from launch import launch

NAMES = (
    "freezing",
    "pruning",
    "early_exit",
    "mixture_of_depths",
    "sparse_attention",
    "mixture_of_experts",
)
BLOCKS, WIDTH = 8, 96
NARROW = {"sparse_attention": 64}
"""Widths of the models whose samples are long."""
OFF, ACTED, GAINED, SHARE = 0.15, 1.05, 0.8, 0.9
"""The bars: the largest error of a prediction; time of steps with balance ÷ time of the best ones; median of measured ÷
predicted gain; and, if costs drift along the depth, the share of the slowest stages' gain that must be measured."""
DRIFTING = ("freezing", "early_exit")
HEAD = (
    "layers",
    "even boundaries, ms",
    "best boundaries, ms",
    "predicted: even",
    "best",
    "balance acts: begin of stage 1",
    "÷ best",
    "moves: predicted gain",
    "measured",
    "even ÷ best",
    "by slowest stages",
    "at most",
)


def slowest(said: Mapping[str, Any]) -> float:
    """Return the seconds of a micro-batch on the stage that computes the longest."""
    layers, cut = said["layers"], said["cut"]
    return float(max(sum(layers[start:stop]) for start, stop in itertools.pairwise(cut)))


def figures(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that are compared with the bars."""
    start, best = said["start"], said["best"]
    layers = start["layers"]
    return {
        "off": [each["predicted"] / each["measured"] - 1 for each in (start, best)],
        "acted": said["acted"] / said["steps"] / min(start["measured"], best["measured"]),
        "moves": [each for each in said["moves"] if each[1] is not None],
        "gain": start["measured"] / best["measured"],
        "promised": slowest(start) / slowest({**best, "layers": layers}),
        "bound": slowest(start) / max(max(layers), sum(layers) / 2),
    }


def row(name: str, said: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return a row of the table."""
    start, best = said["start"], said["best"]
    moves = [" ".join(f"{each[side]:.3f}" for each in found["moves"]) for side in (0, 1)]
    return [
        f"{name}: {said['said']}",
        f"{1e3 * start['measured']:.0f}",
        f"{1e3 * best['measured']:.0f} ({best['cut'][1]})",
        *(f"{each:+.3f}" for each in found["off"]),
        f"{said['cut'][1]}",
        f"{found['acted']:.3f}",
        *moves,
        *(f"{found[key]:.3f}" for key in ("gain", "promised", "bound")),
    ]


def verdict(by_name: Mapping[str, Mapping[str, Any]]) -> str:
    """Return text on the bars, and on which kinds miss them."""
    off = max((abs(each), name) for name, found in by_name.items() for each in found["off"])
    acted = max((found["acted"], name) for name, found in by_name.items())
    ratios = [measured / predicted for found in by_name.values() for predicted, measured in found["moves"]]
    shares = [(found["gain"] / found["promised"], name) for name, found in by_name.items() if name in DRIFTING]
    lines = [
        _bar(f"predicted steps are off by {off[0]:.3f} at the most ({off[1]})", OFF, off[0] <= OFF),
        _bar(f"steps with balance take {acted[0]:.3f} of the best at the most ({acted[1]})", ACTED, acted[0] <= ACTED),
    ]
    if ratios:
        middle = median(ratios)
        lines.append(_bar(f"measured ÷ predicted gain, {len(ratios)} moves: {middle:.2f}", GAINED, middle >= GAINED))
    if shares:
        least = min(shares)
        lines.append(
            _bar(f"even ÷ best by the clock and by stages: {least[0]:.3f} ({least[1]})", SHARE, least[0] >= SHARE)
        )
    return f"{'. '.join(lines)}."


def _bar(what: str, bar: float, is_met: bool) -> str:
    return f"{what}; bar {bar}: {'pass' if is_met else 'missed'}"


def measured(names: Sequence[str], steps: int, timed: int) -> dict[str, dict[str, Any]]:
    """Run each kind of change, and return rank 0's results by name."""
    found = {}
    for name in names:
        given: dict[str, Any] = {
            "name": name,
            "blocks": BLOCKS,
            "width": NARROW.get(name, WIDTH),
            "steps": steps,
            "timed": timed,
        }
        found[name] = launch("dynamic_ranks.py", 2, 1800, **given)[0][0]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these dynamisms")
    parser.add_argument("--steps", type=int, default=300, help="in which balance acts (default 300)")
    parser.add_argument("--timed", type=int, default=6, help="steps that are timed at each boundary (default 6)")
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    asked = parser.parse_args()
    begin = time.perf_counter()
    said = measured(asked.only, asked.steps, asked.timed)
    by_name = {name: figures(each) for name, each in said.items()}
    text = (
        f"Measured on: {machine()}. {asked.steps} steps each in which balance acts; "
        f"{time.perf_counter() - begin:.0f} s. "
        f"{verdict(by_name)}\n\n{table(HEAD, [row(name, said[name], by_name[name]) for name in said])}"
    )
    print(text)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps({"said": said, "figures": by_name}, indent=1), encoding="utf-8")
    if asked.write:
        keep(asked.write, "bench_dynamic", text)


if __name__ == "__main__":
    main()
