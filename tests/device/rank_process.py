"""The processes behind a pool whose ranks compute on the device: those of `tests.engine`, with its accelerator in place
before anything of ds_dynatrain is imported. They begin as those of a user's script do: DeepSpeed makes the launch group
over the accelerator's own collectives.
"""

from __future__ import annotations

import sys

from tests.device import accelerator, lab, one_order
from tests.device.batches import move_batches

if __name__ == "__main__":
    accelerator.use()
    move_batches()
    from tests.engine import rank_process

    rank_process.main(int(sys.argv[1]), sys.argv[2:], rank_process.Kind(lab.BACKEND, one_order.check))
