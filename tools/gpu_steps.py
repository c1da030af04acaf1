"""The steps of `gpu_check.py`, each of which returns its results as values for JSON.

Run as `gpu_steps.py STEP FILE SECONDS`.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_speeds import Found, builds, copies, digests, environment, nccl, packing, rounding, sharing
from launch import ENVIRONMENT, HERE, launch
from torch._C._distributed_c10d import TCPStore


def has_device() -> bool:
    """Return whether torch can use a device."""
    return torch.cuda.is_available()


def versions() -> tuple[str, str, str]:
    """Return the versions of torch and of NCCL, with the card's name in between."""
    from ds_dynatrain.adapters.groups.communicators import nccl_version

    return torch.__version__, torch.cuda.get_device_name(), ".".join(map(str, nccl_version()))


def described(name: str) -> str:
    """Return a description of what a step runs: its function with arguments or, for pytest, the tests."""
    step = STEPS[name]
    function, given = (step.func, [*step.args, *step.keywords.values()]) if isinstance(step, partial) else (step, [])
    part = name.removeprefix("core ").removesuffix(f" {NCCL}")
    tests = f": pytest tests/gpu/core -k '{CORE[part]}'" if name.startswith("core ") else ""
    return f"{function.__name__}({', '.join(map(repr, given))}){tests}"


Noting = Callable[[Found], object]
"""Function that records the results so far, in case a step is ended before it returns them."""
NCCL = "nccl"
PROBE = "nccl probe"
SLOW_SECONDS = 2.0
"""If a collective takes longer than this many seconds, the other steps with NCCL use two ranks instead of four."""
POLL_SECONDS = 0.05
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "group of sends and receives")
"""The collectives that the probe times."""
ABORTED = "abort beside a stopped peer, s"


def keep(found: Found) -> None:
    """Do nothing. The default of arguments that record results."""


def probe(device: str = "cuda", limit_seconds: float = 40.0, note: Noting = keep) -> Found:
    """Probe NCCL with two processes on one card: a communicator, collectives, an abort, and a new communicator.

    One process is stopped during the abort. The other steps with NCCL depend on the result; see `ranks`.
    """
    with tempfile.TemporaryDirectory() as folder:
        found, files = Found(), [Path(folder) / f"{rank}.jsonl" for rank in range(2)]
        store = TCPStore("127.0.0.1", 0, is_master=True)
        started = [_prober(rank, store.port, device, file) for rank, file in enumerate(files)]
        end, is_over = time.monotonic() + limit_seconds, False
        try:
            while not is_over and time.monotonic() < end:
                is_over = all(each.poll() is not None for each in started)
                now = {**_noted(files[1]), **_noted(files[0])}
                if ABORTED in now and ABORTED not in found:
                    started[1].send_signal(signal.SIGCONT)
                if now != found:
                    note(found := now)
                time.sleep(POLL_SECONDS)
        finally:
            for each in started:
                each.kill()
                each.wait()
    took = [found[f"{name}, s"] for name in COLLECTIVES if f"{name}, s" in found]
    found["slowest collective, s"] = max(took, default=0.0)
    if not is_over:
        return {**found, "exit": 1, "error": f"not done in {limit_seconds:.0f} s; the last that came: {[*found][-2:]}"}
    is_right = all(found.get(f"{name}, right") for name in (*COLLECTIVES, "all-reduce anew"))
    return {**found, "exit": 0 if is_right and not any(each.returncode for each in started) else 1}


def _prober(rank: int, port: int, device: str, file: Path) -> subprocess.Popen[bytes]:
    names = {**os.environ, **ENVIRONMENT, "NCCL_DEBUG": "INFO", "DS_ACCELERATOR": device if device != "lab" else "cpu"}
    command = [sys.executable, str(HERE / "gpu_nccl_ranks.py"), str(rank), str(port), device, str(file)]
    return subprocess.Popen(command, env=names)


