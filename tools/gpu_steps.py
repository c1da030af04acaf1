"""The steps of `gpu_check.py`: each returns what it found as values for JSON. Run as `gpu_steps.py
STEP FILE SECONDS`.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_speeds import Found, builds, copies, digests, environment, nccl, packing, rounding, sharing
from launch import ENVIRONMENT, HERE, launch


def has_device() -> bool:
    """Whether torch sees a card."""
    return torch.cuda.is_available()


def versions() -> tuple[str, str]:
    """Of torch, and the card's name."""
    return torch.__version__, torch.cuda.get_device_name()


def shared_nccl(device: str = "cuda", limit_seconds: float = 120.0) -> Found:
    """By two and by four processes of one card: collectives, a process that is killed, and aborting for its sake."""
    if device != "lab" and (missing := _share_by_nccl()):
        return {"error": missing}
    found, end = Found(), time.monotonic() + limit_seconds
    for ranks in (2, 4):
        try:
            rows = _sharing(ranks, device, end)
        except subprocess.TimeoutExpired:
            return {**found, "error": f"{ranks} ranks were not done in time"}
        found |= {f"{ranks} ranks, {name}": max(row[name] for row in rows) for name in rows[0]}
    return found


def _sharing(ranks: int, device: str, end: float) -> list[Found]:
    """What each of them has measured, but the one that is killed. end: until when, by the monotonic clock."""
    from torch._C._distributed_c10d import TCPStore

    names = {**os.environ, **ENVIRONMENT, "DS_ACCELERATOR": device if device != "lab" else "cpu"}
    store, script = TCPStore("127.0.0.1", 0, is_master=True), str(HERE / "gpu_nccl_ranks.py")
    commands = [[sys.executable, script, str(rank), str(ranks), str(store.port), device] for rank in range(ranks)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, env=names) for command in commands]
    try:
        said = [each.communicate(timeout=max(end - time.monotonic(), 1))[0] for each in started[:-1]]
        return [json.loads(line.splitlines()[-1]) for line in said]
    finally:
        for each in started:
            each.kill()
            each.wait()


RANKS, SECONDS = 4, 280.0
"""How long a step may take, where nobody says it."""
BUDGET_BYTES = SPARE_BYTES = 64 << 20
START = {"data": 2, "zero_stage": 1}
CHANGES = {"2→4": {"data": 4}, "4→2": {"data": 2}, "stage 1→3": {"zero_stage": 3}, "stage 3→1": {"zero_stage": 1}}
"""One after the other, from `START` and back."""
Note = dict[str, Any]
"""What a rank says of one switch: see `gpu_switch_ranks.py`."""


AHEAD, NOW, LATE = "ahead", "now", "late"
RAW = {"auto": "ipc", "nccl": "nccl"}
"""`dynatrain.transport` -> what a raw copy of the same bytes goes by."""


def pauses(
    dtype: str,
    size: str = "125M",
    device: str = "cuda",
    way: str = "auto",
    modes: Sequence[str] = (NOW, AHEAD, LATE),
    limit_seconds: float = SECONDS,
) -> Found:
    """Switches of four ranks that share the card: pauses beside raw copies, communicators, pauses of late ones, and, of
    those of the mode "now", what is allocated at the peak. What was found stays where the raw copies fail.

    way: `dynatrain.transport`; "gloo" has all bytes pass through the host's pinned memory, "nccl" has collectives go
    over NCCL, too.
    """
    if way == NCCL and (missing := _share_by_nccl()):
        return {"error": missing}
    begin = time.monotonic()
    walk = [{"name": name, "target": to, "mode": mode} for mode in modes for name, to in CHANGES.items()]
    found = pauses_of(notes := _switches(walk, size, device, limit_seconds, dtype=dtype, transport=way))
    if way in RAW:
        left = limit_seconds - (time.monotonic() - begin)
        try:
            rows = _moved(RAW[way], dtype, size, device, 5, left)
        except SystemExit as failed:
            return {**found, "raw copies": str(failed)[-500:]}
        found |= judged(notes, {name: row["raw_ms"] for name, row in rows.items()})
    return found


