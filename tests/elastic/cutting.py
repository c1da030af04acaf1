"""`training.py` with a model that is built under `deepspeed.zero.Init`, and a word on what that took.

$HOW: "pretrained" and "config" of transformers, which do it by themselves at stage 3; "init" for one of torch's; "late"
is "init" in a script that does not come into the job first, "two" one that has another engine, and ends, "killed" one
whose second process dies while the others cut.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as td

import ds_dynatrain
from ds_dynatrain.errors import UnsupportedError
from tests.elastic.cut_models import LLAMA, digests, layers
from tests.elastic.training import HOW, OUT, SETTINGS, Script
from tests.engine import oracle
from tests.engine.mixtures import with_loss

M_MMAP_THRESHOLD = -3


class Peak:
    """The most memory of its own that the process had inside of the block, beyond what it had before; bytes.

    of_files: how much of files was looked at besides.
    """

    def __enter__(self) -> Peak:
        self.bytes, self._is_over = 0, threading.Event()
        self._before, self._files = memory("RssAnon"), memory("RssFile")
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._is_over.wait(0.001):
            self.bytes = max(self.bytes, memory("RssAnon") - self._before)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.of_files = memory("RssFile") - self._files


def memory(kind: str) -> int:
    """Of the process, as the kernel counts it, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


class Cutting(Script):
    def __init__(self) -> None:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)  # what is freed goes back to the system at once
        self.joins = False if HOW == "late" else ds_dynatrain.init_distributed()
        super().__init__()
        engine, cut = self.engine, {"joins": self.joins, **self.cut}
        values = {} if self.joins or engine.idle else oracle.gather(engine).tensors
        for kind in ("weight", "master"):
            cut[kind] = digests({name: held for (name, of), held in values.items() if of == kind})
        try:
            deepspeed.zero.Init()
        except UnsupportedError as error:
            cut["refused"] = str(error)
        self.say(event="cut", buffers=digests(dict(engine.module.named_buffers())), **cut)
        if HOW == "two":
            self.two()

    def two(self) -> None:
        """The other model, which was cut before the first engine was there."""
        trained = list(self.other.parameters())
        engine, *_ = ds_dynatrain.initialize(model=self.other, model_parameters=trained, config=SETTINGS)
        with engine.turn():
            values = oracle.gather(engine).tensors
        self.say(event="other", weight=digests({name: held for (name, of), held in values.items() if of == "weight"}))
        sys.exit(0)

    def model(self) -> tuple[torch.nn.Module, Any]:
        build = {"pretrained": self.pretrained, "config": self.from_config}.get(HOW, self.under_init)
        model = build()
        self.cut["meta"] = all(held.is_meta for held in model.parameters())
        return model, list(model.parameters())

    def under_init(self) -> torch.nn.Module:
        with Peak() as peak, deepspeed.zero.Init(config_dict_or_path=SETTINGS):
            if HOW == "killed" and td.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            model = layers()
            self.other = layers(width=64, depth=3)
        self.cut: dict[str, Any] = {"peak": peak.bytes, "files": peak.of_files}
        return model

    def pretrained(self) -> torch.nn.Module:
        from transformers import LlamaForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        LlamaForCausalLM.from_pretrained(OUT / "small")  # imports
        self.told = HfDeepSpeedConfig(SETTINGS)  # transformers keeps it weakly
        with Peak() as peak:
            model = LlamaForCausalLM.from_pretrained(OUT / "pretrained")
        self.cut = {"peak": peak.bytes, "files": peak.of_files}
        return with_loss(model.train())

    def from_config(self) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM, LlamaConfig
        from transformers.integrations import HfDeepSpeedConfig

        AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA | {"num_hidden_layers": 0}))  # imports
        self.told = HfDeepSpeedConfig(SETTINGS)
        with Peak() as peak:
            model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))
        self.cut = {"peak": peak.bytes, "files": peak.of_files}
        return with_loss(model)


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in `training.py`
    Cutting().run()
    sys.exit(0)
