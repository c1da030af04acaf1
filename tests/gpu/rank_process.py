"""The processes behind a pool whose ranks share one card: those of `tests.engine`; staging.py says how they talk."""

from __future__ import annotations

import os
import sys

from tests.gpu.staging import chosen_backend

if __name__ == "__main__":
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has asked CUDA itself cannot fork ranks
    taken = chosen_backend()
    from tests.device.batches import move_batches
    from tests.engine import rank_process

    move_batches()
    rank_process.main(int(sys.argv[1]), sys.argv[2:], rank_process.Kind(taken))
