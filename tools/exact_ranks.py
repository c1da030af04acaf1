"""One rank of `bench_exact.py`: a job without `exact`, a job with it, or both, with a step of each in turn.

torchrun ... exact_ranks.py FOLDER '{"forms": ["default", "exact"], "size": "8M", "stage": 1, "steps": 20, ...}'
"""

from __future__ import annotations

import json
import sys

import deepspeed
import torch.distributed as td
from launch import Notes
from memory import high_water, reset_high_water
from sent_bytes import SentBytes
from workload import engine_in_leaves, quiet

WARM_UP = 3


def main() -> None:
    """Train, and record the seconds of each step, then the bytes sent in one step and the peak memory of another."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    notes = Notes(folder, td.get_rank())
    trainers = {form: engine_in_leaves(wanted, {"exact": form == "exact"})[1] for form in wanted["forms"]}
    for number in range(WARM_UP + wanted["steps"]):
        order = wanted["forms"][:: 1 if number % 2 else -1]
        times = {form: trainers[form].step()[0] for form in order}
        if number >= WARM_UP:
            notes.write(times)
    for form, trainer in trainers.items():
        with SentBytes() as sent:
            trainer.step()
        reset_high_water()
        trainer.step()
        notes.write({"form": form, "bytes_sent": sent.bytes_sent, "memory": high_water()})


if __name__ == "__main__":
    main()
