"""How long a step of an elastic job waits for all to have their reductions: lines of JSON in `$OUT/gate-PID.lines`.

`$GATE_IS` "off" leaves that out, to see what a step costs without it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from ds_dynatrain.adapters.groups import managed_process_group as gate
from ds_dynatrain.adapters.groups.managed_process_group import Gate


def install() -> None:
    """Around the gate of this process."""
    own, wait, idle = Gate.agree, gate.synchronize, [0.0]
    log = (Path(os.environ["OUT"]) / f"gate-{os.getpid()}.lines").open("a", buffering=1)

    def synchronize() -> None:
        wait()
        idle[0] = time.perf_counter()

    def agree(self: Gate, meet: Callable[[int], object]) -> None:
        if os.environ.get("GATE_IS") == "off":
            return
        begin = time.perf_counter()
        own(self, meet)
        took = {"device_ms": 1e3 * (idle[0] - begin), "rounds_ms": 1e3 * (time.perf_counter() - idle[0])}
        log.write(json.dumps(took) + "\n")

    gate.synchronize, Gate.agree = synchronize, agree  # type: ignore[attr-defined, method-assign]
