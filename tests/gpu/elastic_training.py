"""`tests/elastic/training.py` on a card: a user's script, which knows nothing of it.

Members may share the card: their collectives are staged on gloo, or with `$COLLECTIVES` "nccl" are NCCL's, to which
each member is a host of its own.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.gpu.staging import BACKEND, chosen_backend

if __name__ == "__main__":
    from ds_dynatrain.adapters.groups import communicators
    from tests.device.batches import move_batches
    from tests.elastic import gate_clock

    if chosen_backend() == BACKEND:
        communicators.ABORTING = (BACKEND,)
    move_batches()
    gate_clock.install()
    sys.argv[0] = str(Path(__file__).parents[1] / "elastic" / "training.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
