"""`torchrun --rdzv-backend=dynatrain`: stock torchrun, whose agents never restart a worker because of another node.

Each agent gets its own rendezvous at once: a world of one node, in which its workers start and end. The workers and the
coordinator settle who trains with whom. The coordinator runs in the agent on the endpoint's host, unless one runs
already (`ds-dynatrain coordinator`, or another agent's).

Settings, `--rdzv-conf key=value,...`: `is_host` (0: never host the coordinator, 1: always), `join_timeout` (seconds to
wait for the coordinator, 600), `token_file`, `store_port` (of the store for process groups, 0: any), and of the
coordinator, where this agent hosts it, `debounce_seconds`, `beat_seconds`, `silent_seconds`, `stuck_seconds`,
`recovery_seconds`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

NAME = "dynatrain"
REPLACE_C10D = "DYNATRAIN_REPLACE_C10D"
"""Environment variable; 1 makes `--rdzv-backend=c10d` mean this backend too, for launchers with a fixed command
line."""


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes handlers; torch calls this for its entry point group `torchrun.handlers`, in every
    process that imports its rendezvous.

    With `DYNATRAIN_REPLACE_C10D=1` it also replaces torch's own `c10d`.
    """
    if os.environ.get(REPLACE_C10D) == "1":
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

        rendezvous_handler_registry._registry["c10d"] = create  # `register` refuses a name that is taken
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous handler of one agent."""
    from ds_dynatrain.elastic.rendezvous import NodeRendezvous

    return NodeRendezvous(parameters)