def _switches(walk: list[dict[str, Any]], size: str, device: str, limit_seconds: float, **given: Any) -> list[Note]:
    accelerator = device if device != "lab" else "cpu"
    given |= {"device": device, "size": size, "walk": walk, "start": START, "budget": BUDGET_BYTES}
    notes = launch("gpu_switch_ranks.py", RANKS, limit_seconds, accelerator=accelerator, **given)
    return [note for member in notes.values() for note in member]


def many(size: str = "8M", device: str = "cuda", rounds: int = 25, limit_seconds: float = SECONDS) -> Found:
    """Four switches a round: what stays on the device, as its allocator counts it and as its driver does."""
    walk = [{"name": name, "target": to, "mode": "now"} for _ in range(rounds) for name, to in CHANGES.items()]
    notes = _switches(walk, size, device, limit_seconds, dtype="bf16", transport="auto")
    last = [note for note in notes if note["change"]["name"] == walk[-1]["name"]]  # all of them in the same layout
    each = len(last) // rounds
    found: Found = {"switches": len(walk)}
    for at, name in ((1, "second"), (rounds // 2, "middle"), (rounds - 1, "last")):
        of_round = [note for place, note in enumerate(last) if place % rounds == at]
        allocated, free = max(note["after"] for note in of_round), min(note["free"] for note in of_round)
        found[f"{name} round, of {each} members"] = f"{allocated / 2**20:.1f} MiB allocated, {free / 2**20:.0f} free"
    return found


def pauses_of(notes: list[Note]) -> Found:
    """By change: pauses and communicators of those asked for ahead, pauses of late ones, and memory of those that took
    place now, on the fullest member.
    """
    found: Found = {}
    for name in CHANGES:
        event = _of(notes, name, AHEAD)[0]["event"]
        phases = ", ".join(f"{phase} {took:.0f}" for phase, took in event["phases_ms"].items())
        found[name] = f"{event['pause_ms']:.0f} ms ({phases})"
        found[f"{name}, communicators"] = (
            f"{event['communicators_built']} built, {event['communicators_kept']} kept, {event['connect_ms']:.0f} ms, "
            f"{event['connect_pause_ms']:.0f} of them in the pause"
        )
        for note in _of(notes, name, LATE)[:1]:
            late = note["event"]
            followed = f"then {late['late_ms']:.0f} ms, of which a step waited {late['late_wait_ms']:.0f}"
            found[f"{name}, late"] = f"{late['pause_ms']:.0f} ms, {followed}"
        if looked_at := _of(notes, name, NOW):
            fullest = max(looked_at, key=above)
            found[f"{name}, peak MiB"] = f"{fullest['peak'] / 2**20:.0f}, allowed {allowed(fullest) / 2**20:.0f}"
    if looked_at := [note for name in CHANGES for note in _of(notes, name, NOW)]:
        worst = max(map(above, looked_at))
        found["memory at the peak"] = "within the bound" if worst <= 0 else f"{worst / 2**20:.0f} MiB above the bound"
    return found


def judged(notes: list[Note], raw: dict[str, float]) -> Found:
    """By change: the pause without communicators and certificate, and whether it meets the bar. raw: ms of copies."""
    found: Found = {}
    for name, copied in raw.items():
        event = _of(notes, name, AHEAD)[0]["event"]
        phases = event["phases_ms"]
        rest = event["pause_ms"] - event["connect_pause_ms"] - phases["digest"] - phases["verify"]
        verdict = "met" if rest <= bar_ms(copied) else "missed"
        found[f"{name}, bar"] = f"{rest:.0f} ms, raw {copied:.1f} ms, bar {bar_ms(copied):.0f} ms: {verdict}"
    return found


def _of(notes: list[Note], name: str, mode: str) -> list[Note]:
    """All members' notes of a change that was asked for in a mode."""
    return [note for note in notes if (note["change"]["name"], note["change"]["mode"]) == (name, mode)]


def allowed(note: Note) -> int:
    """Bytes that may be there at the peak: what was there, what the target adds to the source, DeepSpeed's bucket of
    gradients at stage 3, the budget, 64 MiB.
    """
    added = note["both"] - note["source"] + note["bucket"]
    return int(note["before"] + added + BUDGET_BYTES + SPARE_BYTES)


def above(note: Note) -> int:
    """Bytes above that, negative below."""
    return int(note["peak"]) - allowed(note)


def tests(limit_seconds: float = SECONDS) -> Found:
    """The tests of tests/gpu on the device's memory, and their speeds."""
    return _pytest("tests/gpu/test_cuda.py", ["-s"], limit_seconds)


CORE = {
    "stages": "a_part_of_all_pairs or a_part_of_the_processes or members_wake or chain_of_20",
    "late": "changes_train_as_without_it",
    "members": "idle or woken or streams_stay or dropout",
    "faults": "faults",
    "checkpoints": "save_after_a_switch",
    "offload": "offload",
    "pipe": "pipe",
    "tensor": "tensor_parallel",
    "expert": "test_expert",
    "sequence": "sequence_parallel",
    "compile": "compiled_parts",
    "fused": "fused",
    "engines": "each_trains_as_if_alone",
    "loops": "test_trainer or test_lightning",
}
"""A part of `support.proved`, or several -> its tests among those of tests/gpu/core."""


NCCL, SHARING_NCCL = "nccl", (2, 30, 0)


def core(part: str, collectives: str = "gloo", limit_seconds: float = SECONDS) -> Found:
    """Four ranks on the one card: collectives staged on gloo, or NCCL's own."""
    if collectives == NCCL and (missing := _share_by_nccl()):
        return {"error": missing}
    return _pytest("tests/gpu/core", ["-k", CORE[part]], limit_seconds)


def elastic(collectives: str, limit_seconds: float = SECONDS) -> Found:
    """Members that share the card come, go and are killed: collectives staged on gloo, or NCCL's own."""
    from gpu_elastic import elastic as walk

    if collectives != NCCL:
        return walk(limit_seconds=limit_seconds)
    if missing := _share_by_nccl():
        return {"error": missing}
    return walk(transport=NCCL, limit_seconds=limit_seconds)


def batches(size: str = "125M", device: str = "cuda", repeats: int = 5, limit_seconds: float = SECONDS) -> Found:
    """Moves between devices in batches, by NCCL, beside a raw group call of the same bytes; bar: 1.25 times that, and
    100 ms. On one card its ranks share that, which NCCL permits from 2.30 on.
    """
    if device != "lab" and torch.cuda.device_count() < RANKS and (missing := _share_by_nccl()):
        return {"error": missing}
    return moves(NCCL, "bf16", size, device, repeats, limit_seconds)


def moves(
    way: str,
    dtype: str = "bf16",
    size: str = "125M",
    device: str = "cuda",
    repeats: int = 5,
    limit_seconds: float = SECONDS,
) -> Found:
    """The moves of four switches by "ipc" or "nccl", beside raw copies of as many bytes between the same ranks."""
    rows = _moved(way, dtype, size, device, repeats, limit_seconds)
    found: Found = {
        name: f"{row['ms']:.1f} ms, raw {row['raw_ms']:.1f} ms, {row['bytes'] / 1e6:.0f} MB in all"
        + ("" if row["ms"] <= bar_ms(row["raw_ms"]) else ", above the bar")
        for name, row in rows.items()
    }
    return {**found, "exit": 0 if all(row["has_arrived"] for row in rows.values()) else 1}


def _moved(way: str, dtype: str, size: str, device: str, repeats: int, limit_seconds: float) -> dict[str, Note]:
    """By change: ms of the slowest rank, for the moves and for raw copies; bytes of all; whether all has arrived."""
    accelerator = device if device != "lab" else "cpu"
    given = {"device": device, "way": way, "size": size, "dtype": dtype, "repeats": repeats}
    notes = launch("gpu_moves_ranks.py", RANKS, limit_seconds, accelerator=accelerator, **given)
    how: dict[str, Callable[[Iterable[Any]], Any]] = {"ms": max, "raw_ms": max, "bytes": sum, "has_arrived": all}
    return {
        rows[0]["change"]: {name: over(row[name] for row in rows) for name, over in how.items()}
        for rows in zip(*notes.values(), strict=True)
    }


def bar_ms(raw: float) -> float:
    """What moves may take, and a pause without communicators and certificate; raw: a copy of the same bytes."""
    return 1.25 * raw + 100


def _share_by_nccl() -> str:
    """Let ranks share a card and communicate by NCCL; or why those that share one cannot under the one that is there.

    They take turns on the card, so their times say nothing of NCCL between cards.
    """
    from ds_dynatrain.adapters.communicators import nccl_version

    if (version := nccl_version()) < SHARING_NCCL:
        return f"NCCL {'.'.join(map(str, version))} takes a card once; from 2.30 on ranks may share one"
    os.environ |= {"COLLECTIVES": NCCL, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return ""


def _pytest(path: str, arguments: list[str], limit_seconds: float) -> Found:
    command = [sys.executable, "-m", "pytest", path, "-q", "-p", "no:cacheprovider", "--no-header", *arguments]
    root = Path(__file__).parents[1]
    names = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=names, timeout=limit_seconds)
    except subprocess.TimeoutExpired as late:
        shown = (late.stdout or b"").decode(errors="replace")
        return {"exit": 124, "error": f"not done in {limit_seconds:.0f} s", "last lines": shown[-3000:]}
    return {"exit": done.returncode, "last lines": done.stdout[-3000:], "errors": done.stderr[-1000:]}


def proved(found: dict[str, Found], torch_version: str, card: str) -> str:
    """The lines for `support/proved.py` of what has passed."""
    from ds_dynatrain.support.proved import PARTS

    today = time.strftime("%Y-%m-%d")
    steps = {part: part if part in ("elastic", "batches") else f"core {part}" for part in PARTS}
    passed = {part: step for part, step in steps.items() if found.get(step, {}).get("exit") == 0}
    return "\n".join(
        f'("cuda", "{part}"): Proof("1 × {card}", "{today}", "torch {torch_version}", '
        f"\"python tools/gpu_check.py --only '{step}'\"),"
        for part, step in passed.items()
    )


STEPS: dict[str, Callable[[], Found]] = {
    "environment": environment,
    "copies": copies,
    "digests": digests,
    "packing": packing,
    "sharing": sharing,
    "rounding": rounding,
    "nccl": nccl,
    "nccl shared": shared_nccl,
    **{f"pauses {dtype}": partial(pauses, dtype) for dtype in ("fp32", "bf16")},
    "pauses 1.3B": partial(pauses, "bf16", "1.3B", modes=(AHEAD, LATE)),
    "pauses gloo": partial(pauses, "bf16", way="gloo"),
    "pauses nccl": partial(pauses, "bf16", way=NCCL),
    "many": many,
    "builds": builds,
    "tests": tests,
    **{f"core {part}": partial(core, part) for part in CORE},
    **{f"core {part} nccl": partial(core, part, NCCL) for part in CORE},
    **{f"pulls {size}": partial(moves, "ipc", size=size) for size in ("125M", "1.3B")},
    "batches": batches,
    "elastic": partial(elastic, "gloo"),
    "elastic nccl": partial(elastic, NCCL),
}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    step = STEPS[sys.argv[1]]
    given = {"limit_seconds": float(sys.argv[3])} if "limit_seconds" in inspect.signature(step).parameters else {}
    Path(sys.argv[2]).write_text(json.dumps(step(**given)))
