"""Whether ranks begin what they do together in one order, of all groups.

Members of several communicators of NCCL must: a collective holds its place on the device until all members have come to
it, and those behind it, of other communicators too, may have to wait. Where A waits at x for B, and B at y for A, both
wait forever. Gloo does not mind, nor do NCCL's kernels while there is room for all of them: so a case that passes has
shown nothing of it, and it is looked for in what each rank has noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

import torch.distributed as td

from tests.device import lab


def circle(orders: Sequence[lab.Begun]) -> list[str]:
    """Collectives of which each waits for the next one and the last one for the first, by name; empty: there are none.

    orders: what each rank has begun, from `lab.begun`; those of one group call are in no order among themselves.
    """
    sorter = TopologicalSorter[str | tuple[int, int]]()
    for rank, batches in enumerate(orders):
        for number, batch in enumerate(batches):
            for name in batch:
                sorter.add(name, (rank, number))
            sorter.add((rank, number + 1), *batch)
    try:
        sorter.prepare()
    except CycleError as error:
        return [name for name in error.args[1] if isinstance(name, str)]
    return []


def check() -> None:
    """All ranks call it, at the end of a case; AssertionError with the collectives that wait for each other."""
    orders: list[lab.Begun] = [[]] * td.get_world_size()
    td.all_gather_object(orders, lab.begun())
    lab.begun()  # those of the call itself
    if found := circle(orders):
        raise AssertionError(f"the ranks begin these in different orders: {' -> '.join(found)}")
