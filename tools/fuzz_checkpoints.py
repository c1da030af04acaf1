"""Check that mutated checkpoints of all formats give their values or a documented error, and have no other effect.

python tools/fuzz_checkpoints.py --mutants 50000

Each mutant is verified (if it is ours) and converted: ours to another format, others to ours. Faults are: any exception
other than CheckpointError; more memory than the files and 512 MiB; more than 5 s of processor time; a file outside of
the output folder; and, in formats with checksums, a flipped bit in a tensor's values that is not found. The exit code
is 1 if there is any fault. A mutant is determined by the seed and its number; --only N shows number N.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import FrameType
from typing import Annotated, Any

import typer
from figures import keep, machine
from memory import high_water, reset_high_water, resident
from mutations import FOUND, MUTATIONS, VICTIM, mutated
from specimens import Specimen, specimens

from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.cli import checkpoints, conversion
from ds_dynatrain.cli.choices import Format
from ds_dynatrain.errors import CheckpointError

MIB = 1 << 20
MOST_BYTES, MOST_SECONDS, HANG_SECONDS = 512 * MIB, 5.0, 60
SPACE_BYTES = 2 << 30
"""Additional address space for a process, in which the memory pools of threads count as well."""
NO_MEMORY = ("MemoryError", "allocate memory")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
WITH_FOLDER = ("os.mkdir", "os.remove", "os.rmdir")
"""Events whose last argument is the open folder to which a path is relative."""
FAULTS = ("traceback", "memory", "slow", "outside", "not found")
BARE = ("safetensors",)
"""Formats without checksums."""


class HangError(BaseException):
    """Raised if a mutant takes too long. It is not an Exception, so no reader takes it for damage."""


class Watch:
    """A record of what this process changes outside of a folder, by Python's audit events."""

    def __init__(self) -> None:
        self.inside = ""
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, details: tuple[Any, ...]) -> None:
        if not self.inside or (event != "open" and event not in CHANGING):
            return
        if event == "open" and not (isinstance(details[2], int) and details[2] & WRITING):
            return
        at = details[-1] if event in WITH_FOLDER and isinstance(details[-1], int) and details[-1] >= 0 else None
        base = os.getcwd() if at is None else os.readlink(f"/proc/self/fd/{at}")
        for path in details[: 2 if event in ("os.rename", "os.link") else 1]:
            if isinstance(path, str | bytes | os.PathLike):
                place = os.path.realpath(os.path.join(base, os.fsdecode(path)))
                if not f"{place}/".startswith(f"{self.inside}/") and place != os.devnull:
                    self.seen.append(f"{event} {place}")


class Bench:
    """The folders of one worker: `in` and `out`, and around them files that must not change."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.there, self.out = folder, folder / "deep" / "in", folder / "deep" / "out"
        self.watch = Watch()

    def lay_out(self, files: dict[str, bytes], tag: str) -> Path:
        """Write the files into a new folder, and return its path."""
        shutil.rmtree(self.folder, ignore_errors=True)
        path = self.there / tag
        for each in (path, self.out):
            each.mkdir(parents=True)
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
        for each in (self.folder, self.folder / "deep"):
            (each / "victim.pt").write_bytes(b"mine")
        return path

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager that records changes outside of `out`."""
        self.watch.seen.clear()
        self.watch.inside = os.path.realpath(self.out)
        try:
            yield
        finally:
            self.watch.inside = ""

    def around(self) -> dict[str, tuple[int, int]]:
        """Return the size and the modification time of all files except those in `out`."""
        found: Iterable[Path] = (
            each for each in self.folder.rglob("*") if self.out not in each.parents and each != self.out
        )
        found = chain(found, Path(VICTIM).parent.glob(f"{Path(VICTIM).name}*"))
        return {str(each): (each.stat().st_size, each.stat().st_mtime_ns) for each in found}


def main(
    mutants: Annotated[int, typer.Option(help="How many, over all formats.")] = 50_000,
    seed: Annotated[int, typer.Option(help="The same one mutates alike.")] = 1,
    processes: Annotated[int, typer.Option(help="At once.")] = os.cpu_count() or 1,
    seconds: Annotated[float, typer.Option(help="Begin no more after so long.")] = 86_400,
    only: Annotated[int | None, typer.Option(help="The one of this number, with what happens.")] = None,
    write: Annotated[Path | None, typer.Option(help="A document to put the table into.")] = None,
) -> None:
    """Mutate checkpoints, and judge how verify and convert react."""
    warnings.simplefilter("ignore")
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="fuzz-") as name:
        folder = Path(name)
        (folder / "specimens").mkdir()
        with _silence():
            found = specimens(folder / "specimens")
        if only is not None:
            print(json.dumps(judged(Bench(folder / "bench"), found, seed, only, shows=True), indent=1))
            return
        begin = time.monotonic()
        rows = list(_all(folder, found, seed, mutants, processes, begin + seconds))
        text = _report(rows, found, seed, time.monotonic() - begin)
    print(text)
    if write is not None:
        keep(write, "fuzz_checkpoints", text)
    wrong = [row for row in rows if row["faults"]]
    for row in wrong[:20]:
        print(f"--only {row['number']}: {row['name']}, {row['mutation']}: {row['faults']} {row['said']}")
    if wrong or not rows:
        raise typer.Exit(1)


@contextmanager
def _silence() -> Iterator[None]:
    """Context manager that hides the progress bars of conversions."""
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        yield


# ---- workers ---------------------------------------------------------------------------------------------------------


