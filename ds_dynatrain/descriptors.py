"""The limit on open files of this process: raise it, and check that a new process group stays within it."""

from __future__ import annotations

import os
import resource

from ds_dynatrain.errors import LayoutError

MOST_DESCRIPTORS = 1 << 20
"""The maximum number of descriptors to request. The hard limit may be any number, and some programs close every
possible descriptor."""
BESIDE_PEERS = 3
"""Descriptors of a gloo group of N ranks in each of its processes, beyond N (measured on torch 2.13)."""


def raise_descriptors() -> int:
    """Raise the limit of open files of this process and its children as far as allowed, and return the new limit.

    Each connection takes one descriptor. A coordinator with 110 nodes, or five process groups of 200 ranks, use up the
    usual limit of 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def check_descriptors(group: str, size: int) -> None:
    """Raise LayoutError if a gloo group of `size` ranks needs more files than this process may still open.

    group: name of the group, for the error.
    """
    most, needed = raise_descriptors(), size + BESIDE_PEERS
    held = len(os.listdir("/dev/fd"))
    if most != resource.RLIM_INFINITY and held + needed > most:
        raise LayoutError(
            f"group {group} of {size} ranks needs {needed} open files in each process ({size} + {BESIDE_PEERS}), which "
            f"already has {held}, and {held} + {needed} > {most}, its hard limit. Each group with gloo is connected to "
            "all its ranks, and up to six groups are alive during a switch; raise the limit (`ulimit -Hn`, "
            f"LimitNOFILE, --ulimit nofile) to at least {6 * needed}, or choose a layout with fewer members"
        )
