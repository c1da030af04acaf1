"""Put what `ds-dynatrain compare` has measured into the documents: `make compare` runs it.

python tools/keep_comparison.py build/compare
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from figures import keep

ROOT = Path(__file__).parents[1]


def main(folder: Path) -> None:
    """The short table into the README, all tables into the page of figures, the picture beside it."""
    keep(ROOT / "README.md", "compare", (folder / "short.md").read_text(encoding="utf-8"))
    keep(ROOT / "docs" / "figures.md", "compare", (folder / "compare.md").read_text(encoding="utf-8"))
    shutil.copyfile(folder / "compare.svg", ROOT / "docs" / "compare.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
