"""The processes behind a pool whose ranks compute on the device and talk as those do that share a card."""

from __future__ import annotations

import sys

from tests.device import accelerator, lab
from tests.gpu.staging import BACKEND, stage_collectives

if __name__ == "__main__":
    accelerator.use()
    stage_collectives(lab.NAME)
    from tests.device.batches import move_batches
    from tests.engine import rank_process

    move_batches()
    rank_process.main(int(sys.argv[1]), sys.argv[2:], rank_process.Kind(BACKEND))
