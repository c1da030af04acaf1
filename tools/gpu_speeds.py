"""The steps of `gpu_check.py` that need only one process: what the parts do on the card, and how fast."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch

Found = dict[str, Any]
NBYTES = 1 << 30
REPEATS = 9
ROWS, ROW_BYTES, ROW_STEP = 65536, 4096, 16384
"""Runs as in a matrix that is cut by columns."""


def seconds(work: Callable[[], object]) -> float:
    """Return the median seconds between two synchronizations. The first call, which compiles and allocates, does not
    count.
    """
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def rate(work: Callable[[], object], nbytes: int = NBYTES) -> float:
    """Return the speed of a call in GB/s."""
    return round(nbytes / seconds(work) / 1e9, 1)


def environment() -> Found:
    """Return the card, the driver, versions, and what the package can import here."""
    from ds_dynatrain.adapters.groups.communicators import nccl_version

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
    for name in (
        "triton",
        "deepspeed",
        "ds_dynatrain.transfer",
        "ds_dynatrain.adapters.versions.deepspeed_versions",
        "ds_dynatrain.engine",
    ):
        try:
            module = importlib.import_module(name)
            found[name] = getattr(module, "__version__", "imports")
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def copies() -> Found:
    """Return the GB/s of copies on the device, and between it and the host, pageable and pinned."""
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
    """Return the seconds of one call."""
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def digests() -> Found:
    """Return the GB/s of digests on the device, of whole buffers and runs, compared with a copy and the
    host's digest.
    """
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
    """Return the GB/s of packing from the device into host memory and back, in one run and in 4096 runs."""
    from ds_dynatrain.transfer.regions import regions_of
    from ds_dynatrain.transfer.series import Matrix

    found: Found = {}
    data = torch.randn(NBYTES // 4, device="cuda").view(torch.uint8)
    for kind, staged in (("pageable", torch.empty(NBYTES, dtype=torch.uint8)), ("pinned", None)):
        room = torch.empty(NBYTES, dtype=torch.uint8).pin_memory() if staged is None else staged
        for pieces in (1, 4096):
            held, size = regions_of(data), NBYTES // pieces
            rows = [Matrix(0, 0, size, pieces, size)]
            found[f"pack {pieces}, {kind}"] = rate(lambda: held.pack(rows, room))  # noqa: B023
            found[f"unpack {pieces}, {kind}"] = rate(lambda: held.unpack(rows, room))  # noqa: B023
    return found


LENDER = """
import os, sys, torch
from ds_dynatrain.transfer.device_memory import device_memory
from ds_dynatrain.transfer.neighbors import permit_readers
held = torch.arange({numel}, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
shared = device_memory(held.device).share(held)
pinned = held[:1024].cpu().pin_memory()
permit_readers()
print(shared.handle.hex(), shared.offset, os.getpid(), pinned.data_ptr(), flush=True)
sys.stdin.read()
"""
"""A process whose memory another one reads, on the card and pinned on the host, until its input ends."""


def rounding(device: str = "cuda") -> Found:
    """Return whether kernels give the same bits for all memory positions, and again, as an exact job would need."""
    from ds_dynatrain.exact.trial import try_kernels

    trials = [try_kernels(device=device) for _ in range(3)]
    moving = sorted({name for trial in trials for name in trial.moving})
    return {
        "bits follow the place of operands in": ", ".join(moving) or "nothing",
        "bits are the same again": len({trial.bits for trial in trials}) == 1,
    }


def sharing() -> Found:
    """Return the GB/s of reading another process's memory on this card by CUDA IPC.

    The memory is read in one run, and in the rows of a cut matrix. The result also says whether the kernel can read the
    process's pinned memory.
    """
    from ds_dynatrain.errors import TransferError
    from ds_dynatrain.transfer.device_memory import device_memory
    from ds_dynatrain.transfer.neighbors import read_memory
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
        except TransferError as error:  # earlier measurements stay in the results
            found["pinned memory equal"] = str(error)
        lender.stdin.close()
    return found


def nccl() -> Found:
    """Return the seconds to build, abort and shut down a communicator of one rank, and its device memory."""
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
    """Return the seconds that DeepSpeed's operators take to compile here."""
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    major, minor = torch.cuda.get_device_capability()
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"  # images set lists that DeepSpeed cannot read ("10.0a")
    found: Found = {}
    for builder in (FusedAdamBuilder(), CPUAdamBuilder()):
        found[f"{builder.name}, s"] = round(once(lambda: builder.load(verbose=False)), 1)  # noqa: B023
    return found
