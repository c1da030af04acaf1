"""Markdown tables of figures, and their places in documents."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table in which numbers are aligned to the right."""
    lines = [" | ".join(head), " | ".join("---" if not column else "---:" for column in range(len(head)))]
    lines += [" | ".join(str(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def machine() -> str:
    """Return a description of this machine and its current load."""
    load = os.getloadavg()[0]
    versions = f"torch {version('torch').partition('+')[0]}, DeepSpeed {version('deepspeed')}"
    return f"{_processor()}, {os.cpu_count()} cores, {versions}, Python {platform.python_version()}, load {load:.1f}"


def keep(place: Path, name: str, text: str) -> None:
    """Put `text` between the marks `<!-- name -->` and `<!-- /name -->` of a document. Add the marks if there are none.

    place: the document, or a folder of documents. If no document in the folder has the marks, a new one is made.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    with_marks = (page for page in sorted(place.glob("*.md")) if begin in page.read_text(encoding="utf-8"))
    file = next(with_marks, place / f"{name}.md") if place.is_dir() else place
    body = file.read_text(encoding="utf-8") if file.exists() else ""
    if begin not in body:
        body = f"{body.rstrip()}\n\n{begin}\n{end}\n".lstrip()
    before, _, rest = body.partition(begin)
    after = rest.partition(end)[2]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}", encoding="utf-8")


def conclude(name: str, text: str, folder: Path, faults: Sequence[str], file: Path | None) -> None:
    """Print the text, and put it into `file` if one is given.

    If there are faults, the folder with the logs stays, and SystemExit is raised; otherwise the folder is removed.
    """
    print(text)
    if faults:
        print(f"\nAll logs are in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)
    if file is not None:
        keep(file, name, text)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
