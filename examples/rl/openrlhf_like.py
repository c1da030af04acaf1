"""Sending weights from ZeRO-3 to a rollout engine: by a loop over parameters, and by `send`.

torchrun --standalone --nproc-per-node=4 examples/rl/openrlhf_like.py

The loop is like OpenRLHF's `broadcast_to_vllm`. It gathers each parameter on all ranks, sends the rollout engine its
name and shape in a request, and broadcasts it from rank 0. `send` moves the parts that each rank owns, in a few
messages. The rollout engine is a process without a model, which answers requests by XML-RPC instead of Ray.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from xmlrpc.client import ServerProxy
from xmlrpc.server import SimpleXMLRPCServer

import deepspeed
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store

import ds_dynatrain
from ds_dynatrain.weights import send
from ds_dynatrain.weights.receivers import Group, GroupReceiver

sys.path.append(str(Path(__file__).parents[1]))  # the model is shared with the other examples
from gpt import CONTEXT, GPT

PATIENCE = timedelta(seconds=60)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="of the model (default 12)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default 256)")
    parser.add_argument("--laps", type=int, default=3, help="syncs of each kind after the first (default 3)")
    # set in the rollout engine's process
    parser.add_argument("--rollouts", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def meeting() -> Store:
    """Return the part of torchrun's store in which trainer and rollout engine find each other."""
    return PrefixStore("rl", TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=PATIENCE))


def pair(store: Store, rank: int) -> Any:
    """Return a process group of the trainer's rank 0 and the rollout engine, which is rank 1."""
    return ProcessGroupGloo(PrefixStore("pair", store), rank, 2, PATIENCE)


def be_rollouts() -> None:
    """Act as the rollout engine: receive weights in both ways, until the trainer ends it."""
    store, held = meeting(), dict[str, torch.Tensor]()
    receiver = GroupReceiver("127.0.0.1:0")
    server = SimpleXMLRPCServer(("127.0.0.1", 0), logRequests=False, allow_none=True)
    store.set("requests", f"http://127.0.0.1:{server.server_address[1]}")
    store.set("group", receiver.address)
    group = pair(store, 1)

    def update_weight(name: str, shape: list[int]) -> None:
        held[name] = torch.empty(shape)
        group.broadcast([held[name]], BroadcastOptions()).wait()

    def take(laps: int) -> None:
        threading.Thread(target=lambda: [receiver.update() for _ in range(laps)]).start()

    def differing() -> list[str]:
        found = receiver.weights
        return sorted(name for name in held | found if not torch.equal(held[name], found[name]))

    functions: list[Any] = [update_weight, take, differing]
    for function in functions:
        server.register_function(function)
    server.register_function(lambda: threading.Thread(target=server.shutdown).start(), "end")
    server.serve_forever()
    receiver.close()


class Loop:
    """The loop over parameters. Make it on every rank.

    collectives, requests: the numbers of collectives and requests in the last sync.
    """

    def __init__(self, engine: Any, store: Store) -> None:
        self.engine, self.url, self.collectives, self.requests = engine, store.get("requests").decode(), 0, 0
        self.group = pair(store, 0) if engine.global_rank == 0 else None

    def sync(self) -> None:
        """Send all weights to the rollout engine."""
        self.collectives = self.requests = 0
        with ThreadPoolExecutor(1) as threads:
            for name, parameter in self.engine.module.named_parameters():
                self.collectives += parameter.ds_status.name == "NOT_AVAILABLE"
                with deepspeed.zero.GatheredParameters([parameter]):
                    if self.group is not None:
                        asked = threads.submit(ServerProxy(self.url).update_weight, name, list(parameter.shape))
                        self.group.broadcast([parameter.data], BroadcastOptions()).wait()
                        asked.result()
                self.collectives, self.requests = self.collectives + 1, self.requests + 1


def timed(laps: int, sync: Any) -> tuple[Any, list[float]]:
    """Call `sync` once and then `laps` times. Return (last result, seconds of each call)."""
    result, seconds = None, []
    for _ in range(laps + 1):
        begin = time.monotonic()
        result = sync()
        seconds.append(time.monotonic() - begin)
    return result, seconds


def main() -> None:
    """Train one step, sync in both ways, and print a table."""
    args = arguments()
    if args.rollouts:
        return be_rollouts()
    store = meeting()
    is_first = os.environ["RANK"] == "0"
    process = subprocess.Popen([sys.executable, __file__, "--rollouts"]) if is_first else None
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "dynatrain": {},
    }
    torch.manual_seed(0)
    engine, *_ = ds_dynatrain.initialize(model=GPT(args.layers, args.width), config=config)
    engine.boundary()
    tokens = torch.randint(256, (8 // engine.layout.data, CONTEXT))
    engine.backward(engine(tokens, tokens))
    engine.step()

    loop, group = Loop(engine, store), Group(store.get("group").decode())
    _, one_by_one = timed(args.laps, loop.sync)
    if process is not None:
        ServerProxy(loop.url).take(args.laps + 1)
    sent, at_once = timed(args.laps, lambda: send(engine, group))
    group.close()
    if process is not None:
        rollouts: Any = ServerProxy(loop.url)
        apart = rollouts.differing()
        print(f"{'':12} {'collectives':>11} {'requests':>8} {'seconds':>8} {'the first':>9}")
        print(row("loop", loop.collectives, loop.requests, one_by_one))
        print(row("send", sent.collectives, sent.rpcs, at_once))
        print(f"{sent.tensors} tensors, {sent.nbytes / 1e6:.1f} MB; {apart or 'all equal'} at the rollout engine")
        rollouts.end()
        process.wait(60)


def row(name: str, collectives: int, requests: int, seconds: list[float]) -> str:
    """Return a line of the table, with the fastest sync and the first one."""
    return f"{name:12} {collectives:11} {requests:8} {min(seconds[1:]):8.3f} {seconds[0]:9.3f}"


if __name__ == "__main__":
    main()
