"""`training.py` that says what balance has saved, and is killed while it leaves: in the phase `$KILLED`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import deepspeed

from ds_dynatrain.elastic.member import Member
from ds_dynatrain.engine.elastic_membership import ElasticMembership
from tests.elastic.training import Script

PHASES: dict[str, tuple[type, str, bool]] = {
    "told": (Member, "leave", False),
    "said": (Member, "leave", True),
    "passed over": (ElasticMembership, "_leave", False),
    "ending": (Member, "left", True),
    "goodbye": (Member, "stop", True),
}
"""Before or after which method it is killed: it has heard that it should leave, has said that it leaves, is in no
generation any longer, ends its script, or has said good-bye."""


def install(phase: str) -> None:
    """Have this process killed in a phase."""
    owner, name, is_after = PHASES[phase]
    own = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        own(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, wrapped)


class Releasing(Script):
    """See the module."""

    saved = 0.0

    def train_others(self) -> None:
        saved = self.engine.balancer.saved_member_seconds
        if saved > 2 * self.saved:
            self.saved = saved
            self.say(event="saved", saved=saved)


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in `training.py`
    if os.environ.get("KILLED"):
        install(os.environ["KILLED"])
    Releasing().run()
    sys.exit(0)
