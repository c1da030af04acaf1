"""One rank of a comparison: `python -m ds_dynatrain.comparison.worker FOLDER TASK`, started by torchrun.

The phase "start" ends when `main` begins. Nothing heavy is imported before that point.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from pathlib import Path

from ds_dynatrain.comparison.job import Task
from ds_dynatrain.comparison.notes import Notes
from ds_dynatrain.records import from_record


def main(folder: Path, task: Task) -> None:
    """Run the task, and write this rank's notes to `folder`, even if the task fails."""
    begin, notes = time.monotonic(), Notes()
    notes.stamps["started"] = begin
    try:
        module = importlib.import_module(f"ds_dynatrain.comparison.{task.way.program}")
        notes.phases["import"] = time.monotonic() - begin
        import torch  # the module has already imported it

        torch.set_num_threads(1)
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        module.run(task, notes)
    except Exception as error:
        notes.error = f"{type(error).__name__}: {error}".strip()
        raise
    finally:
        notes.write(folder, int(os.environ["RANK"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), from_record(Task, json.loads(sys.argv[2])))
