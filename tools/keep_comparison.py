"""Put the results of `ds-dynatrain compare` into the documents. Run by `make compare`.

python tools/keep_comparison.py build/compare
python tools/keep_comparison.py build/late --late   # some ways alone: the ratios of late switches
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from figures import keep, table

ROOT = Path(__file__).parents[1]
RATIO = re.compile(r"DeepSpeed's universal checkpoint and a restart ÷ (.*?): \*\*(\d+)\*\*.*?\*\*(\d+)\*\*")


def ratios(document: str) -> str:
    """Return the ratios of all cases as one table, with a line for each case and a column for each way."""
    found: dict[str, dict[str, str]] = {}
    for line in document.splitlines():
        if line.startswith("#### "):
            cells = found.setdefault(line.removeprefix("#### "), {})
        elif ratio := RATIO.match(line):
            way, whole, alone = ratio.groups()
            cells[way] = f"{whole} ({alone})"
    ways = list(dict.fromkeys(way for cells in found.values() for way in cells))
    return table(("ratio", *ways), ([case, *(cells.get(way, "") for way in ways)] for case, cells in found.items()))


def main() -> None:
    """Put the short table into its page and the chart next to it, or the ratios of late switches into theirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `ds-dynatrain compare --out` was given")
    parser.add_argument("--late", action="store_true", help="keep the ratios alone, of late switches")
    args = parser.parse_args()
    figures, whole = ROOT / "docs" / "figures", (args.folder / "compare.md").read_text(encoding="utf-8")
    short = (args.folder / "short.md").read_text(encoding="utf-8")
    if args.late:
        measured = next(line for line in short.splitlines() if line.startswith("Measured on"))
        keep(figures, "compare_late", f"{measured}\n\n{ratios(whole)}")
        return
    keep(ROOT / "docs" / "benchmarks.md", "compare", short)
    shutil.copyfile(args.folder / "compare.svg", ROOT / "docs" / "compare.svg")


if __name__ == "__main__":
    main()
