"""Member 1 of two on this machine, in a process of its own. Started by test_strangers.py."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from ds_dynatrain.transfer import Neighbors

SECONDS = 20.0
Share = Callable[[str, Any], dict[int, Any]]


def shared(store: Store, member: int) -> Share:
    """What `Neighbors.meet` asks for."""

    def share(what: str, record: Any) -> dict[int, Any]:
        store.set(f"{what}/{member}", json.dumps(record))
        return {each: json.loads(store.get(f"{what}/{each}")) for each in (0, 1)}

    return share


def main(path: str, *names: str) -> None:
    for name in names:
        share = shared(PrefixStore(name, FileStore(path, 2)), 1)
        begin = time.monotonic()
        found = Neighbors.meet(1, share, SECONDS)
        sys.stdout.write(json.dumps({"members": sorted(found.members), "seconds": time.monotonic() - begin}) + "\n")
        found.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
