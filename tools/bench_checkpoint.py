"""Measure checkpoints against raw writes and reads of the same bytes, on the same disk, in the same run.

python tools/bench_checkpoint.py
python tools/bench_checkpoint.py --write docs/figures

Each of two processes writes its half of an Adam state in bf16 (ZeRO-1, matrices of 1024 columns) to disk, and reads
state back: the same half, and the quarter that one of four ranks would hold, both cold (dropped from the page cache)
and warm. The raw figures are for the same number of bytes with `pwrite` and `preadv` in pieces of 1 MiB, into memory
that was used before.

In addition, a save digests all values, and a load casts the weights of all ranks from their masters. If other processes
use the cores, this counts more, so the processor time is shown as well.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from figures import keep, machine, table

from ds_dynatrain.adapters.zero.state import Memory, provide, zeros
from ds_dynatrain.checkpoint.manifest import Manifest
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.writing import HostMemory, shares_of, write_shares
from ds_dynatrain.space import Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds

PROCESSES, COLUMNS = 2, 1024
PIECE = 1 << 20
SAVED, QUARTER = Layout(data=PROCESSES, zero_stage=1), Layout(data=4, zero_stage=3)
MEMORY = {"weight": Memory(torch.bfloat16)}
MEMORY |= dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), Memory(torch.float32))


def space(parameters: int) -> VirtualParameterSpace:
    """Return the parameter space of a model of matrices, each with a vector."""
    count = max(1, parameters // (1312 * COLUMNS))
    tensors = [LogicalTensor(f"layer{n}.weight", (1312, COLUMNS)) for n in range(count)]
    tensors += [LogicalTensor(f"layer{n}.bias", (1312,)) for n in range(count)]
    return VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(2), SAVED, range(PROCESSES))


def buffers_of(vps: VirtualParameterSpace, layout: Layout, rank: int, seed: int | None) -> Any:
    """Return a rank's buffers, in memory that has been used: with random values if a seed is given, otherwise zeros."""
    buffers = provide(vps.local(layout, rank), MEMORY, set(), {}, zeros)
    generator = torch.Generator().manual_seed(seed or 0)
    for (kind, _), held in buffers.items():
        if seed is None or kind == "weight":
            held.fill_(0)
        else:
            held.normal_(0, 0.02, generator=generator)
    return buffers


def cast_weights(vps: VirtualParameterSpace, parts: list[Any], buffers: Any) -> None:
    """Set the weights of all ranks to casts of their masters, whose values follow from the ranks' seeds."""
    for (kind, name), held in buffers.items():
        if kind == "weight":
            whole = torch.cat([part["master", name] for part in parts])
            held.copy_(whole[: len(held)])


