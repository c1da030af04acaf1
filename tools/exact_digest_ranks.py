"""One rank of `bench_exact_digests.py`: an exact job that times its steps, and the writing of their records.

torchrun ... exact_digest_ranks.py FOLDER '{"size": "8M", "stage": 1, "steps": 20, "leaves": 8, "samples": 2, ...}'
"""

from __future__ import annotations

import json
import sys
import time

import deepspeed
import torch.distributed as td
from launch import Notes
from workload import engine_in_leaves, quiet

WARM_UP = 4


def main() -> None:
    """Train, with digests after every other step. A barrier before each exchange excludes waiting for other ranks."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    notes = Notes(folder, td.get_rank())
    block = {"report": {"jsonl": f"{folder}/report"}, "exact": {"digest_every_steps": 2}}
    engine, trainer = engine_in_leaves(wanted, block)
    seconds, finish = [0.0], engine.exact.finish_step

    def timed() -> None:
        if engine.micro_steps % engine.gradient_accumulation_steps():
            return
        td.barrier()
        begin = time.perf_counter()
        finish()
        seconds[0] = time.perf_counter() - begin

    engine.exact.finish_step = timed
    for number in range(WARM_UP + wanted["steps"]):
        seconds[0] = 0.0
        step = trainer.step()[0]
        if number >= WARM_UP:
            form = "losses" if engine.global_steps % 2 else "digest"
            notes.write({"step": step, "form": form, "told": seconds[0]})


if __name__ == "__main__":
    main()
