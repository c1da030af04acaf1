"""On one CUDA device: digests and packing, and their speed beside a plain copy. Ranks on it are in `core`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch

from ds_dynatrain.transfer import digest
from ds_dynatrain.transfer.regions import regions_of
from ds_dynatrain.transfer.series import Matrix

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason=f"no CUDA device: torch {torch.__version__} (CUDA {torch.version.cuda or 'not built in'}) sees "
    f"{torch.cuda.device_count()}; one device and a CUDA build of torch are needed",
)

NBYTES = 1 << 28
REPEATS = 9
DIGEST_BAR = 0.5
"""Least speed of a digest, as a part of the speed of a copy on the device."""


# ---- digests and packing --------------------------------------------------------------------------------------------


def values_of(dtype: torch.dtype, nbytes: int = NBYTES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(nbytes // dtype.itemsize, generator=generator).to(dtype)


def speed(work: Callable[[], Any], nbytes: int) -> float:
    """Median GB/s of `work`, which handles `nbytes`; the first pass is not counted."""
    seconds = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return nbytes / median(seconds[1:]) / 1e9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 1, 12_345])
def test_a_digest_is_the_same_number_on_the_device(dtype: torch.dtype, start: int) -> None:
    values = values_of(dtype, (1 << 22) + 6 * dtype.itemsize)
    assert digest(values.cuda(), start) == digest(values, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_reads_at_half_the_speed_of_a_copy(dtype: torch.dtype) -> None:
    values = values_of(dtype).cuda()
    other = torch.empty_like(values)
    copying = speed(lambda: other.copy_(values), NBYTES)
    digesting = speed(lambda: digest(values), NBYTES)
    print(f"{dtype}: copy {copying:.0f} GB/s, digest {digesting:.0f} GB/s")
    assert digesting >= DIGEST_BAR * copying


@pytest.mark.parametrize("pieces", [1, 4096])
def test_packing_beside_a_copy(pieces: int) -> None:
    """No bar: the figures are printed. Packing ends in host memory, so a copy there stands beside it."""
    data, staged = values_of(torch.float32).cuda().view(torch.uint8), torch.empty(NBYTES, dtype=torch.uint8)
    held, size = regions_of(data), NBYTES // pieces
    found = [Matrix(0, 0, size, pieces, size)]
    copying = speed(lambda: staged.copy_(data), NBYTES)
    packing, unpacking = (
        speed(lambda: held.pack(found, staged), NBYTES),
        speed(lambda: held.unpack(found, staged), NBYTES),
    )
    print(f"{pieces} pieces: copy {copying:.1f} GB/s, pack {packing:.1f} GB/s, unpack {unpacking:.1f} GB/s")
    before = data.clone()
    data.zero_()
    held.unpack(found, staged)
    assert torch.equal(data, before)
