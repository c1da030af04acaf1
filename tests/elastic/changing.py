"""`training.py` with a line for each change that it is told of, and for what it sees then.

A thread opens connections all the time, as a library that reads or reports does, and says so if one is cut.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import deque
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
        threading.Thread(target=self.chat, daemon=True).start()

    def chat(self) -> None:
        """On this machine, by two of its addresses; each connection is used as long as it is among the newest."""
        pairs = deque[tuple[socket.socket, socket.socket]](maxlen=200)
        listeners = [socket.create_server((host, 0)) for host in ("127.0.0.1", "127.0.0.2")]
        try:
            while True:
                for listener in listeners:
                    here = socket.create_connection(listener.getsockname())
                    pairs.append((here, listener.accept()[0]))
                for here, there in pairs:
                    here.sendall(b"x")
                    if there.recv(1) != b"x":
                        raise ConnectionError("somebody has shut it down")
                time.sleep(0.02)
        except OSError as error:
            self.say(event="cut", why=repr(error))

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
