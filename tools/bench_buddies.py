"""Measure what copies with buddies cost a step: how long it waits, what is sent, what memory it takes.

python tools/bench_buddies.py                              # three minutes on a quiet machine
python tools/bench_buddies.py --sizes 30M --batches 4 --steps 20
python tools/bench_buddies.py --write docs/figures
python tools/bench_buddies.py --mode replay                # the same for steps that are replayed

An elastic job of two torchrun agents with one worker each takes a copy after every second step, so that steps with a
copy on its way stand beside steps without. `plain` is a copy of the same buffers into memory that was touched before,
made at the same boundary. `waits` is all that a step waits for at a boundary where a copy is taken. `more` is by how
much steps during which a copy travels take longer than those during which none does: what the thread and the network
take away from training, on cores that both share.

Of a step that is replayed, `raw` is an exchange of as many bytes as its gradient has, `own` what the own optimizer
takes for the same elements, and `waits` all that the step and the boundary before it wait for: of that `ship` for
gradients.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from figures import keep, machine, table
from nodes import TIMES, Job, Row

SCRIPT = Path(__file__).with_name("buddy_ranks.py")
NODES = ("a", "b")
LIMIT_SECONDS = 600.0
BLOCKING, SHARE, JUDGED = 1.25, 0.02, 64
"""The bars: the copy ÷ a plain one, and what a step waits for as a share of a step of so many samples a rank."""


def steps_of(**wanted: Any) -> list[Row]:
    """The lines of one job."""
    with tempfile.TemporaryDirectory(prefix="dynatrain-bench-", ignore_cleanup_errors=True) as folder:
        variables = {"WANTED": json.dumps(wanted), "DS_ACCELERATOR": "cpu"}
        times = {**TIMES, "silent_seconds": 5.0}
        job = Job(Path(folder), f"{len(NODES)}:{len(NODES)}", variables=variables, times=times, script=SCRIPT)
        job.seconds = LIMIT_SECONDS
        try:
            job.coordinator("coordinator")
            for node in NODES:
                job.node(node)
            codes = {node: job.code(node) for node in NODES}
            if any(codes.values()):
                raise SystemExit(f"a node has ended with {codes}\n{job.logs()}")
            return job.rows("step")
        finally:
            job.clean_up()


def line(size: str, stage: int, batch: int, args: argparse.Namespace) -> list[object]:
    """One line of the table."""
    wanted = {"size": size, "stage": stage, "batch": batch * len(NODES), "dtype": args.dtype}
    rows = steps_of(**wanted, steps=args.steps, length=args.length, mode="copy", optimizer={})
    with_copy, without = ([row for row in rows if row["is_taken"] == kind] for kind in (True, False))
    plain, waits, took = (median(row[key] for row in with_copy) for key in ("plain_ms", "boundary_ms", "take_ms"))
    busy, calm = (median(row["train_ms"] for row in each) for each in (with_copy, without))
    last = rows[-1]
    share = waits / (calm + waits)
    verdict = [] if took <= BLOCKING * plain else [f"copy missed: {took / plain:.2f}"]
    verdict += [f"share missed: {100 * share:.1f} %"] if batch >= JUDGED and share > SHARE else []
    return [
        f"{size}, stage {stage}, {batch} a rank",
        f"{calm:.0f}",
        f"{plain:.1f}",
        f"{took:.1f}",
        f"{took / plain:.2f}",
        f"{waits:.1f}",
        f"{100 * share:.1f} %",
        f"{100 * (busy / calm - 1):+.1f} %",
        f"{median(row['ship_ms'] for row in rows):.0f}",
        f"{last['state_bytes'] / last['elements']:.3f}",
        f"{last['sent_bytes'] / last['state_bytes']:.4f}",
        f"{last['memory_bytes'] / last['state_bytes']:.2f}",
        max(row["skipped"] for row in rows),
        "; ".join(verdict) or "pass",
    ]


def replayed(size: str, stage: int, batch: int, is_fused: bool, args: argparse.Namespace) -> list[object]:
    """One line of the table of steps that are replayed."""
    wanted = {"size": size, "stage": stage, "batch": batch * len(NODES), "dtype": args.dtype}
    optimizer = {"torch_adam": True, **({"fused": True} if is_fused else {})}
    found = steps_of(**wanted, steps=args.steps, length=args.length, mode="replay", optimizer=optimizer)
    rows = [row for row in found if row["is_taken"] and row["raw_ms"]]
    names = "train_ms", "raw_ms", "own_ms", "ship_ms", "take_ms", "boundary_ms"
    step, raw, own, ship, waits, boundary = (median(row[key] for row in rows) for key in names)
    last = rows[-1]
    share, cost = (waits + boundary) / step, (waits + boundary) / (raw + own)
    verdict = [] if cost <= BLOCKING else [f"cost missed: {cost:.2f}"]
    verdict += [f"share missed: {100 * share:.1f} %"] if batch >= JUDGED and share > SHARE else []
    return [
        f"{size}, stage {stage}, {batch} a rank{', fused' if is_fused else ''}",
        f"{step:.0f}",
        f"{raw:.1f}",
        f"{own:.1f}",
        f"{ship:.1f}",
        f"{waits + boundary:.1f}",
        f"{cost:.2f}",
        f"{100 * share:.1f} %",
        f"{last['sent_bytes'] / last['elements']:.3f}",
        f"{last['memory_bytes'] / last['state_bytes']:.2f}",
        "; ".join(verdict) or "pass",
    ]


def table_of_replay(cases: list[tuple[str, int, int]], args: argparse.Namespace) -> str:
    """The table, and what it was measured on."""
    rows = [replayed(*case, is_fused, args) for case in cases for is_fused in (False, True)]
    text = f"Measured on: {machine()}. {args.dtype}, {len(NODES)} nodes of one rank, {args.steps} steps, each of which "
    text += (
        f"is replayed; medians. Bars: what a step waits for ÷ (raw + own) {BLOCKING:g}; {100 * SHARE:g} % of a step "
    )
    text += f"of {JUDGED} samples a rank.\n\n"
    head = ("", "step ms", "raw ms", "own ms", "ship ms", "waits ms", "÷ (raw + own)", "of a step", "bytes an element")
    return text + table((*head, "memory ÷ state", ""), rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["30M"], choices=["tiny", "30M", "125M"])
    parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp32"])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 64], help="samples a rank (default 4 and 64)")
    parser.add_argument("--steps", type=int, default=30, help="steps of each job (default 30)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample (default 32)")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    parser.add_argument("--mode", default="copy", choices=["copy", "replay"])
    args = parser.parse_args()
    cases = [(size, stage, batch) for size in args.sizes for stage in args.stages for batch in args.batches]
    if args.mode == "replay":
        print(text := table_of_replay(cases, args))
        if args.write is not None:
            keep(args.write, "bench_buddies_replay", text)
        return
    rows = [line(*case, args) for case in cases]
    text = f"Measured on: {machine()}. {args.dtype}, {len(NODES)} nodes of one rank, a copy after every second of "
    text += f"{args.steps} steps; medians. Bars: copy ÷ plain {BLOCKING:g}; {100 * SHARE:g} % of a step of "
    text += f"{JUDGED} samples a rank.\n\n"
    head = ("", "step ms", "plain ms", "copy ms", "÷ plain", "waits ms", "of a step", "more", "travels ms")
    text += table((*head, "bytes an element", "sent ÷ state", "memory ÷ state", "skipped", ""), rows)
    print(text)
    if args.write is not None:
        keep(args.write, "bench_buddies", text)


if __name__ == "__main__":
    main()
