"""The steps of `gpu_check.py`: each returns what it found as values for JSON. Run as
`gpu_steps.py STEP FILE SECONDS`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from launch import ENVIRONMENT, HERE, launch

Found = dict[str, Any]
NBYTES = 1 << 30
REPEATS = 9
ROWS, ROW_BYTES, ROW_STEP = 65536, 4096, 16384
"""Row runs as a matrix cut by columns gives them."""


def has_device() -> bool:
    """Whether torch sees a card."""
    return torch.cuda.is_available()


def versions() -> tuple[str, str]:
    """Of torch, and the card's name."""
    return torch.__version__, torch.cuda.get_device_name()


def seconds(work: Callable[[], object]) -> float:
    """Median seconds between two synchronisations; the first pass, which compiles and allocates, is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def rate(work: Callable[[], object], nbytes: int = NBYTES) -> float:
    """GB/s."""
    return round(nbytes / seconds(work) / 1e9, 1)


def environment() -> Found:
    """Card, driver, versions, and what the package can import here."""
    from ds_dynatrain.adapters.communicators import nccl_version

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    found: Found = {
        "card": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl_version())),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    }
    for name in ("triton", "deepspeed", "ds_dynatrain.transfer", "ds_dynatrain.adapters.names", "ds_dynatrain.engine"):
        try:
            module = importlib.import_module(name)
            found[name] = getattr(module, "__version__", "imports")
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def copies() -> Found:
    """GB/s of data copied, on the device and between it and the host, pageable and pinned."""
    data, other = (torch.randn(NBYTES // 4, device="cuda") for _ in range(2))
    pageable = torch.randn(NBYTES // 4)
    pinned = pageable.pin_memory()
    return {
        "device to device": rate(lambda: other.copy_(data)),
        "pageable to device": rate(lambda: data.copy_(pageable)),
        "device to pageable": rate(lambda: pageable.copy_(data)),
        "pinned to device": rate(lambda: data.copy_(pinned)),
        "device to pinned": rate(lambda: pinned.copy_(data)),
        "pin 1 GiB, s": round(once(lambda: pageable.pin_memory()), 2),
    }


def once(work: Callable[[], object]) -> float:
    """Seconds of one pass."""
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def digests() -> Found:
    """GB/s of digests on the device, whole buffers and row runs, beside a copy there and the host's digest."""
    import numpy as np

    from ds_dynatrain.space import BufferId, Pieces
    from ds_dynatrain.transfer import Form, ReadyDigest, digest, digest_pieces
    from ds_dynatrain.transfer.device_digest import by_arithmetic

    found: Found = {}
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(NBYTES // dtype.itemsize, dtype=dtype)
        on_device, name = values.cuda(), str(dtype).removeprefix("torch.")
        found[f"{name}, torch's arithmetic"] = rate(lambda values=on_device: by_arithmetic(values.view(torch.uint8), 0))  # type: ignore[misc]
        found[f"{name}, whole"] = rate(lambda values=on_device: digest(values))  # type: ignore[misc]
        found[f"{name}, equal to the host's"] = digest(on_device[4097:-3].contiguous(), 12345) == digest(
            values[4097:-3].contiguous(), 12345
        )
        starts = np.arange(ROWS, dtype=np.int64) * (ROW_STEP // dtype.itemsize)
        length = ROW_BYTES // dtype.itemsize
        bases = np.array([0, ROWS * ROW_STEP // dtype.itemsize], dtype=np.int64)
        buffer = BufferId("group", 0)
        at, number = np.arange(ROWS, dtype=np.int64) * length, np.zeros(ROWS, dtype=np.int64)
        pieces = Pieces(starts, starts + length, number, at, (buffer,))
        held, on_host = {buffer: on_device[: ROWS * length]}, {buffer: values[: ROWS * length]}
        same = (digest_pieces(pieces, held, bases) == digest_pieces(pieces, on_host, bases)).all()
        found[f"{name}, runs equal to the host's"] = bool(same)
        found[f"{name}, runs of 4 KiB"] = rate(lambda: digest_pieces(pieces, held, bases), ROWS * ROW_BYTES)  # noqa: B023
        ready = ReadyDigest.of(pieces, Form.all_of(held, (buffer,)), bases)
        found[f"{name}, runs of 4 KiB, cut ahead"] = rate(lambda: ready.digests(held), ROWS * ROW_BYTES)  # noqa: B023
    return found


def packing() -> Found:
    """GB/s of packing on the device into host memory and back, in one run and in 4096."""
    import numpy as np

    from ds_dynatrain.transfer.regions import Regions
    from ds_dynatrain.transfer.series import matrices

    found: Found = {}
    data = torch.randn(NBYTES // 4, device="cuda").view(torch.uint8)
    for kind, staged in (("pageable", torch.empty(NBYTES, dtype=torch.uint8)), ("pinned", None)):
        room = torch.empty(NBYTES, dtype=torch.uint8).pin_memory() if staged is None else staged
        for pieces in (1, 4096):
            length = np.full(pieces, NBYTES // pieces)
            held = Regions((data,), np.zeros(pieces, dtype=np.int64), np.arange(pieces) * (NBYTES // pieces), length)
            rows = matrices(held.which, held.begin, held.length)
            found[f"pack {pieces}, {kind}"] = rate(lambda: held.pack(rows, room))  # noqa: B023
            found[f"unpack {pieces}, {kind}"] = rate(lambda: held.unpack(rows, room))  # noqa: B023
    return found


LENDER = """
import os, sys, torch
from ds_dynatrain.transfer.cross_memory import permit_readers
from ds_dynatrain.transfer.device_memory import device_memory
held = torch.arange({numel}, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
shared = device_memory(held.device).share(held)
pinned = held[:1024].cpu().pin_memory()
permit_readers()
print(shared.handle.hex(), shared.offset, os.getpid(), pinned.data_ptr(), flush=True)
sys.stdin.read()
"""
"""A process whose memory another one reads, on the card and pinned on the host, until its input ends."""


def sharing() -> Found:
    """GB/s of another process's memory on this card, read by CUDA IPC: in one run, and in rows of a cut matrix; whether
    the kernel reads its pinned memory.
    """
    from ds_dynatrain.errors import TransferError
    from ds_dynatrain.transfer.cross_memory import read_memory
    from ds_dynatrain.transfer.device_memory import device_memory
    from ds_dynatrain.transfer.series import Matrix

    numel, found = NBYTES // 4, Found()
    into = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    memory = device_memory(into.device)
    if memory is None:
        return {"error": "no way to read it"}
    command = [sys.executable, "-c", LENDER.format(numel=numel)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lender:
        if lender.stdout is None or lender.stdin is None:
            return {"error": "no pipes to it"}
        handle, offset, process, pinned = lender.stdout.readline().split()
        begin = time.perf_counter()
        opened = memory.open(bytes.fromhex(handle))
        found["open, ms"] = round(1e3 * (time.perf_counter() - begin), 2)
        whole = Matrix(0, 0, 0, 1, NBYTES)
        found["read 1 GiB"] = rate(lambda: memory.read(opened + int(offset), whole, into, whole))
        expected = torch.arange(numel, dtype=torch.int32, device="cuda")
        found["equal"] = bool(torch.equal(into.view(torch.int32), expected))
        rows = Matrix(0, 0, ROW_STEP, ROWS, ROW_BYTES)
        packed = Matrix(0, 0, ROW_BYTES, ROWS, ROW_BYTES)
        found["read 65,536 rows of 4 KiB"] = rate(
            lambda: memory.read(opened + int(offset), rows, into, packed), ROWS * ROW_BYTES
        )
        found["equal rows"] = bool(
            torch.equal(
                into[: ROWS * ROW_BYTES].view(ROWS, -1), expected.view(torch.uint8).view(ROWS, -1)[:, :ROW_BYTES]
            )
        )
        memory.close(opened)
        few = torch.zeros(1024, dtype=torch.int32)
        try:
            read_memory(int(process), int(pinned), few.view(torch.uint8))
            found["pinned memory equal"] = bool(torch.equal(few, torch.arange(1024, dtype=torch.int32)))
        except TransferError as error:  # what was measured before it stays
            found["pinned memory equal"] = str(error)
        lender.stdin.close()
    return found


def nccl() -> Found:
    """A communicator of one rank: seconds to build, device memory, seconds to abort and to shut down."""
    from torch._C._distributed_c10d import HashStore, PrefixStore
    from torch.distributed import ProcessGroupNCCL

    found: Found = {}
    torch.cuda.set_device(0)
    torch.ones(1, device="cuda")
    store = HashStore()
    for ending in ("abort", "shutdown"):
        free = torch.cuda.mem_get_info()[0]
        begin = time.perf_counter()
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=60)
        group = ProcessGroupNCCL(PrefixStore(ending, store), 0, 1, options)
        group.eager_connect_single_device(torch.device("cuda", 0))
        found[f"build before {ending}, s"] = round(time.perf_counter() - begin, 3)
        found[f"memory before {ending}, MiB"] = (free - torch.cuda.mem_get_info()[0]) >> 20
        ones = [torch.ones(1 << 20, device="cuda")]
        group.allreduce(ones).wait()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        found[f"memory after an all-reduce, {ending}, MiB"] = (free - torch.cuda.mem_get_info()[0]) >> 20
        begin = time.perf_counter()
        getattr(group, ending)()
        found[f"{ending}, s"] = round(time.perf_counter() - begin, 3)
        del group
        found[f"memory left behind after {ending}, MiB"] = (free - torch.cuda.mem_get_info()[0]) >> 20
    return found


def shared_nccl(device: str = "cuda", seconds: float = 120.0) -> Found:
    """By two and by four processes of one card: collectives, a process that is killed, and aborting for its sake."""
    from torch._C._distributed_c10d import TCPStore

    if device != "lab" and (missing := _share_by_nccl()):
        return {"error": missing}
    found, end = Found(), time.monotonic() + seconds
    names = {**os.environ, **ENVIRONMENT, "DS_ACCELERATOR": device if device != "lab" else "cpu"}
    for ranks in (2, 4):
        store = TCPStore("127.0.0.1", 0, is_master=True)
        command = [sys.executable, str(HERE / "gpu_nccl_ranks.py")]
        started = [
            subprocess.Popen(
                [*command, *map(str, (rank, ranks, store.port)), device], stdout=subprocess.PIPE, env=names
            )
            for rank in range(ranks)
        ]
        try:
            said = [each.communicate(timeout=max(end - time.monotonic(), 1))[0] for each in started[:-1]]
            rows = [json.loads(line.splitlines()[-1]) for line in said]
            found |= {f"{ranks} ranks, {name}": max(row[name] for row in rows) for name in rows[0]}
        finally:
            for each in started:
                each.kill()
    return found


RANKS, SECONDS = 4, 280.0
"""How long a step may take, where nobody says it."""
BUDGET_BYTES = SPARE_BYTES = 64 << 20
START = {"data": 2, "zero_stage": 1}
CHANGES = {"2→4": {"data": 4}, "4→2": {"data": 2}, "stage 1→3": {"zero_stage": 3}, "stage 3→1": {"zero_stage": 1}}
"""One after the other, from `START` and back."""
Note = dict[str, Any]
"""What a rank says of one switch: see `gpu_switch_ranks.py`."""


def pauses(dtype: str, size: str = "125M", device: str = "cuda", way: str = "auto", seconds: float = SECONDS) -> Found:
    """Switches of four ranks that share the card: pauses, communicators, and what is allocated at the peak.

    way: `dynatrain.transport`; "gloo" has all bytes pass through the host's pinned memory, "nccl" has collectives go
    over NCCL, too.
    """
    if way == NCCL and (missing := _share_by_nccl()):
        return {"error": missing}
    walk = [{"name": name, "target": to, "mode": mode} for mode in ("now", "ahead") for name, to in CHANGES.items()]
    return pauses_of(_switches(walk, size, device, seconds, dtype=dtype, transport=way))


def _switches(walk: list[dict[str, Any]], size: str, device: str, seconds: float, **given: Any) -> list[Note]:
    accelerator = device if device != "lab" else "cpu"
    given |= {"device": device, "size": size, "walk": walk, "start": START, "budget": BUDGET_BYTES}
    notes = launch("gpu_switch_ranks.py", RANKS, seconds, accelerator=accelerator, **given)
    return [note for member in notes.values() for note in member]


def many(size: str = "8M", device: str = "cuda", rounds: int = 25, seconds: float = SECONDS) -> Found:
    """Four switches a round: what stays on the device, as its allocator counts it and as its driver does."""
    walk = [{"name": name, "target": to, "mode": "now"} for _ in range(rounds) for name, to in CHANGES.items()]
    notes = _switches(walk, size, device, seconds, dtype="bf16", transport="auto")
    last = [note for note in notes if note["change"]["name"] == walk[-1]["name"]]  # all of them in the same layout
    each = len(last) // rounds
    found: Found = {"switches": len(walk)}
    for at, name in ((1, "second"), (rounds // 2, "middle"), (rounds - 1, "last")):
        of_round = [note for place, note in enumerate(last) if place % rounds == at]
        allocated, free = max(note["after"] for note in of_round), min(note["free"] for note in of_round)
        found[f"{name} round, of {each} members"] = f"{allocated / 2**20:.1f} MiB allocated, {free / 2**20:.0f} free"
    return found


def pauses_of(notes: list[Note]) -> Found:
    """By change: pauses and communicators of those asked for ahead, memory of the others, on the fullest member."""
    found: Found = {}
    for name in CHANGES:
        of_change = [note for note in notes if note["change"]["name"] == name]
        event = next(note["event"] for note in of_change if note["change"]["mode"] == "ahead")
        fullest = max((note for note in of_change if note["change"]["mode"] == "now"), key=above)
        phases = ", ".join(f"{phase} {took:.0f}" for phase, took in event["phases_ms"].items())
        found[name] = f"{event['pause_ms']:.0f} ms ({phases})"
        found[f"{name}, communicators"] = (
            f"{event['communicators_built']} built, {event['communicators_kept']} kept, {event['connect_ms']:.0f} ms, "
            f"{event['connect_pause_ms']:.0f} of them in the pause"
        )
        found[f"{name}, peak MiB"] = f"{fullest['peak'] / 2**20:.0f}, allowed {allowed(fullest) / 2**20:.0f}"
    worst = max(above(note) for note in notes if note["change"]["mode"] == "now")
    found["memory at the peak"] = "within the bound" if worst <= 0 else f"{worst / 2**20:.0f} MiB above the bound"
    return found


def allowed(note: Note) -> int:
    """Bytes that may be there at the peak: what was there, what the target adds to the source, DeepSpeed's bucket of
    gradients at stage 3, the budget, 64 MiB.
    """
    added = note["both"] - note["source"] + note["bucket"]
    return int(note["before"] + added + BUDGET_BYTES + SPARE_BYTES)


def above(note: Note) -> int:
    """Bytes above that, negative below."""
    return int(note["peak"]) - allowed(note)


def builds() -> Found:
    """Seconds that DeepSpeed's operators take to compile here."""
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    major, minor = torch.cuda.get_device_capability()
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"  # images set lists that DeepSpeed cannot read ("10.0a")
    found: Found = {}
    for builder in (FusedAdamBuilder(), CPUAdamBuilder()):
        found[f"{builder.name}, s"] = round(once(lambda: builder.load(verbose=False)), 1)  # noqa: B023
    return found


def tests(seconds: float = SECONDS) -> Found:
    """The tests of tests/gpu on the device's memory, and their speeds."""
    return _pytest("tests/gpu/test_cuda.py", ["-s"], seconds)


CORE = {
    "stages": "a_part_of_all_pairs or a_part_of_the_processes or members_wake or chain_of_20",
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
}
"""A part of `support.proved`, or several -> its tests among those of tests/gpu/core."""


NCCL, SHARING_NCCL = "nccl", (2, 30, 0)


def core(part: str, collectives: str = "gloo", seconds: float = SECONDS) -> Found:
    """Four ranks on the one card: collectives staged on gloo, or NCCL's own."""
    if collectives == NCCL and (missing := _share_by_nccl()):
        return {"error": missing}
    return _pytest("tests/gpu/core", ["-k", CORE[part]], seconds)


def elastic(collectives: str, seconds: float = SECONDS) -> Found:
    """Members that share the card come, go and are killed: collectives staged on gloo, or NCCL's own."""
    from gpu_elastic import elastic as walk

    if collectives != NCCL:
        return walk(seconds=seconds)
    if missing := _share_by_nccl():
        return {"error": missing}
    return walk(transport=NCCL, seconds=seconds)


def batches(size: str = "125M", device: str = "cuda", repeats: int = 5, seconds: float = SECONDS) -> Found:
    """Moves between devices in batches, by NCCL, beside a raw group call of the same bytes; bar: 1.25 times that, and
    100 ms. On one card its ranks share that, which NCCL permits from 2.30 on.
    """
    if device != "lab" and torch.cuda.device_count() < RANKS and (missing := _share_by_nccl()):
        return {"error": missing}
    accelerator = device if device != "lab" else "cpu"
    given = {"device": device, "size": size, "repeats": repeats}
    notes = launch("gpu_batches_ranks.py", RANKS, seconds, accelerator=accelerator, **given)
    found: Found = {}
    for rows in zip(*notes.values(), strict=True):
        moves, raw = (max(row[name] for row in rows) for name in ("ms", "raw_ms"))
        is_met = "" if moves <= 1.25 * raw + 100 else ", above the bar"
        sent = sum(row["bytes"] for row in rows) / 1e6
        found[rows[0]["change"]] = f"{moves:.1f} ms, raw {raw:.1f} ms, {sent:.0f} MB in all{is_met}"
    return {**found, "exit": 0 if all(row["has_arrived"] for rows in notes.values() for row in rows) else 1}


def _share_by_nccl() -> str:
    """Let ranks share a card and communicate by NCCL; or why those that share one cannot under the one that is there.

    Their kernels take turns on the card: such a collective takes tens of milliseconds, which says nothing of NCCL.
    """
    from ds_dynatrain.adapters.communicators import nccl_version

    if (version := nccl_version()) < SHARING_NCCL:
        return f"NCCL {'.'.join(map(str, version))} takes a card once; from 2.30 on ranks may share one"
    os.environ |= {"COLLECTIVES": NCCL, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return ""


def _pytest(path: str, arguments: list[str], seconds: float) -> Found:
    command = [sys.executable, "-m", "pytest", path, "-q", "-p", "no:cacheprovider", "--no-header", *arguments]
    root = Path(__file__).parents[1]
    names = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=names, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        shown = (late.stdout or b"").decode(errors="replace")
        return {"exit": 124, "error": f"not done in {seconds:.0f} s", "last lines": shown[-3000:]}
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
    "nccl": nccl,
    "nccl shared": shared_nccl,
    **{f"pauses {dtype}": partial(pauses, dtype) for dtype in ("fp32", "bf16")},
    "pauses gloo": partial(pauses, "bf16", way="gloo"),
    "pauses nccl": partial(pauses, "bf16", way=NCCL),
    "many": many,
    "builds": builds,
    "tests": tests,
    **{f"core {part}": partial(core, part) for part in CORE},
    **{f"core {part} nccl": partial(core, part, NCCL) for part in CORE},
    "batches": batches,
    "elastic": partial(elastic, "gloo"),
    "elastic nccl": partial(elastic, NCCL),
}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    step = STEPS[sys.argv[1]]
    given = {"seconds": float(sys.argv[3])} if "seconds" in inspect.signature(step).parameters else {}
    Path(sys.argv[2]).write_text(json.dumps(step(**given)))
