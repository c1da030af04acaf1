"""One rank of the step "nccl shared" of `gpu_steps.py`: what collectives take among processes that share a card, and
what it takes to abort them when one is killed.

gpu_nccl_ranks.py RANK RANKS PORT DEVICE

"DEVICE" is "lab" for the one without hardware of `tests/device`. The store at PORT is not a rank's. All but the last
rank print a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

SECONDS, REPEATS, QUEUED_SECONDS = 60.0, 9, 0.5
SIZES = {"4 B": 1, "1 MiB": 1 << 18, "64 MiB": 1 << 24}


def milliseconds(device: Any, work: Callable[[], object]) -> float:
    """Of the work and of what it queues."""
    begin = time.perf_counter()
    work()
    device.synchronize()
    return round(1e3 * (time.perf_counter() - begin), 2)


def main() -> None:
    """Connect, measure, and abort."""
    rank, ranks, port = map(int, sys.argv[1:4])
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if sys.argv[4] == "lab":
        importlib.import_module("tests.device.accelerator").use()
    from deepspeed.accelerator import get_accelerator

    from ds_dynatrain.adapters.communicators import Endpoint, end, make_communicator
    from ds_dynatrain.adapters.device import compute_device

    device, store = get_accelerator(), TCPStore("127.0.0.1", port, is_master=False)
    device.set_device(0)

    def connect(name: str, members: list[int]) -> Any:
        where = Endpoint(name, members, members.index(rank), PrefixStore(name, store))
        return make_communicator(where, SECONDS)

    def reduce(communicator: Any, numel: int) -> None:
        communicator.backend.allreduce([torch.ones(numel, device=compute_device())]).wait()

    found, made = dict[str, Any](), []
    for name in ("first", "second"):  # what is aborted together
        begin = time.perf_counter()
        made.append(connect(name, list(range(ranks))))
        found[f"connect the {name}, ms"] = round(1e3 * (time.perf_counter() - begin))
    for size, numel in SIZES.items():
        times = [milliseconds(device, lambda numel=numel: reduce(made[0], numel)) for _ in range(REPEATS)]  # type: ignore[misc]
        found[f"all-reduce of {size}, ms"] = median(times[1:])
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for communicator in made:
        communicator.backend.allreduce([torch.ones(1, device=compute_device())])  # nobody waits: it never ends
    time.sleep(QUEUED_SECONDS)
    found["abort both, ms"] = milliseconds(device, lambda: end(made, is_broken=True))
    if ranks > 2:
        left = connect("left", list(range(ranks - 1)))
        found["connect and all-reduce without it, ms"] = milliseconds(device, lambda: reduce(left, 1))
    print(json.dumps(found), flush=True)
    os._exit(0)  # what an aborted library does at the end of a process is not the question


if __name__ == "__main__":
    main()
