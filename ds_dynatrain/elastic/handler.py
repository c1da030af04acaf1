"""`torchrun --rdzv-backend=dynatrain`: stock torchrun, whose agents never restart a worker because of another node.

Each agent's rendezvous completes at once: a world of one node, in which its workers start and end. The workers and the
coordinator decide which processes train together. The coordinator runs in the agent on the endpoint's host, unless one
is already running (started by `ds-dynatrain coordinator` or by another agent).

Settings, given as `--rdzv-conf key=value,...`:

- `is_host`: 0 never hosts the coordinator in this agent, 1 always does.
- `join_timeout`: seconds to wait for the coordinator, by default 600.
- `token_file`: the file with the job's token.
- `store_port`: port of the store for process groups; 0, the default, takes any.
- `debounce_seconds`, `beat_seconds`, `silent_seconds`, `stuck_seconds`, `recovery_seconds`: times of the coordinator,
  if this agent hosts it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

NAME = "dynatrain"
REPLACE_C10D = "DYNATRAIN_REPLACE_C10D"
"""Environment variable. If its value is 1, `--rdzv-backend=c10d` selects this back-end as well, for launchers with a
fixed command line."""


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes rendezvous handlers.

    torch calls this for its entry point group `torchrun.handlers`, in every process that imports its rendezvous module.
    With `DYNATRAIN_REPLACE_C10D=1` this also replaces torch's own `c10d`.
    """
    if os.environ.get(REPLACE_C10D) == "1":
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

        rendezvous_handler_registry._registry["c10d"] = create  # `register` refuses names that are taken
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous handler of one agent."""
    from ds_dynatrain.elastic.rendezvous import NodeRendezvous

    return NodeRendezvous(parameters)
