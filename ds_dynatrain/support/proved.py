"""Records of test runs on accelerators: which part ran where, when, with which versions and by which command.

Docs and warnings are made from these records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CPU = "cpu"
TEST_DEVICE = "test device"
"""A device of the tests (`tests/device`): host memory that torch treats as a device's memory.

Tests on it show where memory lies and where to wait, but nothing about speed, drivers or communicators.
"""


@dataclass(frozen=True)
class Proof:
    """A run on an accelerator.

    where: the devices.
    versions: the versions of torch and DeepSpeed.
    command: the command that repeats the run.
    """

    where: str
    date: str
    versions: str
    command: str

    def __str__(self) -> str:
        return f"{self.where}, {self.versions}, {self.date}"


PARTS: Mapping[str, str] = {
    "digests": "digests and packing of device memory",
    "groups": "process groups of the accelerator's own back-end",
    "stages": "starts and switches of ZeRO stage and data size",
    "batches": "moves by NCCL, in batches",
    "late": "late switches, which move states beside training",
    "members": "idle members that come in, and leave",
    "offload": "`offload_optimizer`, `offload_param`",
    "checkpoints": "checkpoints, saved and loaded",
    "pipe": "pipeline stages",
    "tensor": "tensor parallelism",
    "expert": "experts",
    "sequence": "sequence parallelism",
    "compile": "`engine.compile`",
    "fused": "torch's fused optimizers",
    "engines": "several engines in one process",
    "loops": "loops of Hugging Face and Lightning",
    "elastic": "nodes that come and go",
}
"""A map from each part of the package that uses a device to its description."""

_H200, _TORCH, _DAY = "1 × H200", "torch 2.11.0+cu130", "2026-11-26"
_ON_H200 = {
    "digests": "python tools/gpu_check.py --only digests",
    "stages": "pytest tests/gpu/core -k 'part_of_all_pairs or part_of_the_processes or members_wake or faults'",
    "members": "pytest tests/gpu/core -k 'part_of_the_processes or members_wake'",
    **{
        part: f"python tools/gpu_check.py --only 'core {part}'"
        for part in ("checkpoints", "offload", "tensor", "expert", "compile", "fused", "engines")
    },
}
"""A map from each part to the command that ran on the H200.

Four ranks shared the card, so collectives used gloo, and moves used CUDA IPC.
"""

HARDWARE: Mapping[tuple[str, str], Proof] = {
    **{("cuda", part): Proof(_H200, _DAY, _TORCH, command) for part, command in _ON_H200.items()},
    ("cuda", "pipe"): Proof("1 × H100", "2026-11-27", _TORCH, "python tools/gpu_check.py --only 'core pipe'"),
}
"""A map from (accelerator, part) to the run. A pair that is missing never ran."""

_CORE = "tests/device/core/test_core.py"
_AXES = "tests/device/core/test_axes.py"
_MEMORY = "tests/device/test_switch_memory.py"

ON_TEST_DEVICE: Mapping[str, str] = {
    "groups": "tests/device/test_collectives.py",
    "stages": _CORE,
    "batches": "tests/device/test_batched.py",
    "late": "tests/device/test_late.py",
    "members": _CORE,
    "offload": f"{_MEMORY}::test_no_third_copy_is_made",
    "checkpoints": _CORE,
    "pipe": f"{_AXES}::test_pipe_with_groups_of_other_stages",
    "tensor": f"{_AXES}::test_tensor_parallel",
    "expert": f"{_AXES}::test_expert",
    "sequence": f"{_AXES}::test_sequence_parallel",
    "compile": "tests/engine/test_compile.py::test_twelve_switches",
    "fused": f"{_MEMORY}::test_counts_of_fused_optimizers_stay_on_the_device",
    "engines": "tests/engine/test_engines.py",
    "loops": "tests/device/test_loops.py",
    "elastic": "tests/device/test_elastic.py",
}
"""A map from each part to its test on the test device."""


def standing(accelerator: str, part: str) -> str:
    """Return where a part has run, as text: the hardware, the test device only, or "never"."""
    proof = HARDWARE.get((accelerator, part))
    if proof is not None:
        return str(proof)
    return f"{TEST_DEVICE} only" if part in ON_TEST_DEVICE else "never"


def unproved(accelerator: str, parts: Iterable[str]) -> tuple[str, ...]:
    """Return the parts that never ran on this accelerator."""
    return tuple(part for part in parts if accelerator != CPU and (accelerator, part) not in HARDWARE)


def warning(accelerator: str, parts: Iterable[str]) -> str:
    """Return the warning to log before a job's first switch; "" if everything that the job uses has run on hardware."""
    if accelerator == CPU or not (never := unproved(accelerator, parts)):
        return ""
    named = [f"{PARTS[part]} ({standing(accelerator, part)})" for part in never]
    return (
        f"on {accelerator} hardware these parts of ds_dynatrain, which this job uses, never ran: {'; '.join(named)}. "
        "Every switch is proved before it counts, as on a CPU; see docs/gpu.md"
    )
