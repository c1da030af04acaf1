"""The limit of open files: a group that does not fit below it is refused with the arithmetic, before it connects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GROUP = """
import resource, sys
from torch._C._distributed_c10d import HashStore
from ds_dynatrain.adapters.groups.process_groups import make_group
from ds_dynatrain.errors import LayoutError
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    make_group(HashStore(), "g", 0, int(sys.argv[3]), 0.5)
except LayoutError as error:
    print("refused:", error)
except RuntimeError as error:
    print("nobody came:", error)
print("soft limit", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def made(soft: int, hard: int, size: int) -> str:
    """What a process with these limits says of a group of this size, whose other ranks do not exist."""
    command = [sys.executable, "-c", GROUP, *map(str, (soft, hard, size))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return done.stdout


def test_a_group_that_needs_more_files_than_allowed_is_refused_with_the_number() -> None:
    said = made(256, 300, 400)
    assert "refused: group g of 400 ranks needs 403 open files in each process (400 + 3)" in said
    assert "+ 403 > 300, its hard limit" in said and "to at least 2418" in said


def test_the_soft_limit_is_raised_for_a_group_that_fits() -> None:
    said = made(64, 1024, 200)
    assert "nobody came" in said and "soft limit 1024" in said
