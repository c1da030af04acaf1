"""A user's script on the device without hardware, of which it knows nothing: `$SCRIPT`, or `elastic/training.py`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from ds_dynatrain.adapters.groups import communicators
from tests.device import accelerator, lab
from tests.device.batches import move_batches
from tests.elastic import faulted, gate_clock


def break_down() -> None:
    """The device takes nothing any more; only the first process that is told so loses it."""
    for told in Path(os.environ["OUT"]).glob("breaks"):
        told.unlink()
        lab.break_down()


if __name__ == "__main__":
    accelerator.use()
    accelerator.share()
    communicators.ABORTING = communicators.GROUPING = (lab.BACKEND,)  # as under NCCL; see lab.cpp
    move_batches()
    gate_clock.install()
    faulted.ACTS["break"] = break_down
    sys.argv[0] = os.environ.get("SCRIPT", str(Path(__file__).parents[1] / "elastic" / "training.py"))
    runpy.run_path(sys.argv[0], run_name="__main__")