def _all(
    folder: Path, found: list[Specimen], seed: int, mutants: int, processes: int, end: float
) -> Iterator[dict[str, Any]]:
    """Yield the judgement of every mutant. A worker that dies is replaced, and continues after the mutant that killed
    it.
    """
    context = get_context("fork")
    todo = [range(first, mutants, processes) for first in range(processes)]
    files = [folder / f"judged-{number}" for number in range(processes)]
    for file in files:
        file.touch()

    def start(number: int, numbers: range) -> Any:
        made = context.Process(
            target=_work, args=(folder / f"bench-{number}", files[number], found, seed, numbers, end)
        )
        made.start()
        return made

    workers = [start(number, numbers) for number, numbers in enumerate(todo)]
    for number, worker in enumerate(workers):
        worker.join()
        while worker.exitcode:
            done = files[number].read_text().count("\n")
            died = todo[number][done]
            row = {"number": died, "name": _name_of(found, died), "mutation": "?", "faults": ["traceback"]}
            with files[number].open("a") as judgements:
                judgements.write(f"{json.dumps({**row, 'said': f'exit code {worker.exitcode}'})}\n")
            worker = start(number, todo[number][done + 1 :])
            worker.join()
    for file in files:
        yield from map(json.loads, file.read_text().splitlines())


def _work(place: Path, file: Path, found: list[Specimen], seed: int, numbers: range, end: float) -> None:
    """Judge some mutants, and write a line for each."""
    bench = Bench(place)
    signal.signal(signal.SIGALRM, _hang)
    with file.open("a", buffering=1) as out, _silence():
        for number in numbers:
            if time.monotonic() > end:
                return
            faulthandler.dump_traceback_later(3 * HANG_SECONDS, exit=True)
            out.write(f"{json.dumps(judged(bench, found, seed, number))}\n")
    faulthandler.cancel_dump_traceback_later()


def _hang(number: int, frame: FrameType | None) -> None:
    raise HangError(f"no end after {HANG_SECONDS} s")


def _name_of(found: list[Specimen], number: int) -> str:
    return found[number % len(found)].name


# ---- one mutant ------------------------------------------------------------------------------------------------------


def judged(bench: Bench, found: list[Specimen], seed: int, number: int, shows: bool = False) -> dict[str, Any]:
    """Try one mutant. Return what happened, and which of it is a fault.

    shows: whether to return details.
    """
    specimen, draw = found[number % len(found)], Random(f"{seed}-{number}")
    mutation, files = mutated(draw, specimen)
    path = bench.lay_out(files, "step3")
    to = draw.choice(("safetensors", "deepspeed-universal", "dcp")) if specimen.is_ours else "universal"
    before, faults = bench.around(), list[str]()
    row: dict[str, Any] = {"number": number, "name": specimen.name, "mutation": mutation, "faults": faults, "said": ""}
    reset_high_water()
    held, began = resident(), time.process_time()
    with _limited(), bench.watched():
        try:
            row["said"] = read(path, bench.out / "new", to, specimen.is_ours)
        except HangError as error:
            row["said"] = str(error)
            faults.append("slow")
        except BaseException as error:
            row["said"] = f"{type(error).__name__}: {error}"[:500]
            if shows:
                traceback.print_exc()
            if not isinstance(error, CheckpointError):
                faults.append("traceback")
    row["seconds"], row["bytes"] = time.process_time() - began, high_water() - held
    if row["bytes"] > specimen.nbytes + MOST_BYTES or any(word in row["said"] for word in NO_MEMORY):
        faults.append("memory")
    if row["seconds"] > MOST_SECONDS and "slow" not in faults:
        faults.append("slow")
    if bench.watch.seen or bench.around() != before:
        faults.append("outside")
        row["said"] += f" {bench.watch.seen[:3]}"
    if mutation == FOUND and not row["said"] and specimen.name not in BARE:
        faults.append("not found")
    return row


def read(path: Path, out: Path, to: str, is_ours: bool) -> str:
    """Verify a checkpoint if it is ours, and convert it. Return any reported damage. Raises CheckpointError as the
    commands do.
    """
    said = ""
    if is_ours:
        said = "; ".join(checkpoints.damage(Saved.open(path)))[:500]
    list(conversion.convert(path, out, Format(to), None, False))
    return said


@contextmanager
def _limited() -> Iterator[None]:
    """Context manager that limits address space and time."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + SPACE_BYTES, limit[1]))
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limit)


# ---- figures ---------------------------------------------------------------------------------------------------------


def _report(rows: list[dict[str, Any]], found: list[Specimen], seed: int, seconds: float) -> str:
    """Return text on the mutations of each format and their results."""
    what = f"{len(rows)} mutated checkpoints ({', '.join(each.name for each in found)}), seed {seed}"
    kinds = Counter(row["mutation"] for row in rows)
    drawn = ", ".join(f"{name} {kinds[name]}" for name in MUTATIONS)
    refused = sum(bool(row["said"]) for row in rows)
    faults = Counter(fault for row in rows for fault in row["faults"])
    told = ", ".join(f"{count} {fault}" for fault, count in faults.items()) or "none"
    flips = [row for row in rows if row["mutation"] == FOUND and row["name"] not in BARE]
    hits = f"{sum(bool(row['said']) for row in flips)} of {len(flips)}"
    return (
        f"Measured on: {machine()}. {what}, in {seconds / 60:.0f} min: {drawn}. {refused} were refused and "
        f"{len(rows) - refused} read; bits in values found: {hits}; faults: {told}."
    )


if __name__ == "__main__":
    typer.run(main)
