"""One rank of `bench_weights.py`: sends its weights by our receivers and parameter by parameter, in turns.

The loop is that of OpenRLHF's `broadcast_to_vllm` and TRL's `_iter_named_params`, in short: each parameter is gathered
by `deepspeed.zero.GatheredParameters`, announced to the receiver by a request, and broadcast.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import deepspeed
import torch
import torch.distributed as td
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from launch import Notes
from memory import high_water, reset_high_water, resident
from variants import gpt_step, model_of
from workload import SIZES, Samples, config, quiet

import ds_dynatrain
from ds_dynatrain.checkpoint.extents import name_of
from ds_dynatrain.weights import send
from ds_dynatrain.weights.receivers import Group
from ds_dynatrain.weights.receivers.servers import VLLM, Requests, TorchEndpoint, free_port

BATCH = 4


def connected(server: Requests) -> TorchEndpoint | None:
    """Return the trainer's end of a group with the loop's receiver; None on all ranks except the first."""
    if td.get_rank():
        return None
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2, "rank_offset": 1}
    with ThreadPoolExecutor(1) as beside:
        request = beside.submit(server.ask, "POST", "/init", info)
        group = TorchEndpoint(info, torch.device("cpu"), 120, request)
        request.result()
    return group


class Loop:
    """The usual loop over parameters.

    is_asked: whether each parameter is announced by a request, or only broadcast.
    """

    def __init__(self, server: Requests, group: TorchEndpoint | None, is_asked: bool) -> None:
        self._server, self._group, self._is_asked = server, group, is_asked

    def send(self, engine: Any) -> dict[str, Any]:
        """Send all parameters. Return the numbers of collectives and requests, and the bytes."""
        gathers = nbytes = 0
        before = self._server.count
        rows = [(name, each.ds_shape, each.dtype) for name, each in engine.module.named_parameters()]
        with ThreadPoolExecutor(1) as beside:
            requests = []
            if self._group is not None and not self._is_asked:  # one announcement for all parameters
                tensors = [[name, name_of(dtype), list(shape)] for name, shape, dtype in rows]
                requests.append(beside.submit(self._server.ask, "POST", "/update", {"tensors": tensors}))
            for name, parameter in engine.module.named_parameters():
                gathers += parameter.ds_status != ZeroParamStatus.AVAILABLE
                with deepspeed.zero.GatheredParameters([parameter]):
                    if self._group is None:
                        continue
                    if self._is_asked:
                        row = [name, name_of(parameter.dtype), list(parameter.shape)]
                        requests.append(beside.submit(self._server.ask, "POST", "/update", {"tensors": [row]}))
                    self._group.broadcast(parameter.data.contiguous().view(-1).view(torch.uint8), 0)
                    nbytes += parameter.data.nbytes
                    if self._is_asked:
                        requests[-1].result()
            for request in requests:
                request.result()
        return {"collectives": gathers, "rpcs": self._server.count - before, "nbytes": nbytes}


def main() -> None:
    """Send in all ways in turn, and record the figures."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    notes, shape = Notes(folder, td.get_rank()), SIZES[wanted["size"]]
    settings = config(wanted["dtype"], wanted["stage"], BATCH)
    settings["optimizer"]["params"]["lr"] = 3e-6
    settings["dynatrain"] = {
        "layout": {"data": td.get_world_size(), "zero_stage": wanted["stage"]},
        "timeout_seconds": 120,
    }
    engine, *_ = ds_dynatrain.initialize(model=model_of(None, shape), config=settings)
    batches = iter(engine.loader(Samples(10**6, 32, shape["vocabulary"]), num_workers=0))
    group, deltas, server = Group(wanted["group"]), Group(wanted["deltas"]), VLLM(wanted["vllm"], workers=1, pause=None)
    sparse, today = VLLM(wanted["sparse"], workers=1, pause=None, sparse=True), Requests(wanted["loop"])
    endpoint = connected(today)
    loops = {"loop": Loop(today, endpoint, True), "loop without requests": Loop(today, endpoint, False)}

    def ours(receiver: Any, **how: Any) -> dict[str, Any]:
        update = send(engine, receiver, **how)
        return {name: getattr(update, name) for name in ("collectives", "rpcs", "nbytes", "is_delta")}

    ways: dict[str, Callable[[], dict[str, Any]]] = {
        **{name: lambda loop=loop: loop.send(engine) for name, loop in loops.items()},  # type: ignore[misc]
        "group": lambda: ours(group),
        "vllm": lambda: ours(server),
        "group, deltas": lambda: ours(deltas, delta=True),
        "vllm, deltas": lambda: ours(sparse, delta=True),
    }
    for lap in range(wanted["laps"] + 1):
        gpt_step(engine, batches)
        for way, call in ways.items():
            td.barrier()
            reset_high_water()
            held, begin = resident(), time.perf_counter()
            found = call()
            seconds = time.perf_counter() - begin
            notes.write({"lap": lap, "way": way, "seconds": seconds, "extra": high_water() - held, **found})


if __name__ == "__main__":
    main()
