"""A user's training script: DeepSpeed's loop, and nothing about membership. Run by torchrun, also for static runs.

Writes a line of JSON for each step and each event into `$OUT/PID.jsonl`: the loss and the samples of every micro-batch
that this rank had. It ends after `$STEPS` optimizer steps, or at the end of the step in which `$OUT/stop` appears; if a
number of steps stands in that, after so many. `$GATE` names a file in `$OUT` that it waits for, warm, but unknown to
the job; `$LATE` is how many seconds it takes from `initialize` to the loop, or names a file in `$OUT` that it waits for
there. `$FAULT`: see `faulted.py`. The main thread of process PID stands still for ever once `$OUT/hang-PID` is there.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

import ds_dynatrain
from ds_dynatrain.reshard.process import PROCESS
from tests.elastic import faulted
from tests.engine import ulysses
from tests.engine.models import WORDS, Sequences, decay_groups, small_gpt
from tests.engine.pipelines import pipeline

OUT = Path(os.environ["OUT"])
STEPS = int(os.environ.get("STEPS", "100000"))
SETTINGS: dict[str, Any] = json.loads(os.environ["SETTINGS"])
WIDTH = int(os.environ.get("WIDTH", "15"))
WORKERS = int(os.environ.get("WORKERS", "0"))
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.02"))
HOW = os.environ.get("HOW", "")
KIND = os.environ.get("KIND", "gpt")
"""Of the model: "gpt", "pipeline", "tensor", "experts", "sequence", or "meta" for a large one without memory."""
FEED = os.environ.get("FEED", "")
"""Of a pipeline: "own" for an iterator of the user's own, which the second pipeline never gets anything from once
`$OUT/hold` is there."""
FROZEN = tuple(filter(None, os.environ.get("FROZEN", "").split(",")))
"""What the names of frozen parameters begin with."""
GATE = os.environ.get("GATE", "")
LATE = os.environ.get("LATE", "0")
LIMIT = int(os.environ.get("LIMIT", "0"))
"""Megabytes, see `limited`."""
DISK = os.environ.get("DISK", "")
"""Anything: once there is an engine no file can be opened to be written, but under `$OUT` and `/dev`."""


class Numbered(Sequences):
    """Sample i with its number."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:  # type: ignore[override]
        return *super().__getitem__(index), index


def hang() -> None:
    """A deadlock."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_at(gate: str) -> None:
    """Until that file is there, or the agent has gone."""
    agent = os.getppid()
    while gate and not (OUT / gate).exists():
        if os.getppid() != agent:
            os._exit(1)
        time.sleep(0.05)


def built() -> tuple[torch.nn.Module, Any]:
    """(the model, what is trained of it)."""
    if KIND in ("tensor", "experts"):
        from tests.engine.language_models import MODELS
        from tests.engine.mixtures import autoep_model, with_loss

        model = autoep_model("mixtral") if KIND == "experts" else with_loss(MODELS["llama of 4 kv"]())
        return model, list(model.parameters())
    if KIND == "sequence":
        model = ulysses.long_gpt()
        return model, list(model.parameters())
    if KIND == "meta":
        with torch.device("meta"):
            model = Large()
        return model, list(model.parameters())
    model = pipeline(os.environ.get("PIPELINE", "tied")) if KIND == "pipeline" else small_gpt(width=WIDTH)
    for name, held in model.named_parameters():
        held.requires_grad_(held.requires_grad and not (FROZEN and name.startswith(FROZEN)))
    return model, decay_groups(model)


class Large(torch.nn.Module):
    """Layers of a megabyte each, called as `model(inputs, targets)` for a loss."""

    def __init__(self, width: int = 512, depth: int = 72) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, width)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(depth)])
        self.out = torch.nn.Linear(width, WORDS)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.words(inputs)
        for layer in self.layers:
            hidden = hidden + 0.1 * torch.tanh(layer(hidden))
        return F.cross_entropy(self.out(hidden).flatten(0, 1), targets.flatten())


def limited(megabytes: int) -> None:
    """Let this process take no more than so much in addition to what it has, as the kernel counts memory of its own.

    0 ends it.
    """
    has = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    limit = (has << 10) + (megabytes << 20)
    most = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_DATA, (limit if megabytes else most, most))


def refuse_to_write(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: OSError for what a read-only disk does not allow."""
    if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    path, changes = os.path.abspath(os.fsdecode(arguments[0])), os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if arguments[2] & changes and not path.startswith((str(OUT), "/dev/")):
        raise OSError(errno.EROFS, "a read-only disk", path)


