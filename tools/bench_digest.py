"""Measure the certificate's digest on one core: gigabytes per second, by type and size.

python tools/bench_digest.py
python tools/bench_digest.py --write docs/figures

Beside it stand the speed of an installation without compiled code, and that at which numpy just adds the same bytes up,
which is what one core can read at all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from figures import keep, machine, table

from ds_dynatrain.transfer import digest, is_compiled
from ds_dynatrain.transfer.weighing import InNumpy, Runs

SIZES = {"1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << 28}
BAR = 4.0


def speed(work: Callable[[], object], nbytes: int, repeats: int) -> float:
    """Median GB/s of processor time, after one pass that is not counted (others may be using the machine)."""
    times = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return nbytes / median(times[1:]) / 1e9


def row(dtype: torch.dtype, name: str, nbytes: int, repeats: int) -> list[object]:
    """One line of the table."""
    values = torch.randn(nbytes // dtype.itemsize, generator=torch.Generator().manual_seed(0)).to(dtype)
    words = values.view(torch.uint8).numpy().view(np.uint64)
    found = speed(lambda: digest(values), nbytes, repeats)
    runs = Runs(0, 0, 1, nbytes, 0, 0)
    without = speed(lambda: InNumpy().sum(words.view(np.uint8), runs), nbytes, repeats)
    reading = speed(lambda: np.add.reduce(words), nbytes, repeats)
    verdict = "pass" if found >= BAR else f"missed by {BAR - found:.1f} GB/s"
    return [str(dtype).removeprefix("torch."), name, f"{found:.2f}", f"{without:.2f}", f"{reading:.2f}", verdict]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(dtype, *size, args.repeats) for dtype in (torch.float32, torch.bfloat16) for size in SIZES.items()]
    kind = "compiled" if is_compiled() else "in numpy"
    text = f"Measured on: {machine()}. One core; digests {kind}; bar {BAR:.0f} GB/s.\n\n"
    text += table(("type", "size", "digest GB/s", "in numpy GB/s", "plain sum GB/s", ""), rows)
    print(text)
    if args.write is not None:
        keep(args.write, "bench_digest", text)


if __name__ == "__main__":
    main()
