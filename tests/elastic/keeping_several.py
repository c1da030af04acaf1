"""`several.py` with what `keeping.py` writes of the first engine."""

from __future__ import annotations

import sys

import deepspeed

from tests.elastic.keeping import Keeping
from tests.elastic.several import Several


class KeepingSeveral(Keeping, Several):
    """See the module."""


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in `training.py`
    KeepingSeveral().run()
    sys.exit(0)