class Script:
    def __init__(self) -> None:
        self.log = (OUT / f"{os.getpid()}.jsonl").open("a", buffering=1)
        if HOW == "dies while warming up":
            os._exit(3)
        if KIND == "pipeline":  # which asks for a world before there is the job's: the node's own
            deepspeed.init_distributed()
            torch.distributed.barrier()
        if LIMIT:
            limited(LIMIT)
        model, trained = self.model()
        wait_at(GATE)
        self.engine, *_ = ds_dynatrain.initialize(model=model, model_parameters=trained, config=SETTINGS)
        self.loader = self.engine.loader(self.samples(), num_workers=WORKERS)
        self.engine.on_switch(self.note)
        if FEED == "own":
            self.engine.on_switch(self.give)
            self.give()
        self.say(event="ready")
        if DISK:
            sys.addaudithook(refuse_to_write)
        if LATE.isdecimal():
            time.sleep(int(LATE))
        else:
            wait_at(LATE)

    def model(self) -> tuple[torch.nn.Module, Any]:
        """(the model, what is trained of it)."""
        return built()

    def samples(self) -> torch.utils.data.Dataset[Any]:
        """What it trains on."""
        if KIND == "sequence":
            return Numbered(tokens=ulysses.LENGTH, words=ulysses.WORDS)
        return Sequences() if KIND == "pipeline" else Numbered()

    def run(self) -> None:
        while not (self.batches() if KIND == "pipeline" else self.epoch()):
            pass
        self.say(event="end")

    def epoch(self) -> bool:
        """One pass over the data, or what is left of it; whether the script is through."""
        parts: list[tuple[float, list[int]]] = []
        for inputs, targets, numbers in self.loader:
            engine, step, micro_steps = self.engine, int(self.engine.global_steps), int(self.engine.micro_steps)
            loss = engine(*(ulysses.own_part(engine, (inputs, targets)) if KIND == "sequence" else (inputs, targets)))
            mean = engine.mean(loss.detach(), len(numbers)) if KIND == "sequence" else loss  # of all parts
            parts.append((mean.item(), numbers.tolist() if self.counts else []))
            engine.backward(loss / engine.sequence)
            engine.step()
            if engine.micro_steps != micro_steps + 1:  # the global batch is discarded
                parts = []
            if engine.micro_steps != micro_steps + 1 or engine.global_steps == step:
                continue
            self.say(event="step", step=step, parts=parts, rank=engine.rank, size=int(os.environ["WORLD_SIZE"]))
            parts = []
            time.sleep(STEP_SECONDS)
            if (OUT / f"hang-{os.getpid()}").exists():
                hang()
            if self.is_through():
                return True
        return False

    def batches(self) -> bool:
        """One pass with a pipeline, which makes a whole step a call; every rank has the loss of all samples."""
        feed = None if FEED == "own" else iter(self.loader)
        while not self.is_through():
            try:
                loss = self.engine.train_batch(feed).item()
            except StopIteration:
                return False
            step = int(self.engine.global_steps) - 1
            self.say(event="step", step=step, loss=loss, parts=[(loss, [step])] if self.engine.rank == 0 else [])
            self.train_others()
            time.sleep(STEP_SECONDS)
        return True

    def own_samples(self) -> Iterator[Any]:
        """This member's micro-batches from the present step on, in an iterator of the user's own."""
        data, batch = self.loader.dataset, self.engine.global_batch_size
        while True:
            first = int(self.engine.global_steps) * batch
            for slot in self.engine.batch.deal(batch).rank(self.engine.data_rank):
                while self.engine.data_rank == 1 and (OUT / "hold").exists():
                    self.say(event="held")
                    time.sleep(0.1)
                yield default_collate([data[(first + at) % len(data)] for at in slot.positions])

    def give(self, _: Any = None) -> None:
        """Let `train_batch` read another iterator."""
        self.engine.set_dataiterator(self.own_samples())

    def train_others(self) -> None:
        """After a step of a pipeline: what else there is to train."""

    def is_through(self) -> bool:
        """Whether all working members have seen the end; they agree on it."""
        stop = OUT / "stop"
        if self.engine.global_steps >= STEPS:
            return True
        if KIND != "gpt":  # members that share samples have no common mean
            return stop.exists() and int(self.engine.global_steps) >= int(stop.read_text())
        return bool(self.engine.mean(float(stop.exists()), 1) > 0)

    @property
    def counts(self) -> bool:
        """Whether the samples of this rank are its own."""
        place = self.engine.layout.coordinate(self.engine.rank)
        shares = place["tensor"] > 0 or place["sequence"] > 0
        return not shares and not self.engine.slot_is_borrowed

    @property
    def generation(self) -> int:
        """Of the membership; 0 in a static run."""
        return int(getattr(PROCESS.membership, "generation", 0))

    def note(self, event: Any) -> None:
        """A switch was committed."""
        if LIMIT:
            limited(0)  # what training takes is another matter than what joining takes
        what = {name: getattr(event, name) for name in ("pause_ms", "step", "bytes_sent", "late_bytes")}
        world = self.engine._parts.world
        held = {} if world is None else {kind: str(world.group(kind).group_name) for kind in world.kinds}
        self.say(event="switch", layout=event.target.layout, groups=held, **what)

    def say(self, **what: Any) -> None:
        line = {"pid": os.getpid(), "time": time.monotonic(), "generation": self.generation, **what}
        self.log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # who is killed while it compiles leaves a lock behind
    )
    if "FAULT" in os.environ:
        faulted.install(os.environ["FAULT"])
    Script().run()
    sys.exit(0)
