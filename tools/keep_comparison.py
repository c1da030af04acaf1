"""Put what `ds-dynatrain compare` has measured into the documents: `make compare` runs it.

python tools/keep_comparison.py build/compare
python tools/keep_comparison.py build/late --late   # some ways alone: the tables of late switches in docs/figures/
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from figures import keep

ROOT = Path(__file__).parents[1]


def main() -> None:
    """The short table into the page of benchmarks, all tables into the pages of figures, the picture beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `ds-dynatrain compare --out` was given")
    parser.add_argument("--late", action="store_true", help="the short table and the verdicts, of late switches")
    args = parser.parse_args()
    figures, whole = ROOT / "docs" / "figures", (args.folder / "compare.md").read_text(encoding="utf-8")
    short = (args.folder / "short.md").read_text(encoding="utf-8")
    if args.late:
        said = [line for line in whole.splitlines() if line.startswith(("####", "DeepSpeed's"))]
        verdicts = [f"- {line.removeprefix('#### ')}:" if line.startswith("####") else f"  - {line}" for line in said]
        keep(figures, "compare_late", "\n".join([short, "", *verdicts]))
        return
    keep(ROOT / "docs" / "benchmarks.md", "compare", short)
    keep(figures, "compare", whole)
    shutil.copyfile(args.folder / "compare.svg", ROOT / "docs" / "compare.svg")


if __name__ == "__main__":
    main()
