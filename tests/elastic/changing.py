"""`training.py` with a line for each change that it is told of, and for what it sees then."""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch.distributed as td

from ds_dynatrain import Change
from tests.elastic.training import Script


class Changing(Script):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.engine.on_change(self.tell)

    def tell(self, change: Change) -> None:
        """It is so already, and no batch is dealt."""
        engine, now = self.engine, change.after
        assert (now.layout, now.members, now.rank) == (engine.layout, engine.members, engine.rank)
        assert now.idle or td.get_world_size() == len(now.members)
        assert not engine._parts.open_batch.is_dealt
        self.say(event="told", reason=change.reason, before=self.seen(change.before), after=self.seen(change.after))

    @staticmethod
    def seen(place: Any) -> dict[str, Any]:
        """A place as plain JSON."""
        return {"size": place.layout.data, "members": place.members, "rank": place.rank, "world": place.generation}


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in `training.py`
    Changing().run()
    sys.exit(0)
