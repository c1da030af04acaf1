"""Notes of a rank that is being measured: phases, steps, digests, memory; and how another process reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ds_dynatrain.records import from_record, to_record


@dataclass
class Step:
    """A step in which a rank took part: its seconds, and the losses and sample numbers of its micro-batches."""

    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SwitchNote:
    """A switch as measured by one rank, in seconds and bytes.

    failed: the reason if it failed. wait: seconds for which the first step waited for late state.
    """

    failed: str
    pause: float
    wait: float
    certificate: float
    sent: int


@dataclass
class Notes:
    """The measurements of one rank. Times are from the machine's clock, which is the same in all processes.

    stamps: the times at which named points were reached. phases: seconds of each phase. apart: seconds of the first
    step that only the comparison needed. waited: seconds for which the first step waited for phases of a switch. steps:
    the steps by number. digests: digests of the whole state, "before" and "after". peak: most memory in bytes. resumed:
    the step from which training went on. error: the error that ended the rank.
    """

    stamps: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    apart: float = 0.0
    waited: float = 0.0
    steps: dict[int, Step] = field(default_factory=dict)
    switches: list[SwitchNote] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    peak: int = 0
    parameters: int = 0
    resumed: int = 0
    error: str = ""

    def write(self, folder: Path, member: int) -> None:
        """Write the notes to the file of this member."""
        (folder / f"{member}.json").write_text(json.dumps(to_record(self)), encoding="utf-8")

    @staticmethod
    def all_of(folder: Path) -> dict[int, Notes]:
        """Read the notes of all ranks; return them by member."""
        files = {int(file.stem): file for file in folder.glob("*.json")}
        return {member: from_record(Notes, json.loads(files[member].read_text("utf-8"))) for member in sorted(files)}

    def stamp(self, name: str) -> None:
        """Record the current time under the name of a point."""
        self.stamps[name] = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the duration of this context as a phase."""
        begin = time.monotonic()
        yield
        self.phases[name] = time.monotonic() - begin

    def begin(self) -> None:
        """Note that the change begins: training stands still from here."""
        self.forget_memory()
        self.stamp("begin")

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Note the start, the end and the memory of the first step after the change, which is this context."""
        self.stamp("resume")
        self.forget_memory()
        with self.phase("first step"):
            yield
        self.stamp("end")
        self.memory()

    def memory(self) -> None:
        """Note the most memory that this process has had since `forget_memory`."""
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        peaks = [1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
        self.peak = max([self.peak, *peaks])

    def forget_memory(self) -> None:
        """Reset the high-water mark to the present memory of the process."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
