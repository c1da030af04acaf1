"""One rank of `bench_exact_digests.py`: an exact job, with the seconds of its steps and of what is told of them.

torchrun ... exact_digest_ranks.py FOLDER '{"size": "8M", "stage": 1, "steps": 20, "leaves": 8, "samples": 2, ...}'
"""

from __future__ import annotations

import json
import sys
import time

import deepspeed
import torch
import torch.distributed as td
from launch import Notes
from workload import GPT, SIZES, Samples, Trainer, config, quiet

import ds_dynatrain

WARM_UP = 4


def main() -> None:
    """Digests after every other step; all ranks stand before what they then tell each other, so that none waits."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    notes, shape, stage = Notes(folder, td.get_rank()), SIZES[wanted["size"]], wanted["stage"]
    settings = config("fp32", stage, wanted["leaves"] * wanted["samples"])
    settings |= {"train_micro_batch_size_per_gpu": wanted["samples"], "gradient_clipping": 1.0}
    file = f"{folder}/report"
    block = {"layout": {"data": td.get_world_size(), "zero_stage": stage}, "report": {"jsonl": file}}
    block["exact"] = {"digest_every_steps": 2}
    torch.manual_seed(0)
    engine, *_ = ds_dynatrain.initialize(config={**settings, "dynatrain": block}, model=GPT(**shape))
    seconds, finish = [0.0], engine.exact.finish_step

    def timed() -> None:
        if engine.micro_steps % engine.gradient_accumulation_steps():
            return
        td.barrier()
        begin = time.perf_counter()
        finish()
        seconds[0] = time.perf_counter() - begin

    engine.exact.finish_step = timed
    trainer = Trainer(engine, engine.loader(Samples(10**6, wanted["length"], shape["vocabulary"]), num_workers=0))
    for number in range(WARM_UP + wanted["steps"]):
        seconds[0] = 0.0
        step = trainer.step()[0]
        if number >= WARM_UP:
            form = "losses" if engine.global_steps % 2 else "digest"
            notes.write({"step": step, "form": form, "told": seconds[0]})


if __name__ == "__main__":
    main()
