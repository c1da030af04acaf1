"""One rank of a comparison: `python -m ds_dynatrain.comparison.worker FOLDER TASK`, started by torchrun.

Its first line of code ends the phase "start"; nothing heavy is imported before that.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from pathlib import Path

from ds_dynatrain.comparison.job import Task
from ds_dynatrain.comparison.notes import Notes

PROGRAMS = {"live": "ours", "here": "ours", "ours": "ours", "stock": "stock", "dcp": "dcp"}
"""The module that runs each program."""


def main(folder: Path, task: Task) -> None:
    """Run the task; note an error before raising it."""
    begin, notes = time.monotonic(), Notes(folder, int(os.environ["RANK"]))
    notes.write("stamp", name="started", at=begin)
    try:
        module = importlib.import_module(f"ds_dynatrain.comparison.{PROGRAMS[task.program]}")
        notes.write("phase", name="import", seconds=time.monotonic() - begin)
        import torch  # which the module has imported already

        torch.set_num_threads(1)
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        module.run(task, notes)
    except Exception as error:
        notes.write("error", text=f"{type(error).__name__}: {error}".strip())
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), Task.from_json(sys.argv[2]))
