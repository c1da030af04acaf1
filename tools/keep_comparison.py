"""Put what `ds-dynatrain compare` has measured into the documents: `make compare` runs it.

python tools/keep_comparison.py build/compare
python tools/keep_comparison.py build/late --late   # some ways alone: the tables of late switches in docs/figures/
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
    """The ratios of all cases as one table."""
    rows, case = [], ""
    for line in document.splitlines():
        if line.startswith("#### "):
            case = line.removeprefix("#### ")
        elif found := RATIO.match(line):
            rows.append([case, *found.groups()])
    return table(("case", "way", "ratio", "without the certificate, or by the pause alone"), rows)


def main() -> None:
    """Put the short table and the ratios into the pages, and the picture beside them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `ds-dynatrain compare --out` was given")
    parser.add_argument("--late", action="store_true", help="the short table and the ratios, of late switches")
    args = parser.parse_args()
    figures, whole = ROOT / "docs" / "figures", (args.folder / "compare.md").read_text(encoding="utf-8")
    short = (args.folder / "short.md").read_text(encoding="utf-8")
    if args.late:
        keep(figures, "compare_late", f"{short}\n\n{ratios(whole)}")
        return
    keep(ROOT / "docs" / "benchmarks.md", "compare", short)
    keep(figures, "compare", ratios(whole))
    shutil.copyfile(args.folder / "compare.svg", ROOT / "docs" / "compare.svg")


if __name__ == "__main__":
    main()
