"""What runs on the device without hardware, on a card: `tools/gpu_check.py` runs it part by part."""

from __future__ import annotations

from tests.device.core.test_axes import *  # noqa: F403
from tests.device.core.test_core import *  # noqa: F403
