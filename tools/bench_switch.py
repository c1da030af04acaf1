"""Measure switches against the raw transport: bytes, pause by phase, certificate, memory.

python tools/bench_switch.py                          # the whole table: about ten minutes on two cores
python tools/bench_switch.py --sizes 30M --laps 1     # a quick look
python tools/bench_switch.py --write docs/figures  # put the tables into the document
python tools/bench_switch.py --sizes 30M --variants all  # offload, fp16, BF16_Optimizer, LoRA, three groups instead
python tools/bench_switch.py --sizes 25M --variants axes  # other models: tensor, expert, pipe and sequence sizes change
python tools/bench_switch.py --cluster cluster.toml  # also what a cluster file of four members predicts of the moves

One launch of four ranks per size and type makes all changes in a ring, lap after lap. A switch is *ahead* (requested at
least one full step before it takes effect) or *immediate* (`at=engine.global_steps`). Right after each switch the same
members exchange the same bytes between the same pairs, over the same transport, and do nothing else; this gives the raw
time. Figures are medians over laps.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from axes import AXES
from figures import keep, machine, table
from launch import launch
from variants import VARIANTS, Change

from ds_dynatrain.plan import Topology

PROCESSES = 4
LIMIT_SECONDS = 900
FACTOR, ALLOWANCE_MS = 1.25, 100.0
CLOSE = 0.25
START = {"data": 2, "zero_stage": 1}
RING: tuple[tuple[str, dict[str, int]], ...] = (
    ("2→4", {"data": 4}),
    ("4→3", {"data": 3}),
    ("3→4", {"data": 4}),
    ("4→2", {"data": 2}),
    ("2→3", {"data": 3}),
    ("3→2", {"data": 2}),
    ("stage 1→2", {"zero_stage": 2}),
    ("stage 2→1", {"zero_stage": 1}),
    ("stage 1→3", {"zero_stage": 3}),
    ("stage 3→1", {"zero_stage": 1}),
)
"""The changes of one lap, each starting where the previous one ended. The ZeRO stage changes in a world of two
ranks."""

WAYS = {"auto": "which read each other's memory", "gloo": "over gloo"}
Record = dict[str, Any]


@dataclass(frozen=True)
class Switch:
    """One switch, as recorded by its members."""

    records: dict[int, Record]

    @property
    def name(self) -> str:
        """The name of the change."""
        return str(self.any["change"]["name"])

    @property
    def mode(self) -> str:
        """ "ahead" or "immediate"."""
        return str(self.any["change"]["mode"])

    @property
    def any(self) -> Record:
        """The record of the first member."""
        return self.records[min(self.records)]

    @property
    def raw_ms(self) -> float:
        """The raw time of the slowest member, as the median of the repeats."""
        rounds = zip(*(record["raw_seconds"] for record in self.records.values()), strict=True)
        return 1e3 * float(median(max(times) for times in rounds))

    @property
    def apart_ms(self) -> float:
        """The time for which training paused, without the certificate."""
        return self.pause_ms - self.most("certificate_ms")

    @property
    def pause_ms(self) -> float:
        """The longest pause of a member that trains afterwards. A member that goes idle takes longer to free its
        memory.
        """
        working = self.any["event"]["target"]["members"]
        return float(max(record["pause_ms"] for member, record in self.records.items() if member in working))

    def expected_ms(self, topology: Topology) -> float:
        """Return the time of the moves that a topology predicts from the bytes of each pair."""
        pairs = [(member, member, record["local_bytes"]) for member, record in self.records.items()]
        for member, record in self.records.items():
            pairs += [(member, int(peer), sent) for peer, (sent, _) in record["peers"].items() if sent]
        return 1e3 * topology.seconds(*np.array(pairs, np.int64).T).expected

    def phase(self, name: str) -> float:
        """Return the longest duration of a phase, or of a part of a phase, over the members."""
        return float(max(r["phases_ms"].get(name, r.get(f"{name}_ms", 0.0)) for r in self.records.values()))

    def most(self, name: str) -> float:
        """Return the largest value of a field over the members."""
        return float(max(record[name] for record in self.records.values()))


def lap_of(variant: str) -> tuple[tuple[Change, ...], dict[str, int]]:
    """Return (the changes of a lap, the layout in which it begins and ends)."""
    held = AXES.get(variant)
    return (RING, START) if held is None else (held.lap, held.start)


def measure(size: str, dtype: str, variant: str, laps: int, immediate: int, **settings: Any) -> list[Switch]:
    """Run one launch, with `laps` laps of switches ahead and `immediate` laps of immediate ones. Return the switches.

    variant: the variant of the model; "" for none.
    settings: `repeats` of the raw exchange, and the `transport`.
    """
    modes = ["ahead"] * laps + ["immediate"] * immediate
    lap, start = lap_of(variant)
    walk = [{"name": name, "mode": mode, "target": target} for mode in modes for name, target in lap]
    wanted = {"size": size, "dtype": dtype, "variant": variant, "start": start, "walk": walk, **settings}
    notes = launch("switch_ranks.py", PROCESSES, LIMIT_SECONDS, **wanted)
    switches: defaultdict[int, dict[int, Record]] = defaultdict(dict)
    for member, lines in notes.items():
        for line in lines:
            switches[line["event"]["generation"]][member] = line
    if len(switches) != len(walk):
        raise SystemExit(f"{size} {variant or dtype}: {len(switches)} of {len(walk)} switches took place")
    return [Switch(switches[generation]) for generation in sorted(switches)]


def summary(size: str, title: str, name: str, switches: list[Switch], topology: Topology | None) -> Record:
    """Return the medians of one change, its bytes, and the verdict on its bar."""
    ahead = [switch for switch in switches if switch.mode == "ahead"] or switches
    immediate = [switch for switch in switches if switch.mode == "immediate"]
    event = ahead[-1].any["event"]
    least = next(record for switch in switches for record in switch.records.values() if "minimum" in record)
    raw, pause = median(switch.raw_ms for switch in switches), median(switch.apart_ms for switch in ahead)
    allowed = FACTOR * raw + ALLOWANCE_MS
    return {
        "size": size,
        "title": title,
        "change": name,
        "bytes_sent": event["bytes_sent"],
        "bytes_minimum": least["minimum"],
        "bytes_best_slots": least["best_slots"],
        "raw_ms": raw,
        "pause_apart_ms": pause,
        "pause_apart_range_ms": [min(s.apart_ms for s in ahead), max(s.apart_ms for s in ahead)],
        "allowed_ms": allowed,
        "ratio": pause / allowed,
        "pause_ms": median(switch.pause_ms for switch in ahead),
        "certificate_ms": median(switch.most("certificate_ms") for switch in ahead),
        "immediate_ms": median(switch.apart_ms for switch in immediate) if immediate else None,
        "expected_ms": None if topology is None else median(switch.expected_ms(topology) for switch in ahead),
        "phases_ms": {
            phase: median(switch.phase(phase) for switch in ahead)
            for phase in ("meet", "drain", "digest", "rebuild", "move", "exchange", "local", "derived", "carry")
            + ("verify", "commit", "prepared")
        },
        "peak_state_bytes": max(switch.most("state_peak") for switch in ahead),
        "bound_bytes": event["memory_bound_bytes"],
        "resident_high_water": max(switch.most("resident_high_water") for switch in ahead),
        "resident_growth": max(switch.most("resident_growth") for switch in ahead),
    }


SUMMARY = (
    *("case", "sent ÷ minimum", "raw ms", "pause ms", "bar met", "missed by ms", "certificate ms"),
    *("rebuild ms", "local copies ms", "state ÷ bound"),
)


def document(rows: list[Record], laps: int, immediate: int, transport: str) -> str:
    """Return the tables, with a row for each model and kind of change, after what a cluster file predicted."""
    cases: dict[str, list[Record]] = {}
    for row in rows:
        cases.setdefault(f"{row['size']}, {row['title']}", []).append(row)
    return (
        f"Measured on: {machine()}. Four ranks, {WAYS[transport]}; medians of {laps} laps ahead and {immediate} "
        f"immediate.{prediction(rows)}\n\n{table(SUMMARY, (_summary_row(case, mine) for case, mine in cases.items()))}"
    )


def _summary_row(case: str, rows: list[Record]) -> list[object]:
    misses = [row["pause_apart_ms"] - row["allowed_ms"] for row in rows if row["ratio"] > 1]
    sent = (row["bytes_sent"] / row["bytes_best_slots"] if row["bytes_best_slots"] else 1.0 for row in rows)
    return [
        case,
        f"{max(sent):.3f}",
        _span(row["raw_ms"] for row in rows),
        _span(row["pause_apart_ms"] for row in rows),
        f"{len(rows) - len(misses)} of {len(rows)}",
        _span(misses),
        _span(row["certificate_ms"] for row in rows),
        *(_span(row["phases_ms"][phase] for row in rows) for phase in ("rebuild", "local")),
        f"{max(row['peak_state_bytes'] / row['bound_bytes'] for row in rows):.2f}",
    ]


def prediction(rows: list[Record]) -> str:
    """Return a sentence on how close expected and measured times of the moves are; "" without a cluster file."""
    moved = [row for row in rows if row["expected_ms"] is not None and row["bytes_sent"]]
    ratios = [row["expected_ms"] / row["phases_ms"]["move"] for row in moved]
    close = sum(abs(ratio - 1) <= CLOSE for ratio in ratios)
    return (
        f" The expected time of the moves is within {CLOSE:.0%} of the measured one in {close} of {len(ratios)} cases; "
        f"expected / measured: {', '.join(f'{ratio:.2f}' for ratio in ratios)}."
        if ratios
        else ""
    )


def _span(values: Iterable[float]) -> str:
    """Return the smallest and the largest value as text; "" if there are none."""
    found = sorted(values)
    return "–".join(dict.fromkeys(f"{value:.0f}" for value in (found[0], found[-1]))) if found else ""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["30M", "125M"], help="30M, 125M, tiny; 25M of the axes")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=["bf16", "fp32"])
    parser.add_argument(
        "--variants", nargs="+", default=[], choices=["all", "axes", *VARIANTS, *AXES], help="instead of --dtypes"
    )
    parser.add_argument("--laps", type=int, default=3, help="laps with switches asked for ahead (default 3)")
    parser.add_argument("--immediate", type=int, default=1, help="laps with immediate switches (default 1)")
    parser.add_argument("--transport", default="auto", choices=list(WAYS), help="as dynatrain.transport")
    parser.add_argument("--repeats", type=int, default=3, help="raw exchanges after each switch (default 3)")
    parser.add_argument("--cluster", type=Path, help="a cluster file of four members, to compare its predictions")
    parser.add_argument("--out", type=Path, default=Path("build/bench_switch.json"), help="the figures as JSON")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the tables: docs/figures")
    args = parser.parse_args()
    known = {**VARIANTS, **AXES}
    variants = {"all": list(VARIANTS), "axes": list(AXES)}.get(" ".join(args.variants), args.variants)
    kinds = [(known[name].title, known[name].dtype, name) for name in variants]
    section = "bench_axes" if set(variants) & set(AXES) else "bench_variants" if variants else "bench_switch"
    settings = {"repeats": args.repeats, "transport": args.transport}
    topology = None if args.cluster is None else Topology.read(args.cluster)
    rows: list[Record] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for size in args.sizes:
        for title, dtype, variant in kinds or [(dtype, dtype, "") for dtype in args.dtypes]:
            switches = measure(size, dtype, variant, args.laps, args.immediate, **settings)
            for name, _ in lap_of(variant)[0]:
                rows.append(
                    summary(size, title, name, [switch for switch in switches if switch.name == name], topology)
                )
            text = document(rows, args.laps, args.immediate, args.transport)
            args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
            if args.write is not None:
                keep(args.write, section, text)
    print(text)


if __name__ == "__main__":
    main()
