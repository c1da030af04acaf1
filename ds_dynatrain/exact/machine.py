"""Checks of whether a machine can run exact jobs: settings, threads, compiled sums, and how kernels round."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass

from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.report.check import Check

THREADS = "OMP_NUM_THREADS"
VALUES = 10_007


@dataclass(frozen=True)
class ExactMachine:
    """The result of checking one machine.

    checks: the checks, one for each printed line.
    machine: a map from the settings that must be equal on all machines of a job to their values.
    bits: a hash of the results of a few kernels, which must also be equal on all machines; "" if none could be run.
    """

    checks: tuple[Check, ...]
    machine: dict[str, str]
    bits: str = ""

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the failed checks. Any failed check rules out an exact job."""
        return tuple(check.name for check in self.checks if check.is_well is False)


def examine_exact(has_deepspeed: bool) -> ExactMachine:
    """Check whether this process can run exact jobs, and run a few kernels. Takes about a second.

    has_deepspeed: whether DeepSpeed is installed, with all names on which this package relies.
    """
    if not has_deepspeed:
        return ExactMachine((Check("kernels", "not run", False, "torch and DeepSpeed are needed, see above"),), {})
    with redirect_stdout(sys.stderr):
        from ds_dynatrain.exact.adapters.refusals import machine
        from ds_dynatrain.exact.trial import try_kernels

        trial, values = try_kernels(), machine()
    kernels = Check("kernels", "the same bits wherever operands lie", True)
    if trial.moving:
        note = f"{', '.join(trial.moving)}: other bits where operands lie elsewhere, as in another world or ZeRO stage"
        note += "; export MKL_CBWR=COMPATIBLE before Python starts" if "products" in trial.moving else ""
        kernels = Check("kernels", "bits follow the place of operands", False, note)
    note = "of a few kernels: on another machine of the job this line has to be the same"
    checks = *_device(), *_settings(values), *_sums(), kernels, Check("bits", trial.bits, None, note)
    return ExactMachine(checks, values, trial.bits)


def _device() -> Iterator[Check]:
    from ds_dynatrain.adapters.groups.device import compute_device, is_accelerated
    from ds_dynatrain.exact.adapters.refusals import refuse_series

    try:
        refuse_series()
    except UnsupportedError as error:
        yield Check("series of DeepSpeed", "not tested", False, str(error))
    device = compute_device().type
    note = "" if not is_accelerated() else "an exact job runs on CPUs: set DS_ACCELERATOR=cpu"
    yield Check("device", device, not is_accelerated(), note)


def _settings(values: dict[str, str]) -> Iterator[Check]:
    """Yield a check for each setting that processes compare when a job starts.

    A check reports whether the setting is right only if that can be judged on one machine.
    """
    import torch

    from ds_dynatrain.exact.adapters.refusals import LOOSE_MODES, MODE

    for name, value in values.items():
        if name == MODE:
            is_loose = torch.backends.mkl.is_available() and value.upper() in LOOSE_MODES
            note = "MKL rounds by the alignment of memory: export MKL_CBWR=COMPATIBLE before Python starts"
            yield Check(name, value or "not set", not is_loose, note if is_loose else "")
        else:
            yield Check(name, value, None, "the same on all machines")
    threads = os.environ.get(THREADS)
    note = "one process takes all cores and several of torchrun's take one each: export OMP_NUM_THREADS=1"
    yield Check(THREADS, threads or "not set", threads is not None, "" if threads else note)


def _sums() -> Iterator[Check]:
    """Check that the compiled squares and digests equal those of numpy, because machines may use either."""
    import numpy as np

    from ds_dynatrain.exact.bits.squares import Grid, in_numpy, largest, largest_in_numpy, square_sums
    from ds_dynatrain.transfer.weighing import Compiled, HostRuns, InNumpy, is_compiled

    if not is_compiled():
        yield Check("sums", "in numpy", None, "the same bits, later: install again where a C compiler is")
        return
    values = ((np.arange(VALUES) * 40503 % 65536 - 32768) / 4096).astype(np.float32)
    grid = Grid.of(largest(values), VALUES)
    by = 2.0 ** (grid.bits - grid.exponent), 2.0**grid.bits
    data, runs = values.view(np.uint8), HostRuns(0, 0, 1, values.nbytes, 12, 0)
    are_equal = {
        "largest": largest(values) == largest_in_numpy(values),
        "squares": square_sums(values, grid) == in_numpy(values, *by),
        "digests": (Compiled().sum(data, runs) - InNumpy().sum(data, runs)) % (1 << 64) == 0,
    }
    wrong = [name for name, is_equal in are_equal.items() if not is_equal]
    note = f"{', '.join(wrong)}: the C module and numpy differ, install the package again" if wrong else ""
    yield Check("sums", "compiled, and equal to numpy's" if not wrong else "differ", not wrong, note)
