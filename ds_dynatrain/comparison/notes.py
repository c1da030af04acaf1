"""Notes of a rank that is being measured: phases, steps, digests, memory; and how another process reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Notes:
    """The notes of one rank, a line of JSON each. Times are those of the machine's clock, equal in all processes."""

    def __init__(self, folder: Path, member: int) -> None:
        self._file = folder / f"{member}.jsonl"

    def write(self, what: str, **values: Any) -> None:
        """Add a line to the file."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, **values}) + "\n")

    def stamp(self, name: str) -> None:
        """Note the time at which a point is reached."""
        self.write("stamp", name=name, at=time.monotonic())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note how long this context takes."""
        begin = time.monotonic()
        yield
        self.write("phase", name=name, seconds=time.monotonic() - begin)

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

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Note seconds that a step spends for the comparison alone, within this context; they are not counted."""
        begin = time.monotonic()
        yield
        self.write("apart", seconds=time.monotonic() - begin)

    def memory(self) -> None:
        """Note the most memory that this process has had since `forget_memory`, in bytes."""
        self.write("memory", peak=_status("VmHWM"))

    def forget_memory(self) -> None:
        """Reset the high-water mark to the present memory of the process."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Read:
    """The notes of one rank, read back from its file."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    @staticmethod
    def all_of(folder: Path) -> dict[int, Read]:
        """Read the notes of all ranks; return them by member."""
        files = {int(file.stem): file for file in folder.glob("*.jsonl")}
        lines = {member: files[member].read_text(encoding="utf-8").splitlines() for member in sorted(files)}
        return {member: Read([json.loads(line) for line in each]) for member, each in lines.items()}

    def every(self, what: str) -> list[Record]:
        """Return all records of a kind."""
        return [record for record in self._records if record["what"] == what]

    def at(self, stamp: str) -> float:
        """Return the time at which a point was reached; KeyError if it was not."""
        for record in self.every("stamp"):
            if record["name"] == stamp:
                return float(record["at"])
        raise KeyError(stamp)

    def value(self, what: str, key: str) -> Any:
        """Return a field of the last record of a kind; KeyError if there is no such record."""
        records = self.every(what)
        if not records:
            raise KeyError(what)
        return records[-1][key]

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase."""
        return {record["name"]: float(record["seconds"]) for record in self.every("phase")}

    def steps(self) -> dict[int, Record]:
        """Return the steps in which the rank took part, by number, with micro-batches summed up and the mean of their
        losses.
        """
        parts: dict[int, list[Record]] = {}
        for record in self.every("step"):
            parts.setdefault(int(record["number"]), []).append(record)
        return {number: _together(parts[number]) for number in parts}

    def peak(self) -> int:
        """Return the most memory that the rank had, in bytes."""
        return max((int(record["peak"]) for record in self.every("memory")), default=0)


def _together(parts: list[Record]) -> Record:
    return {
        **parts[0],
        "seconds": sum(part["seconds"] for part in parts),
        "loss": sum(part["loss"] for part in parts) / len(parts),
        "samples": [sample for part in parts for sample in part["samples"]],
    }


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
