"""One rank of the steps "pauses" of `gpu_steps.py`. All ranks share one card. Their collectives run over gloo, which
copies through host memory, or over NCCL.

torchrun ... gpu_switch_ranks.py FOLDER '{"device": "cuda", "size": "125M", "dtype": "bf16", "walk": [...], ...}'

"device" is "lab" for the device without hardware in `tests/device`, which also counts memory. A switch is requested
*now*, so that nothing else allocates memory until it is over; *ahead*, two steps before it takes effect; or *late*,
which is ahead with masters and moments moved during training.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from launch import Notes

BATCH, LENGTH = 12, 8


def choose_collectives(device: str) -> str:
    """Set how DeepSpeed's accelerator communicates, before anything else is imported. Return the back-end's name."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if device == "lab":
        importlib.import_module("tests.device.accelerator").use()
        return str(importlib.import_module("tests.device.lab").BACKEND)
    return str(importlib.import_module("tests.gpu.staging").chosen_backend())


def storages(*sides: Any) -> int:
    """Return the bytes of device memory behind the buffers, each storage counted once."""
    found = {}
    for buffers in sides:
        for held in buffers.values():
            memory = held.untyped_storage()
            found[memory.data_ptr()] = 0 if held.device.type == "cpu" else memory.nbytes()
    return sum(found.values())


class Watch:
    """The memory on this member's device during a switch, in bytes.

    state: the bytes of the source, and of both sides together.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self.state = {"source": 0, "both": 0}
        self.begin()

    def begin(self) -> None:
        """Start a measurement. From here on only a switch allocates memory."""
        self._device.synchronize()
        self._device.reset_peak_memory_stats()
        self.before = int(self._device.memory_allocated())

    def install(self) -> None:
        """Replace the method with which a transaction measures its memory, to record the bytes of its buffers
        as well.
        """
        from ds_dynatrain.reshard.switch import Transaction

        watch, own = self, Transaction._measure

        def measure(self: Transaction) -> None:
            own(self)
            watch.state = {"source": storages(self.source), "both": storages(self.source, self.target)}

        Transaction._measure = measure  # type: ignore[method-assign]

    def found(self) -> dict[str, int]:
        """Return the measurements since `begin`."""
        self._device.synchronize()
        peak, after = self._device.max_memory_allocated(), self._device.memory_allocated()
        free = int(self._device.available_memory())
        return {"before": self.before, "peak": int(peak), "after": int(after), "free": free, **self.state}


def main() -> None:
    """Train, and make the switches of the walk."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    os.environ["LOCAL_RANK"] = "0"  # the ranks share the card
    backend = choose_collectives(wanted["device"])
    import deepspeed
    import torch.distributed as td
    from deepspeed.accelerator import get_accelerator
    from workload import GPT, SIZES, Samples, config

    import ds_dynatrain
    from ds_dynatrain.adapters.zero.state import bucket_bytes

    torch.set_num_threads(1)
    deepspeed.init_distributed(backend, verbose=False)
    notes, shape, walk = Notes(folder, td.get_rank()), SIZES[wanted["size"]], wanted["walk"]
    settings = config(wanted["dtype"], wanted["start"]["zero_stage"], BATCH)
    ours = {"layout": wanted["start"], "timeout_seconds": 120, "memory_budget_bytes": wanted["budget"]}
    ours["transport"] = wanted["transport"]
    # built on the device, because four copies in host memory would take 5 GB each at 1.3B
    with torch.device(get_accelerator().current_device_name()):
        model = GPT(**shape)
    engine, *_ = ds_dynatrain.initialize(model=model, config={**settings, "dynatrain": ours})
    watch = Watch(get_accelerator())
    watch.install()

    def note(event: ds_dynatrain.SwitchEvent) -> None:
        change = walk[event.generation - 2]
        bucket = bucket_bytes(engine, engine.layout.zero_stage)
        found = {"change": change, "event": json.loads(event.to_json()), "bucket": bucket}
        notes.write({**found, **watch.found()})
        watch.begin()

    engine.on_switch(note)
    batches, pending = iter(engine.loader(Samples(10**6, LENGTH, shape["vocabulary"]), num_workers=0)), None
    while True:
        tokens = next(batches).to(engine.device)
        engine.backward(engine(tokens))
        engine.step()
        if engine.global_steps < 2 or (pending is not None and not pending.done):
            continue
        done = engine.generation - 1
        if done == len(walk):
            break
        watch.begin()
        ahead, late = 0 if walk[done]["mode"] == "now" else 2, walk[done]["mode"] == "late"
        pending = engine.switch(at=engine.global_steps + ahead, late=late, **walk[done]["target"])


if __name__ == "__main__":
    main()
