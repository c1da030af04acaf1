"""Other processes, as Linux's /proc shows them: what they hold, their parents, and processes that were left behind."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

SAMPLES = 6
"""Number of samples required to judge whether a process grows."""


BATCHES = "/dev/shm/torch_"
"""Paths of batches that a loader's worker processes pass on. Each has one descriptor, and their number varies."""


def held(pid: int) -> dict[str, int]:
    """Return the numbers of open descriptors and threads of a process; {} if it is gone.

    Descriptors of batches on their way to a loader do not count.
    """
    try:
        links = [_link(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
        return {
            "fd": sum(not link.startswith(BATCHES) for link in links),
            "thread": len(os.listdir(f"/proc/{pid}/task")),
        }
    except OSError:
        return {}


def _link(path: str) -> str:
    """Return the target of a link in /proc; a placeholder if it has just gone."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return 0 if fields["State"].split()[0] == "Z" else int(fields["PPid"])


def with_variable(name: str, value: str) -> list[int]:
    """Return the processes that were started with this environment variable, without zombies."""
    wanted, found = f"{name}={value}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in variables:
                found.append(int(folder.name))
    return sorted(found)


def is_below(pid: int, top: int) -> bool:
    """Return whether `top` is an ancestor of a process."""
    while pid > 1:
        pid = parent(pid)
        if pid == top:
            return True
    return False


@dataclass
class Growth:
    """Repeated samples of what processes hold, together with the size of their world at the time."""

    samples: defaultdict[int, list[tuple[int, dict[str, int]]]] = field(default_factory=lambda: defaultdict(list))
    names: dict[int, str] = field(default_factory=dict)

    def sample(self, pid: int, name: str, size: int) -> None:
        """Take a sample of a process."""
        if found := held(pid):
            self.samples[pid].append((size, found))
            self.names[pid] = name

    def found(self) -> list[str]:
        """Return text about processes that hold more at the end than at any time at the start, in worlds of the same
        size.
        """
        grown = []
        for pid, samples in self.samples.items():
            size, times = Counter(size for size, _ in samples).most_common(1)[0]
            if times < SAMPLES:
                continue
            alike = [what for one, what in samples if one == size]
            third = len(alike) // 3
            for kind in ("fd", "thread"):
                early, late = max(what[kind] for what in alike[:third]), min(what[kind] for what in alike[-third:])
                if late > early:
                    history = ", ".join(str(what[kind]) for what in alike)
                    grown.append(f"{self.names[pid]} (process {pid}), {kind}s in worlds of {size}: {history}")
        return grown

    def longest(self) -> int:
        """The number of samples of the process with the most samples."""
        return max((len(each) for each in self.samples.values()), default=0)
