"""The processes behind the pool: `python -m tests.engine.rank_process FD [MODULE...]` imports once and forks ranks.

One request a line of JSON over the socket FD: {"port": ..., "logs": [...]} with one pipe per rank as file descriptors
makes ranks and answers their process ids; {"reap": id} answers the exit code of one.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import logging
import operator
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import cpuinfo
import deepspeed
import deepspeed.runtime.zero.muon.original_muon  # slow and imported late by DeepSpeed: paid once, here
import numpy as np
import pyarrow
import pytest  # noqa: F401 - the modules of the cases import it
import torch
import torch._dynamo  # likewise
import torch.distributed as td
from torch._dynamo import eval_frame

import ds_dynatrain.checkpoint.arrow
import ds_dynatrain.engine.initialize  # noqa: F401 - likewise
from ds_dynatrain.adapters.groups.device import is_accelerated

CASE_SEED = 1234
REQUEST_BYTES = 1 << 16


@dataclass(frozen=True)
class Kind:
    """Of ranks. backend: of the launch group. at_end: what all of them check at the end of each case, besides."""

    backend: str = "gloo"
    at_end: Callable[[], None] = lambda: None


def main(descriptor: int, modules: Sequence[str], kind: Kind = Kind()) -> None:
    """Serve the test process until it closes the socket. modules: that are imported first."""
    _end_with_parent()
    for module in modules:
        importlib.import_module(module)
    pyarrow.array([0])  # imports pandas, if that is there
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.utils.nvtx.enable_nvtx = False  # for a profiler that nobody runs: two calls around each of DeepSpeed's
    torch.nn.Parameter.__repr__ = object.__repr__  # DeepSpeed writes each one into a text, which it does not print
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # unused, and a killed rank leaves its build lock
    torch.set_num_threads(1)
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)  # a process of its own, each time an operator is loaded
    cpuinfo.get_cpu_info()
    gc.collect()
    gc.freeze()  # half a million objects of torch and DeepSpeed, that each collection in each rank would visit again
    gc.set_threshold(50_000, 20)  # each case ends with a collection
    with socket.socket(fileno=descriptor) as control:
        while True:
            request, pipes, _, _ = socket.recv_fds(control, REQUEST_BYTES, 64)
            if not request:
                return
            control.sendall(json.dumps(_serve(json.loads(request), pipes, control, kind)).encode())


def _serve(request: dict[str, Any], pipes: list[int], control: socket.socket, kind: Kind) -> Any:
    if "reap" in request:
        return os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
    children = []
    for rank, log in enumerate(request["logs"]):
        child = os.fork()
        if child == 0:
            control.close()
            for other in pipes[:rank] + pipes[rank + 1 :]:
                os.close(other)
            _run_rank(rank, len(pipes), request["port"], pipes[rank], log, kind)
        children.append(child)
    for pipe in pipes:
        os.close(pipe)
    return children


def _run_rank(rank: int, size: int, port: int, descriptor: int, log: str, kind: Kind) -> None:
    """Join the launch group, say so, and run one call after the other until the pipe closes. Does not return."""
    _end_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    device = 0 if is_accelerated() else rank  # they share one
    names = {"RANK": rank, "LOCAL_RANK": device, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    pipe = Connection(descriptor)
    deepspeed.init_distributed(kind.backend)
    td.barrier()
    group = td.group.WORLD
    pipe.send_bytes(pickle.dumps((None,)))
    while (call := _next(pipe)) is not None:
        answer = io.BytesIO()
        _Pickler(answer).dump(_answer(call, group, kind.at_end))
        pipe.send_bytes(answer.getbuffer())
    sys.stdout.flush()
    os._exit(0)


class _Pickler(pickle.Pickler):
    """The test process has no accelerator: what was on one is answered from the host."""

    def reducer_override(self, held: Any) -> Any:
        if isinstance(held, torch.Tensor) and held.device.type not in ("cpu", "meta"):
            return held.cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _next(pipe: Connection) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None


def _answer(call: tuple[str, str, dict[str, Any], bool], group: Any, at_end: Callable[[], None]) -> Any:
    """A 1-tuple with the result, or the trace of what was raised."""
    module, name, arguments, meet = call
    random.seed(CASE_SEED)
    np.random.seed(CASE_SEED)
    torch.manual_seed(CASE_SEED)
    before = _arithmetic()
    try:
        function = operator.attrgetter(name)(importlib.import_module(module))
        try:
            result = function(**arguments)
        except SystemExit as end:
            if end.code:
                raise
            result = None
        if meet:
            _check_end(group, before)
            at_end()
            td.barrier()
    except BaseException:
        return traceback.format_exc()
    finally:
        sys.stdout.flush()
    return (result,)


def _arithmetic() -> dict[str, Any]:
    """What decides on the last bit of a sum in this process, and on what is computed at all."""
    on = torch.backends
    return {
        "threads": torch.get_num_threads(),
        "float type": str(torch.get_default_dtype()),
        "precision of products": torch.get_float32_matmul_precision(),
        "oneDNN": on.mkldnn.enabled,
        "attention": [on.cuda.flash_sdp_enabled(), on.cuda.math_sdp_enabled(), on.cuda.mem_efficient_sdp_enabled()],
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "numbers below the smallest": float(torch.tensor(1e-40) * 0.5),
        "gradients": torch.is_grad_enabled(),
        "stance of torch.compile's": eval_frame._stance.stance,  # what is compiled would run eagerly
    }


def _check_end(group: Any, before: dict[str, Any]) -> None:
    """Every case ends in the launch group, without threads of ours and with the arithmetic of before; its garbage is
    gone.

    What is left, modules mostly, is not looked at again: that took a tenth of all the time of the ranks.
    """
    gc.collect()
    gc.freeze()
    if td.group.WORLD is not group:
        raise AssertionError("the case left another default group than the launch's: end it with engine.destroy()")
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("dynatrain")]
    if left:
        raise AssertionError(f"the case left threads: {left}")
    changed = {name: (before[name], left) for name, left in _arithmetic().items() if left != before[name]}
    if changed:
        raise AssertionError(f"the case left the process changed, (before, after): {changed}")


def _end_with_parent() -> None:
    """Be killed when the parent process dies (Linux; elsewhere a closed pipe ends us)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
