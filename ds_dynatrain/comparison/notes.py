"""One rank's measurements (phases, steps, digests, memory), and the files through which other processes read them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.report import SwitchEvent


@dataclass
class Step:
    """One rank's part in a training step.

    seconds: time spent training.
    losses: the loss of each micro-batch.
    samples: the sample numbers of all micro-batches.
    """

    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)


@dataclass
class Notes:
    """The measurements of one rank. Times are from the machine's clock, which is the same in all processes.

    stamps: the time at which each named point was reached.
    phases: duration of each phase in seconds.
    waited: seconds of the first step after the change that the switch's own phases took.
    apart: seconds of that step that only the measurement itself needed. Neither is part of the phase "first step".
    steps: the steps in which the rank took part, keyed by number.
    switch: the event of the switch, if the rank took part in one.
    digests: digests of the whole state "before" and "after" the change.
    peak: peak memory of the process in bytes.
    parameters: number of parameters of the model.
    resumed: number of steps done when training resumed after the change.
    error: the error that ended the rank; "" if there was none.
    """

    stamps: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0
    apart: float = 0.0
    steps: dict[int, Step] = field(default_factory=dict)
    switch: SwitchEvent | None = None
    digests: dict[str, str] = field(default_factory=dict)
    peak: int = 0
    parameters: int = 0
    resumed: int = 0
    error: str = ""

    def write(self, folder: Path, member: int) -> None:
        """Write the notes of a member to its own file in a folder."""
        (folder / f"{member}.json").write_text(json.dumps(to_record(self)), encoding="utf-8")

    @staticmethod
    def all_of(folder: Path) -> dict[int, Notes]:
        """Read the notes that all members wrote to `folder`, and return the notes keyed by member."""
        files = {int(file.stem): file for file in folder.glob("*.json")}
        return {member: from_record(Notes, json.loads(files[member].read_text("utf-8"))) for member in sorted(files)}

    def stamp(self, name: str) -> None:
        """Record the current time under a name."""
        self.stamps[name] = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that records the duration of its block as that of phase `name`."""
        begin = time.monotonic()
        yield
        self.phases[name] = time.monotonic() - begin

    def begin(self) -> None:
        """Record that the change begins now, so that training stops from here on."""
        self.forget_memory()
        self.stamp("begin")

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Context manager that records the duration and peak memory of its block, the first step after the change."""
        self.forget_memory()
        with self.phase("first step"):
            yield
        self.phases["first step"] -= self.apart + self.waited
        self.memory()

    def memory(self) -> None:
        """Record this process's peak memory since `forget_memory`, if it exceeds the recorded peak."""
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        peaks = [1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
        self.peak = max([self.peak, *peaks])

    def forget_memory(self) -> None:
        """Reset the kernel's peak memory of this process to its current memory."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
