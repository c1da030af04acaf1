"""`torchrun` for a shell: its processes are forked by that which has imported torch and DeepSpeed (warm.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.elastic.warm import Lent, Nursery

LENT = "FORKED_TORCHRUN"
"""Names the descriptor over which that process is asked."""


def put_in_place(folder: Path, nursery: Nursery) -> dict[str, str]:
    """Make a `torchrun` in a folder of its own; what commands that are to find it have in their environment.

    Besides, they have the descriptor of `nursery`.
    """
    folder.mkdir()
    file = folder / "torchrun"
    root = Path(__file__).parents[2]
    file.write_text(f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(root)!r})
from tests.elastic.forked_torchrun import main
main()
""")
    file.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", LENT: str(nursery.fileno())}


def main() -> None:
    """As torchrun, to the end."""
    command = ["torch.distributed.run", *sys.argv[1:]]
    process = Lent(int(os.environ.pop(LENT))).start(command, os.environ, Path.cwd(), 1, 2)
    sys.exit(process.wait())
