"""`keeping.py` that asks for switches as `doing.py` does."""

from __future__ import annotations

import os
import sys

import deepspeed

from tests.elastic import faulted
from tests.elastic.doing import Doing
from tests.elastic.keeping import Keeping


class Idling(Keeping, Doing):
    """See the module."""


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in `training.py`
    if "FAULT" in os.environ:
        faulted.install(os.environ["FAULT"])
    Idling().run()
    sys.exit(0)
