"""Measure how long it takes to send weights from ZeRO-3 to a rollout engine, compared with a loop over parameters.

python tools/bench_weights.py                            # 126M on four ranks; five minutes
python tools/bench_weights.py --size 30M --laps 1        # a quick look
python tools/bench_weights.py --write docs/figures

Four ranks send to one receiver in this process: by the usual loop (gather, request and broadcast for each parameter),
by this loop without requests, to a plain torch rank, to a stub of vLLM's server, and only changed elements. The first
lap, which also connects, is shown separately; other figures are medians over laps. Extra memory is the largest of any
rank and lap.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from figures import keep, machine, table
from launch import launch
from workload import SIZES

ROOT = Path(__file__).parents[1]
PROCESSES, LIMIT_SECONDS = 4, 1500
WAYS = ("loop", "loop without requests", "group", "vllm", "group, deltas", "vllm, deltas")
HEAD = ("way", "collectives", "requests", "seconds", "first, s", "loop ÷ it", "MB sent ÷ receiver's", "extra MB")
ROOM_BYTES = 64 << 20


def measure(size: str, dtype: str, stage: int, laps: int) -> dict[str, dict[str, float]]:
    """Run one launch, and return the figures of each way."""
    sys.path.insert(0, str(ROOT))  # receivers and stubs are shared with the tests
    from tests.weights.fakes import rollouts
    from tests.weights.stubs import Stub, VLLMStub

    class LoopStub(Stub):
        """A stub that receives parameters as they are announced."""

        def answer(self, route: str, body: Mapping[str, Any], query: Mapping[str, str]) -> Any:
            if route == "/init":
                self.group = self.join(body)
                return {}
            for row in body["tensors"]:
                self._group = self.group
                self.receive([tuple(row)])
            return {}

    with ExitStack() as stack:
        plain, changed = (stack.enter_context(rollouts(1, {}, LIMIT_SECONDS, keeps=False)) for _ in range(2))
        vllm, sparse, loop = (stack.enter_context(stub.serving()) for stub in (VLLMStub(), VLLMStub(), LoopStub()))
        sparse.is_sparse = True
        wanted: dict[str, Any] = {"size": size, "dtype": dtype, "stage": stage, "laps": laps}
        wanted |= {"group": plain.address, "deltas": changed.address}
        wanted |= {"vllm": vllm.url, "sparse": sparse.url, "loop": loop.url}
        notes = launch("weights_ranks.py", PROCESSES, LIMIT_SECONDS, **wanted)
        held = plain.receivers[0].weights
        own = sum(each.nbytes for each in held.values())
        for other in (vllm.weights, sparse.weights, changed.receivers[0].weights):
            if held.keys() != other.keys() or not all(torch.equal(held[name], other[name]) for name in held):
                raise SystemExit("receivers hold other weights than each other")
    largest = max(each.nbytes for each in held.values())
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        rows = [[row for row in lines if row["way"] == way] for lines in notes.values()]
        later = [row for lines in rows for row in lines if row["lap"]]
        first = rows[0]
        found[way] = {
            "collectives": max(row["collectives"] for row in later),
            "rpcs": max(row["rpcs"] for row in first),
            "seconds": median(max(lines[lap]["seconds"] for lines in rows) for lap in range(1, laps + 1)),
            "first": max(lines[0]["seconds"] for lines in rows),
            "bytes": median(row["nbytes"] for row in first if row["lap"]) / own,
            "extra": max(row["extra"] for row in later),
            "bucket": largest,
        }
    return found


def bars(found: dict[str, dict[str, float]], layers: int) -> str:
    """Return how many bars are met, and which are missed, with the measured values."""
    group, vllm, loop = found["group"], found["vllm"], found["loop"]
    room = group["bucket"] + ROOM_BYTES
    rows = [
        ("collectives, vLLM", vllm["collectives"], layers + 2),
        ("collectives, group", group["collectives"], layers + 2),
        ("requests in one sync, vLLM, with the connection", vllm["rpcs"], 4),
        ("requests in one sync, group", group["rpcs"], 4),
        ("bytes ÷ receiver's own, group", round(group["bytes"], 4), 1.0),
        ("bytes ÷ receiver's own, deltas at 3e-6", round(found["group, deltas"]["bytes"], 4), 0.05),
        ("bytes ÷ receiver's own, vLLM's patches at 3e-6", round(found["vllm, deltas"]["bytes"], 4), 0.05),
        ("extra memory, group, MB", round(group["extra"] / 1e6), round(room / 1e6)),
        ("extra memory, vLLM, MB", round(vllm["extra"] / 1e6), round(room / 1e6)),
    ]
    said = [(f"{what} {value} (≤ {bar})", value <= bar) for what, value, bar in rows]
    for way in ("group", "vllm"):
        ratio = loop["seconds"] / found[way]["seconds"]
        said.append((f"seconds, loop ÷ {way} {ratio:.1f} (≥ 5)", ratio >= 5))
    missed = "; ".join(each for each, is_met in said if not is_met)
    return f"{sum(is_met for _, is_met in said)} of {len(said)} bars are met. Missed: {missed or 'none'}."


def document(found: dict[str, dict[str, float]], size: str, dtype: str, stage: int, laps: int) -> str:
    """Return the table and the bars."""
    lines = [
        [
            way,
            *(f"{each[key]:.0f}" for key in ("collectives", "rpcs")),
            f"{each['seconds']:.2f}",
            f"{each['first']:.2f}",
            f"{found['loop']['seconds'] / each['seconds']:.1f}",
            f"{each['bytes']:.3f}",
            f"{each['extra'] / 1e6:.0f}",
        ]
        for way, each in found.items()
    ]
    setting = f"{size}, {dtype}, stage {stage}, {PROCESSES} ranks to 1 receiver, medians of {laps} laps"
    return "\n\n".join(
        [
            f"Measured on: {machine()}. {setting}.",
            table(HEAD, lines),
            bars(found, SIZES[size]["layers"]),
        ]
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="125M", choices=list(SIZES), help="of the model (default 125M)")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--stage", type=int, default=3, choices=[3], help="the loop gathers what stage 3 partitions")
    parser.add_argument("--laps", type=int, default=3, help="laps after the first (default 3)")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the tables: docs/figures")
    args = parser.parse_args()
    found = measure(args.size, args.dtype, args.stage, args.laps)
    text = document(found, args.size, args.dtype, args.stage, args.laps)
    if args.write is not None:
        keep(args.write, "bench_weights", text)
    print(text)


if __name__ == "__main__":
    main()
