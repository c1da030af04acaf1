"""One of the two ranks of the step "nccl probe" of `gpu_steps.py`: times collectives and an abort on a shared card.

gpu_nccl_ranks.py RANK PORT DEVICE FILE

DEVICE is "lab" for the device without hardware in `tests/device`. The store at PORT belongs to neither rank. Each
result is written to FILE as a line of JSON as soon as it is known. Rank 1 stops itself, so that rank 0 can abort a
collective that waits for it; it has to be continued afterwards.
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
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroup, TCPStore

RANKS, SECONDS, REPEATS, QUEUED_SECONDS = (0, 1), 30.0, 5, 0.5
NUMEL = 1 << 18
STOPPING = "stopping"


class Notes:
    """The times of what this rank does, by name, in its file.

    device: DeepSpeed's accelerator.
    """

    def __init__(self, file: str, device: Any) -> None:
        self._file, self._device = Path(file), device

    def write(self, **found: Any) -> None:
        """Write a line."""
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(found) + "\n")

    def timed(self, name: str, work: Callable[[], Any], repeats: int = 1) -> Any:
        """Record the median time of some calls, until the device has finished. Return the last result."""
        times, found = [], None
        for _ in range(repeats):
            begin = time.perf_counter()
            found = work()
            self._device.synchronize()
            times.append(time.perf_counter() - begin)
        self.write(**{name: round(median(times), 4)})
        return found


def collectives(link: Any, group: Any, rank: int, device: torch.device) -> dict[str, Callable[[], bool]]:
    """Return functions by name, each of which runs a collective and returns whether its result is right."""
    mine = torch.full((NUMEL,), 1.0 + rank, device=device)
    part, whole = torch.empty(NUMEL // 2, device=device), torch.empty(2 * NUMEL, device=device)

    def all_reduce() -> bool:
        total = mine.clone()
        group.allreduce([total]).wait()
        return bool((total == 3).all())

    def all_gather() -> bool:
        group._allgather_base(whole, mine).wait()
        return bool((whole[:NUMEL] == 1).all() and (whole[NUMEL:] == 2).all())

    def reduce_scatter() -> bool:
        group._reduce_scatter_base(part, mine).wait()
        return bool((part == 3).all())

    def messages() -> bool:
        came = torch.empty_like(mine)
        link.exchange([(mine, 1 - rank)], [(came, 1 - rank)])
        return bool((came == 2 - rank).all())

    return {
        "all-reduce": all_reduce,
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
        "group of sends and receives": messages,
    }


def main() -> None:
    """Connect, measure, abort, and connect again."""
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if sys.argv[3] == "lab":
        importlib.import_module("tests.device.accelerator").use()
    importlib.import_module("tests.gpu.staging").be_a_host()
    from deepspeed.accelerator import get_accelerator

    from ds_dynatrain.adapters.groups.communicators import (
        Communicator,
        CommunicatorLink,
        Endpoint,
        end,
        go_on,
        make_communicator,
    )
    from ds_dynatrain.adapters.groups.device import compute_device

    device, store = get_accelerator(), TCPStore("127.0.0.1", port, is_master=False)
    device.set_device(0)
    notes = Notes(sys.argv[4], device)

    def connect(name: str) -> Communicator:
        return make_communicator(Endpoint(name, RANKS, rank, PrefixStore(name, store)), SECONDS)

    def grouped(communicator: Communicator) -> ProcessGroup:
        group = ProcessGroup(HashStore(), rank, len(RANKS))
        communicator.serve(group)
        return group

    first = notes.timed("communicator, s", lambda: connect("first"))
    group, link = grouped(first), CommunicatorLink(first, rank, RANKS, go_on)
    for name, work in collectives(link, group, rank, compute_device()).items():
        is_right = notes.timed(f"first {name}, s", work)
        is_right &= notes.timed(f"{name}, s", work, REPEATS)
        notes.write(**{f"{name}, right": is_right})
    if rank == 1:
        store.set(STOPPING, "")
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        store.wait([STOPPING])
        time.sleep(QUEUED_SECONDS)
        group.allreduce([torch.ones(NUMEL, device=compute_device())])  # it never ends, so nothing waits for it
        time.sleep(QUEUED_SECONDS)
    notes.timed("abort beside a stopped peer, s", lambda: end([first], is_broken=True))
    again = notes.timed("communicator anew, s", lambda: connect("anew"))
    work = collectives(None, grouped(again), rank, compute_device())["all-reduce"]
    notes.write(**{"all-reduce anew, right": notes.timed("all-reduce anew, s", work)})
    os._exit(0)  # errors of an aborted library at the end of the process do not matter here


if __name__ == "__main__":
    main()