def _noted(file: Path) -> Found:
    """Return what a rank has written so far. Later lines replace earlier ones with the same name."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return {name: value for line in lines if line.endswith("\n") for name, value in json.loads(line).items()}


def ranks_after(found: Found) -> int:
    """Return how many ranks the steps with NCCL use, given the results of the probe."""
    return 2 if found.get("slowest collective, s", 0.0) > SLOW_SECONDS else RANKS


def ranks() -> int:
    """Return how many ranks the steps with NCCL use: `$RANKS`, or four."""
    return int(os.environ.get("RANKS", RANKS))


RANKS, SECONDS = 4, 280.0
"""Number of ranks, and the default time limit of a step in seconds."""
BUDGET_BYTES = SPARE_BYTES = 64 << 20
START = {"data": 2, "zero_stage": 1}
CHANGES = {"2→4": {"data": 4}, "4→2": {"data": 2}, "stage 1→3": {"zero_stage": 3}, "stage 3→1": {"zero_stage": 1}}
"""Changes made one after the other, from `START` and back."""
Note = dict[str, Any]
"""A member's record of one switch; see `gpu_switch_ranks.py`."""


AHEAD, NOW, LATE = "ahead", "now", "late"
RAW = {"auto": "ipc", "nccl": "nccl"}
"""Map from `dynatrain.transport` to the way of the raw copies."""