def drop(path: Path) -> None:
    """Drop a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def warm(path: Path, scratch: torch.Tensor) -> None:
    """Read a file into the page cache."""
    view, file, at = scratch.numpy().data, os.open(path, os.O_RDONLY), 0
    while done := os.preadv(file, [view], at):
        at += done
    os.close(file)


def raw_write(path: Path, memory: torch.Tensor) -> None:
    """Write all of `memory` to disk."""
    view, file = memory.numpy().data, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for at in range(0, len(view), PIECE):
        os.pwrite(file, view[at : at + PIECE], at)
    os.fsync(file)
    os.close(file)


def raw_read(path: Path, memory: torch.Tensor) -> None:
    """Read all of `memory` back."""
    view, file = memory.numpy().data, os.open(path, os.O_RDONLY)
    for at in range(0, len(view), PIECE):
        os.preadv(file, [view[at : at + PIECE]], at)
    os.close(file)


def run(rank: int, folder: Path, parameters: int, repeats: int, barrier: Any, answers: Any) -> None:
    """Run one process: every measurement `repeats` times, started together with the other process."""
    torch.set_num_threads(1)
    vps = space(parameters)
    parts = [buffers_of(vps, SAVED, other, other + 1) for other in range(PROCESSES)]
    buffers = parts[rank]
    cast_weights(vps, parts, buffers)
    del parts
    shares = list(shares_of(vps, SAVED, rank, buffers, tuple(MEMORY)))
    nbytes = sum(share.nbytes for share in shares if share.master is None)
    memory, copies = torch.ones(nbytes, dtype=torch.uint8), HostMemory()
    target, quarter = buffers_of(vps, SAVED, rank, None), buffers_of(vps, QUARTER, rank, None)
    copied = sum(share.nbytes for share in shares)
    one, other = torch.ones(copied, dtype=torch.uint8), torch.zeros(copied, dtype=torch.uint8)
    copies.copies(shares)
    scratch = torch.empty(PIECE, dtype=torch.uint8)
    found: dict[str, list[float]] = {}
    rows: list[Any] = []

    def timed(name: str, work: Callable[[], object]) -> None:
        barrier.wait()
        begin, busy = time.perf_counter(), time.process_time()
        work()
        busy = time.process_time() - busy
        barrier.wait()  # the slower process counts
        found.setdefault(name, []).append(time.perf_counter() - begin)
        found.setdefault(f"{name} busy", []).append(busy)

    def saved() -> None:
        rows[:] = write_shares(folder, rank, shares)

    raw = folder / f"raw{rank}"
    for turn in range(repeats + 1):
        mine = [folder / name for name in os.listdir(folder) if name.startswith(f"{rank:05d}")]
        for file in [raw, *mine]:
            file.unlink(missing_ok=True)
        pair = [("raw write", lambda: raw_write(raw, memory)), ("save", saved)]
        for name, work in pair if turn % 2 else pair[::-1]:
            timed(name, work)
        (folder / f"{rank}.rows").write_bytes(Manifest.of(rows).to_bytes())
        barrier.wait()
        parts_of_it = [Manifest.from_bytes((folder / f"{each}.rows").read_bytes()) for each in range(PROCESSES)]
        manifest = Manifest.of(row for part in parts_of_it for row in part)
        files = [raw, *(folder / name for name in {row.file for row in rows if row.file})]
        for state in ("cold", "warm"):
            bring = drop if state == "cold" else partial(warm, scratch=scratch)
            for name, goal, layout in (("load", target, SAVED), ("quarter", quarter, QUARTER)):
                with Reader(folder, manifest) as reader:
                    for file in files:
                        bring(file)
                    timed(f"{name} {state}", lambda: reader.fill(vps, layout, rank, goal))  # noqa: B023
                    found.setdefault(f"{name} bytes", []).append(float(reader.bytes_read))
            for file in files:
                bring(file)
            timed(f"raw read {state}", lambda: raw_read(raw, memory))
        timed("raw copy", lambda: other.copy_(one))
        timed("stall", lambda: copies.copies(shares))
    wanted = sum(4 * vps.holding(QUARTER, rank, kind).numel for kind in MEMORY if kind != "weight")
    figures: dict[str, Any] = {name: median(values[1:]) for name, values in found.items()}
    answers.put({**figures, "bytes": nbytes, "quarter wanted": wanted, "copied": copied})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=60_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        barrier, answers = context.Barrier(PROCESSES), context.Queue()
        arguments = (Path(name), args.parameters, args.repeats, barrier, answers)
        processes = [context.Process(target=run, args=(rank, *arguments), daemon=True) for rank in range(PROCESSES)]
        for process in processes:
            process.start()
        found = [answers.get() for _ in processes]
        for process in processes:
            process.join()
    text = f"Measured on: {machine()}. {args.parameters / 1e6:.0f}M parameters, medians of {args.repeats}.\n\n"
    text += table(
        ("what", "GB", "raw GB/s", "GB/s", "ratio", "bar", "", "raw processor s/GB", "processor s/GB"), rows_of(found)
    )
    print(text)
    if args.write is not None:
        keep(args.write, "bench_checkpoint", text)


def rows_of(found: list[dict[str, Any]]) -> list[list[object]]:
    """Return the rows of the table, with the time of the slower process."""

    def slowest(name: str) -> float:
        return max(float(each[name]) for each in found)

    def total(name: str) -> float:
        return sum(float(each[name]) for each in found)

    rows: list[list[object]] = []
    for name, raw in (("save", "raw write"), ("load cold", "raw read cold"), ("load warm", "raw read warm")):
        moved = total("bytes") if name == "save" else total("load bytes")
        ours, plain = moved / slowest(name) / 1e9, total("bytes") / slowest(raw) / 1e9
        busy = [
            f"{total(f'{each} busy') / gigabytes:.2f}"
            for each, gigabytes in ((raw, total("bytes") / 1e9), (name, moved / 1e9))
        ]
        speeds = [f"{plain:.2f}", f"{ours:.2f}"]
        rows.append([name, f"{moved / 1e9:.2f}", *speeds, *verdict(ours / plain, 0.8, False), *busy])
    copied, stall = total("copied") / 1e9, slowest("stall") / slowest("raw copy")
    speeds = [f"{copied / slowest(name):.2f}" for name in ("raw copy", "stall")]
    rows.append(["stall of a save in the background", f"{copied:.2f}", *speeds, *verdict(stall, 1.25, True), "", ""])
    read = total("quarter bytes") / total("quarter wanted")
    rows.append(
        ["a quarter: bytes read", f"{total('quarter bytes') / 1e9:.2f}", "", "", *verdict(read, 1.1, True), "", ""]
    )
    return rows


def verdict(ratio: float, bar: float, is_most: bool) -> list[str]:
    """Return (ratio, bar, whether the bar is met).

    is_most: whether the bar is an upper limit.
    """
    met = ratio <= bar if is_most else ratio >= bar
    sign = "≤" if is_most else "≥"
    return [f"{ratio:.2f}", f"{sign} {bar}", "pass" if met else f"missed by {abs(ratio - bar):.2f}"]


if __name__ == "__main__":
    main()
