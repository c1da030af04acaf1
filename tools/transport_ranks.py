"""One rank of `bench_transport.py`: each even member sends to the next odd one, all pairs at once.

torchrun ... transport_ranks.py FOLDER '{"megabytes": [16, 256], "repeats": 5}'
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as td
from launch import Notes
from raw import RawTransport

from ds_dynatrain.transfer import allocate, prefault

WAYS = ("auto", "gloo")


def copies(nbytes: int, repeats: int) -> list[float]:
    """Return the seconds of plain copies inside this process, between buffers that were used before."""
    source, target = (allocate(nbytes, torch.uint8) for _ in range(2))
    prefault(source)
    prefault(target)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return times[1:]


def main() -> None:
    """Record the seconds of each transport for each size."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    member, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    td.init_process_group("gloo")
    notes, everyone = Notes(folder, member), tuple(range(size))
    for way in WAYS:
        transport = RawTransport(member, size, way)
        for megabytes in wanted["megabytes"]:
            nbytes = megabytes << 20
            peers = {member + 1: (nbytes, 0)} if member % 2 == 0 else {member - 1: (0, nbytes)}
            times = transport.seconds(peers, everyone, wanted["repeats"])
            notes.write({"way": way, "megabytes": megabytes, "seconds": times})
            if way == WAYS[-1]:
                transport.meet(everyone)
                if member % 2:
                    notes.write({"way": "copy", "megabytes": megabytes, "seconds": copies(nbytes, wanted["repeats"])})
                transport.meet(everyone)


if __name__ == "__main__":
    main()