def pauses(
    dtype: str,
    size: str = "125M",
    device: str = "cuda",
    way: str = "auto",
    modes: Sequence[str] = (NOW, AHEAD, LATE),
    limit_seconds: float = SECONDS,
) -> Found:
    """Make switches with four ranks that share the card. Return the pauses, raw copies, and further measurements.

    These are communicators, the pauses of late switches and, for switches of the mode "now", the peak memory. If the
    raw copies fail, the other results are kept.

    way: as `dynatrain.transport`. With "gloo" all bytes pass through the host's pinned memory; with "nccl" collectives
        also use NCCL.
    """
    if way == NCCL:
        os.environ["COLLECTIVES"] = NCCL
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
    """Make four switches in each round. Return the memory that stays on the device, by its allocator and by
    its driver.
    """
    walk = [{"name": name, "target": to, "mode": "now"} for _ in range(rounds) for name, to in CHANGES.items()]
    notes = _switches(walk, size, device, limit_seconds, dtype="bf16", transport="auto")
    last = [note for note in notes if note["change"]["name"] == walk[-1]["name"]]  # all of them are in the same layout
    each = len(last) // rounds
    found: Found = {"switches": len(walk)}
    for at, name in ((1, "second"), (rounds // 2, "middle"), (rounds - 1, "last")):
        of_round = [note for place, note in enumerate(last) if place % rounds == at]
        allocated, free = max(note["after"] for note in of_round), min(note["free"] for note in of_round)
        found[f"{name} round, of {each} members"] = f"{allocated / 2**20:.1f} MiB allocated, {free / 2**20:.0f} free"
    return found


def pauses_of(notes: list[Note]) -> Found:
    """Return, for each change, the pause and communicators of a switch ahead, the pause of a late one, and peak memory.

    The peak memory is that of a switch in the mode "now", on the fullest member.
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
    """Return, for each change, the pause without communicators and certificate, and whether it meets the bar.

    raw: the milliseconds of raw copies.
    """
    found: Found = {}
    for name, copied in raw.items():
        event = _of(notes, name, AHEAD)[0]["event"]
        phases = event["phases_ms"]
        rest = event["pause_ms"] - event["connect_pause_ms"] - phases["digest"] - phases["verify"]
        verdict = "met" if rest <= bar_ms(copied) else "missed"
        found[f"{name}, bar"] = f"{rest:.0f} ms, raw {copied:.1f} ms, bar {bar_ms(copied):.0f} ms: {verdict}"
    return found


def _of(notes: list[Note], name: str, mode: str) -> list[Note]:
    """Return all members' notes of a change in a mode."""
    return [note for note in notes if (note["change"]["name"], note["change"]["mode"]) == (name, mode)]


def allowed(note: Note) -> int:
    """Return the bytes that may be allocated at the peak.

    This is the sum of the bytes before the switch, the additional bytes of the target, DeepSpeed's gradient bucket at
    stage 3, the budget, and 64 MiB.
    """
    added = note["both"] - note["source"] + note["bucket"]
    return int(note["before"] + added + BUDGET_BYTES + SPARE_BYTES)


def above(note: Note) -> int:
    """Return the bytes by which the peak exceeds `allowed`; negative if it does not."""
    return int(note["peak"]) - allowed(note)


def tests(only: str = "", limit_seconds: float = SECONDS) -> Found:
    """Run the tests in tests/gpu on the device's memory, which also print speeds.

    only: which of them, as pytest's -k.
    """
    return _pytest("tests/gpu/test_cuda.py", ["-s", *(["-k", only] if only else [])], limit_seconds)


def gate(
    size: str = "125M", device: str = "cuda", batch: int = 32, rounds: int = 5, limit_seconds: float = SECONDS
) -> Found:
    """Measure what the gate of elastic jobs adds to a step of a rank that has the card alone. Bar: 1 %."""
    accelerator = device if device != "lab" else "cpu"
    given = {"device": device, "size": size, "batch": batch, "rounds": rounds}
    notes = launch("gpu_gate_ranks.py", 2, limit_seconds, accelerator=accelerator, **given)
    row = notes[0][0]
    share = row["with"] / row["without"] - 1
    verdict = "met" if share <= GATE_BAR else "missed"
    return {"step, ms": round(row["without"], 2), "the gate": f"{100 * share:.2f} % of it, bar 1 %: {verdict}"}


GATE_BAR = 0.01
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
"""Map from one or several parts in `support.proved` to their tests in tests/gpu/core."""


LEFT_OUT = "its tests train on four ranks, and a collective takes too long here"
OF_TWO = {"stages": "a_part_of_the_processes or pairs_of_two"}
"""Map from a part to those of its tests that train on at most two ranks."""


def core(part: str, collectives: str = "gloo", limit_seconds: float = SECONDS) -> Found:
    """Run tests with four ranks on one card, with collectives over gloo, through host memory, or by NCCL."""
    if collectives != NCCL:
        return _pytest("tests/gpu/core", ["-k", CORE[part]], limit_seconds)
    chosen = CORE[part] if ranks() == RANKS else OF_TWO.get(part)
    if chosen is None:
        return {"left out": LEFT_OUT}
    os.environ["COLLECTIVES"] = NCCL
    return _pytest("tests/gpu/core", ["-k", chosen], limit_seconds)


def elastic(limit_seconds: float = SECONDS) -> Found:
    """Run a job whose members share the card, join, leave and are killed, with collectives over gloo, through host
    memory.
    """
    from gpu_elastic import elastic as walk

    return walk(limit_seconds=limit_seconds)


def elastic_nccl(limit_seconds: float = SECONDS, note: Noting = keep) -> Found:
    """Run a job whose members share the card, and join, leave, stand still and are killed, with collectives by NCCL."""
    from gpu_events import events

    os.environ["COLLECTIVES"] = NCCL
    return events(size=3 if ranks() == RANKS else 2, limit_seconds=limit_seconds, note=note)


def batches(limit_seconds: float = SECONDS) -> Found:
    """Measure moves between devices in batches by NCCL. Bar: 1.25 times a raw group call of these bytes, plus 100 ms.

    Ranks that share a card take turns on it. In that case the model is small, and the times say nothing about NCCL.
    """
    if torch.cuda.device_count() >= RANKS:
        return moves(NCCL, limit_seconds=limit_seconds)
    return moves(NCCL, size="8M", repeats=2, members=ranks(), limit_seconds=limit_seconds)


def faulty_batches(limit_seconds: float = SECONDS) -> Found:
    """Run the tests of moves in batches in which one fails and the communicator is made anew."""
    if ranks() < RANKS:
        return {"left out": LEFT_OUT}
    os.environ["COLLECTIVES"] = NCCL
    return _pytest("tests/gpu/core/test_batches.py", [], limit_seconds)


def moves(
    way: str,
    dtype: str = "bf16",
    size: str = "125M",
    device: str = "cuda",
    repeats: int = 5,
    members: int = RANKS,
    limit_seconds: float = SECONDS,
) -> Found:
    """Measure the moves of four switches by "ipc" or "nccl", compared with raw copies of the same bytes between the
    same ranks.
    """
    rows = _moved(way, dtype, size, device, repeats, limit_seconds, members)
    found: Found = {
        name: f"{row['ms']:.1f} ms, raw {row['raw_ms']:.1f} ms, {row['bytes'] / 1e6:.0f} MB in all"
        + ("" if row["ms"] <= bar_ms(row["raw_ms"]) else ", above the bar")
        for name, row in rows.items()
    }
    return {**found, "exit": 0 if all(row["has_arrived"] for row in rows.values()) else 1}


def _moved(
    way: str, dtype: str, size: str, device: str, repeats: int, limit_seconds: float, members: int = RANKS
) -> dict[str, Note]:
    """Return, for each change, the milliseconds of the slowest rank for moves and raw copies, the bytes, and the
    correctness.
    """
    accelerator = device if device != "lab" else "cpu"
    given = {"device": device, "way": way, "size": size, "dtype": dtype, "repeats": repeats}
    notes = launch("gpu_moves_ranks.py", members, limit_seconds, accelerator=accelerator, **given)
    how: dict[str, Callable[[Iterable[Any]], Any]] = {"ms": max, "raw_ms": max, "bytes": sum, "has_arrived": all}
    return {
        rows[0]["change"]: {name: over(row[name] for row in rows) for name, over in how.items()}
        for rows in zip(*notes.values(), strict=True)
    }


def bar_ms(raw: float) -> float:
    """Return the bar in milliseconds for moves, and for pauses without communicators and certificate.

    raw: the milliseconds of a copy of the same bytes.
    """
    return 1.25 * raw + 100


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


def proved(found: dict[str, Found], torch_version: str, card: str, nccl_version: str) -> str:
    """Return the lines for `support/proved.py` about the steps that have passed.

    Collectives by NCCL are named if the steps have passed with them.
    """
    from ds_dynatrain.support.proved import PARTS

    today, lines = time.strftime("%Y-%m-%d"), []
    for part in PARTS:
        by_nccl = BY_NCCL.get(part, f"core {part} {NCCL}")
        passed = [step for step in (by_nccl, part, f"core {part}") if found.get(step, {}).get("exit") == 0]
        if not passed:
            continue
        is_nccl = passed[0] == by_nccl
        where = f"{ranks()} ranks on 1 × {card}, NCCL {nccl_version} over sockets" if is_nccl else f"1 × {card}"
        only = NCCL if is_nccl else f"'{passed[0]}'"
        lines.append(
            f'("cuda", "{part}"): Proof("{where}", "{today}", "torch {torch_version}", '
            f'"python tools/gpu_check.py --only {only}"),'
        )
    return "\n".join(lines)


BY_NCCL = {"groups": f"core stages {NCCL}", "elastic": f"elastic {NCCL}", "batches": f"batches {NCCL}"}
"""Map from a part in `support.proved` to the step that proves it with NCCL, if the step has another name."""
STEPS: dict[str, Callable[..., Found]] = {
    "environment": environment,
    "copies": copies,
    "digests": digests,
    "packing": packing,
    "sharing": sharing,
    "rounding": rounding,
    "nccl of one rank": nccl,
    PROBE: probe,
    **{f"pauses {dtype}": partial(pauses, dtype) for dtype in ("fp32", "bf16")},
    "pauses 1.3B": partial(pauses, "bf16", "1.3B", modes=(AHEAD, LATE)),
    "pauses late": partial(pauses, "bf16", modes=(AHEAD, LATE)),
    "pauses gloo": partial(pauses, "bf16", way="gloo"),
    f"pauses {NCCL}": partial(pauses, "bf16", way=NCCL),
    "many": many,
    "gate": gate,
    "builds": builds,
    "tests": tests,
    "digest bar": partial(tests, "half_the_speed"),
    **{f"core {part}": partial(core, part) for part in CORE},
    **{f"core {part} {NCCL}": partial(core, part, NCCL) for part in CORE},
    **{f"pulls {size}": partial(moves, "ipc", size=size) for size in ("125M", "1.3B")},
    f"batches {NCCL}": batches,
    f"failed batches {NCCL}": faulty_batches,
    "elastic": elastic,
    f"elastic {NCCL}": elastic_nccl,
}
FIRST = ("stages", "members")
"""Parts of the core that come before an elastic job."""
GROUPS: dict[str, dict[str, float]] = {
    NCCL: {
        PROBE: 40,
        **{f"core {part} {NCCL}": 90 for part in FIRST},
        f"elastic {NCCL}": 200,
        f"batches {NCCL}": 50,
        f"failed batches {NCCL}": 50,
        **{f"core {part} {NCCL}": 60 for part in CORE if part not in FIRST},
        "gate": 60,
        "digest bar": 30,
        "pauses late": 90,
        "many": 90,
    }
}
"""Map from a name for several steps to these steps with their time limits, in the order that suits a few minutes on a
card."""


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    step = STEPS[sys.argv[1]]
    may_have = {
        "limit_seconds": float(sys.argv[3]),
        "note": lambda found: Path(sys.argv[2]).write_text(json.dumps(found)),
    }
    taken = inspect.signature(step).parameters
    found = step(**{name: value for name, value in may_have.items() if name in taken})
    Path(sys.argv[2]).write_text(json.dumps(found))
