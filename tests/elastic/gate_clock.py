"""How long a step of an elastic job waits for all to have their reductions: lines of JSON in `$OUT/gate-PID.lines`.

`$GATE_IS` "off" leaves that out, to see what a step costs without it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ds_dynatrain.adapters.device import synchronize
from ds_dynatrain.adapters.gate import Gate


def install() -> None:
    """Around the gate of this process."""
    own, log = Gate.agree, (Path(os.environ["OUT"]) / f"gate-{os.getpid()}.lines").open("a", buffering=1)

    def agree(self: Gate, group: Any) -> None:
        if os.environ.get("GATE_IS") == "off":
            return
        begin = time.perf_counter()
        synchronize()
        idle = time.perf_counter()
        own(self, group)
        took = {"device_ms": 1e3 * (idle - begin), "rounds_ms": 1e3 * (time.perf_counter() - idle)}
        log.write(json.dumps(took) + "\n")

    Gate.agree = agree  # type: ignore[method-assign]
