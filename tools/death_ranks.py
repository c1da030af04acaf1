"""One rank of `bench_deaths.py`: a job with buddies that records the time of each step, and the raw transport's time.

Started by torchrun agents. $OUT is the folder for its lines, and $WANTED has its settings: '{"size": "125M", "dtype":
"fp32", "stage": 1, "batch": 12, "length": 32, "ranks": 4, "steps": 5}'
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from minimum import traffic
from workload import GPT, SIZES, Samples, config, quiet

import ds_dynatrain
from ds_dynatrain.plan import plan_switch
from ds_dynatrain.space import MASTER, WEIGHT, Layout

REPEATS = 5


def busiest_bytes(engine: Any, before: tuple[int, ...], buddies: dict[int, tuple[int, ...]]) -> int:
    """Return the bytes in the busiest direction of any survivor when the survivors take over state from copies.

    before: the members of the previous world.
    buddies: the member that kept each member's copies. The buddy of the dead member sends these copies, and keeps what
        it needs of them.
    """
    parts, gone = engine._parts, 10**6
    (dead,) = set(before) - set(parts.members)
    names = tuple(gone if member == dead else member for member in before)
    source = Layout(data=len(before), zero_stage=parts.layout.zero_stage)
    space = parts.vps.with_layout(source, names).with_groups(WEIGHT, {tensor.group for tensor in parts.vps.tensors})
    plan = plan_switch(space, parts.layout, parts.members, held_as={WEIGHT: MASTER})
    given = {exchange.peer: exchange.sends.nbytes for exchange in plan.for_member(gone).rounds}
    busy = {member: list(both) for member, both in traffic(plan).items() if member != gone}
    (buddy,) = buddies[dead]
    kept = given.pop(buddy, 0)
    busy[buddy][0] += sum(given.values())
    busy[buddy][1] -= kept
    return max(max(both) for both in busy.values())


def raw_seconds(nbytes: int) -> float:
    """Return the minimum time in which each rank sends and receives this many bytes over gloo, in equal parts to all
    others.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    peers = [peer for peer in range(size) if peer != rank]
    sends, receives = ({peer: torch.ones(nbytes // len(peers) // 4) for peer in peers} for _ in range(2))
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        works = [dist.irecv(receives[peer], peer) for peer in peers] + [dist.isend(sends[peer], peer) for peer in peers]
        for work in works:
            if work is not None:
                work.wait()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Train until a member has died and some more steps are made. Write a line for each step."""
    wanted = json.loads(os.environ["WANTED"])
    quiet()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # so that no rank waits for a compiler
    shape = SIZES[wanted["size"]]
    settings = {**config(wanted["dtype"], wanted["stage"], wanted["batch"]), "gradient_clipping": 1.0}
    torch.manual_seed(0)
    engine, *_ = ds_dynatrain.initialize(
        config={**settings, "dynatrain": {"buddies": {"mode": "copy"}}}, model=GPT(**shape)
    )
    loader = engine.loader(Samples(10**6, wanted["length"], shape["vocabulary"]), num_workers=0)
    after, step, before, buddies = 0, 0, (), dict[int, tuple[int, ...]]()
    with (Path(os.environ["OUT"]) / f"{os.getpid()}.jsonl").open("a", buffering=1) as lines:
        for tokens in loader:
            engine.backward(engine(tokens))
            engine.step()
            if engine.global_steps == step:
                continue
            step = engine.global_steps
            line = {"event": "step", "generation": engine.generation, "rank": engine.rank, "step": step}
            line |= {"pid": os.getpid(), "time": time.time(), "ranks": engine.data, "whole": engine.buddies.step}
            lines.write(json.dumps(line) + "\n")
            if engine.data == wanted["ranks"]:
                before, buddies = engine._parts.members, engine.buddies.buddies
            after += bool(before) and engine.data < wanted["ranks"]
            if after > wanted["steps"]:
                break
        nbytes = busiest_bytes(engine, before, buddies)
        line = {"event": "raw", "generation": engine.generation, "bytes": nbytes, "seconds": raw_seconds(nbytes)}
        lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
