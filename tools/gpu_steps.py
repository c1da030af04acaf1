"""The steps of `gpu_check.py`: each returns what it found as values for JSON. Run as `gpu_steps.py STEP FILE`."""

from __future__ import annotations

import importlib
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
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    found: Found = {
        "card": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
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
    from ds_dynatrain.transfer import digest, digest_pieces
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


def builds() -> Found:
    """Seconds that DeepSpeed's operators take to compile here."""
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    major, minor = torch.cuda.get_device_capability()
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"  # images set lists that DeepSpeed cannot read ("10.0a")
    found: Found = {}
    for builder in (FusedAdamBuilder(), CPUAdamBuilder()):
        found[f"{builder.name}, s"] = round(once(lambda: builder.load(verbose=False)), 1)  # noqa: B023
    return found


def tests() -> Found:
    """The tests of tests/gpu on the device's memory, and their speeds."""
    return _pytest("tests/gpu/test_cuda.py", ["-s"])


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
}
"""A part of `support.proved`, or several -> its tests among those of tests/gpu/core."""


def core(part: str) -> Found:
    """Four ranks on the one card, collectives staged on gloo."""
    return _pytest("tests/gpu/core", ["-k", CORE[part]])


def _pytest(path: str, arguments: list[str]) -> Found:
    command = [sys.executable, "-m", "pytest", path, "-q", "-p", "no:cacheprovider", "--no-header", *arguments]
    root = Path(__file__).parents[1]
    names = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=names)
    return {"exit": done.returncode, "last lines": done.stdout[-3000:], "errors": done.stderr[-1000:]}


def proved(found: dict[str, Found], torch_version: str, card: str) -> str:
    """The lines for `support/proved.py` of what has passed."""
    from ds_dynatrain.support.proved import PARTS

    today = time.strftime("%Y-%m-%d")
    passed = [part for part in PARTS if found.get(f"core {part}", {}).get("exit") == 0]
    return "\n".join(
        f'("cuda", "{part}"): Proof("1 × {card}", "{today}", "torch {torch_version}", '
        f"\"python tools/gpu_check.py --only 'core {part}'\"),"
        for part in passed
    )


STEPS: dict[str, Callable[[], Found]] = {
    "environment": environment,
    "copies": copies,
    "digests": digests,
    "packing": packing,
    "nccl": nccl,
    "builds": builds,
    "tests": tests,
    **{f"core {part}": partial(core, part) for part in CORE},
}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    Path(sys.argv[2]).write_text(json.dumps(STEPS[sys.argv[1]]()))
