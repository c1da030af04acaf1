"""Measure the certificate's digest on one core, in gigabytes per second, by type and size.

python tools/bench_digest.py
python tools/bench_digest.py --write docs/figures

For comparison, the table has the speed without compiled code, and the speed at which numpy sums the same bytes, which
is about what one core can read. A second table is about the work before an accelerator reads the first byte, and needs
no accelerator. For a million runs of 4 KiB, it has the time to cut the runs, which a switch does during training, and
the time that remains for the pause.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from figures import keep, machine, table

from ds_dynatrain.space import BufferId, Pieces
from ds_dynatrain.transfer import Form, ReadyDigest, digest, digests, is_compiled
from ds_dynatrain.transfer.weighing import HostRuns, InNumpy

SIZES = {"1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << 28}
BAR = 4.0
RUNS, RUN_BYTES, ROWS = 1_000_000, 4096, 4096
"""The runs of the second table: a quarter of each row, in fp32, of matrices with so many rows."""


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median processor time of a call, after one pass that does not count."""
    times = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return median(times[1:])


def speed(work: Callable[[], object], nbytes: int, repeats: int) -> float:
    """Return the median speed in GB/s of processor time."""
    return nbytes / seconds(work, repeats) / 1e9


def row(dtype: torch.dtype, nbytes: int, repeats: int) -> list[object]:
    """Return the row of one type and size."""
    values = torch.randn(nbytes // dtype.itemsize, generator=torch.Generator().manual_seed(0)).to(dtype)
    words = values.view(torch.uint8).numpy().view(np.uint64)
    found = speed(lambda: digest(values), nbytes, repeats)
    runs = HostRuns(0, 0, 1, nbytes, 0, 0)
    without = speed(lambda: InNumpy().sum(words.view(np.uint8), runs), nbytes, repeats)
    reading = speed(lambda: np.add.reduce(words), nbytes, repeats)
    return [f"{found:.2f}", f"{without:.2f}", f"{reading:.2f}", "pass" if found >= BAR else "missed"]


def cutting(repeats: int) -> str:
    """Return text on how long it takes to cut runs, and what remains for the pause. The kernel does nothing here."""
    width = RUN_BYTES // 4
    at = np.arange(RUNS, dtype=np.int64) * width
    name, bases = BufferId("group", 0), np.append(np.arange(0, RUNS, ROWS), RUNS) * (4 * width)
    pieces = Pieces(4 * at, 4 * at + width, np.zeros_like(at), at, (name,))
    held = {name: torch.empty(RUNS * width)}
    kernel = {"ds_dynatrain.transfer.digest_kernel": SimpleNamespace(launch=lambda *_: None)}
    with patch.object(digests, "has_kernel", lambda _: True), patch.dict(sys.modules, kernel):
        forms = Form.all_of(held, (name,))
        ready = ReadyDigest.of(pieces, forms, bases)
        cut = seconds(lambda: ReadyDigest.of(pieces, forms, bases), repeats)
        left = seconds(lambda: ready.digests(held), repeats)
    return (
        f"{RUNS:,} runs of 4 KiB: cut ahead of the pause in {1e3 * cut:.0f} ms, {1e3 * left:.1f} ms in the pause, "
        f"{ready.nbytes / RUNS:.0f} bytes of table each."
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        [name, *(cell for dtype in (torch.float32, torch.bfloat16) for cell in row(dtype, nbytes, args.repeats))]
        for name, nbytes in SIZES.items()
    ]
    kind = "compiled" if is_compiled() else "in numpy"
    place = f"Measured on: {machine()}. One core"
    head = (
        "GB/s",
        *(f"{name}: {what}" for name in ("fp32", "bf16") for what in ("digest", "in numpy", "plain sum", "bar")),
    )
    text = f"{place}; digests {kind}; bar {BAR:.0f} GB/s.\n\n{table(head, rows)}\n\n{cutting(args.repeats)}"
    print(text)
    if args.write is not None:
        keep(args.write, "bench_digest", text)


if __name__ == "__main__":
    main()
