"""What a rank notes while it is measured: phases, steps, digests, memory; and how another process reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Notes:
    """One rank's notes, a line of JSON each. Times are of the machine's clock, equal in all processes."""

    def __init__(self, folder: Path, member: int) -> None:
        self._file = folder / f"{member}.jsonl"

    def write(self, what: str, **values: Any) -> None:
        """Add a line."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, **values}) + "\n")

    def stamp(self, name: str) -> None:
        """That a certain point was reached."""
        self.write("stamp", name=name, at=time.monotonic())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """How long what is inside takes."""
        begin = time.monotonic()
        yield
        self.write("phase", name=name, seconds=time.monotonic() - begin)

    def begin(self) -> None:
        """That the change begins: training stands still from here."""
        self.forget_memory()
        self.stamp("begin")

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Around the first step after the change, which ends with it."""
        self.stamp("resume")
        self.forget_memory()
        with self.phase("first step"):
            yield
        self.stamp("end")
        self.memory()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around what a step contains for the comparison alone: it is not counted."""
        begin = time.monotonic()
        yield
        self.write("apart", seconds=time.monotonic() - begin)

    def memory(self) -> None:
        """The most memory that this process has had since `forget_memory`, in bytes."""
        self.write("memory", peak=_status("VmHWM"))

    def forget_memory(self) -> None:
        """Let the high-water mark begin with what the process has now."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Read:
    """The notes of one rank, read back."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    @staticmethod
    def all_of(folder: Path) -> dict[int, Read]:
        """Those of all ranks, by member."""
        files = {int(file.stem): file for file in folder.glob("*.jsonl")}
        lines = {member: files[member].read_text(encoding="utf-8").splitlines() for member in sorted(files)}
        return {member: Read([json.loads(line) for line in each]) for member, each in lines.items()}

    def every(self, what: str) -> list[Record]:
        """All records of a kind."""
        return [record for record in self._records if record["what"] == what]

    def at(self, stamp: str) -> float:
        """When a point was reached; KeyError if it was not."""
        for record in self.every("stamp"):
            if record["name"] == stamp:
                return float(record["at"])
        raise KeyError(stamp)

    def value(self, what: str, key: str) -> Any:
        """A field of the last record of a kind; KeyError if there is none."""
        records = self.every(what)
        if not records:
            raise KeyError(what)
        return records[-1][key]

    def phases(self) -> dict[str, float]:
        """Seconds by phase."""
        return {record["name"]: float(record["seconds"]) for record in self.every("phase")}

    def steps(self) -> dict[int, Record]:
        """The steps that it took part in, by number: micro-batches together, the loss their mean."""
        parts: dict[int, list[Record]] = {}
        for record in self.every("step"):
            parts.setdefault(int(record["number"]), []).append(record)
        return {number: _together(parts[number]) for number in parts}

    def peak(self) -> int:
        """The most memory that it had, in bytes."""
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
