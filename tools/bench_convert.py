"""Measure memory and time of each conversion of a checkpoint, compared with its largest tensor and its total size.

python tools/bench_convert.py [--mib 64] [--tensors 12]

Each conversion runs in a process of its own. Its memory is Linux's high-water mark minus what the process held before
(the imports). The state is a hand-written DeepSpeed checkpoint of ZeRO stage 2 on 4 ranks, with masters and two
moments.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from figures import keep, machine
from memory import high_water, reset_high_water, resident

from ds_dynatrain.checkpoint.others.recognize import told_at
from ds_dynatrain.checkpoint.others.torch_files import check_crcs
from ds_dynatrain.checkpoint.reading import Reader

MIB, RANKS = 1 << 20, 4


def main() -> None:
    """Print a row for each conversion."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="of the largest tensor, in one state kind")
    parser.add_argument("--tensors", type=int, default=12, help="tensors of half that size, beside the largest")
    parser.add_argument("--folder", type=Path, help="on the disk to use; a temporary one by default")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        measure(*asked.one)
        return
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        shapes = shapes_of(asked.mib, asked.tensors)
        write_zero(Path(name) / "zero" / "global_step3", shapes)
        reading = [reading_cost(Path(name) / "zero" / "global_step3", with_crcs) for with_crcs in (False, True)]
        found = [(one, other, *run(*asks)) for one, other, asks in directions(Path(name))]
    numel = sum(torch.Size(shape).numel() for shape in shapes.values())
    whole = f"The largest tensor has {asked.mib} MiB in one state kind, all together {12 * numel // MIB} MiB."
    took = "; ".join(f"{one} to {other} {most:.0f} MiB, {seconds:.1f} s" for one, other, most, seconds in found)
    without, with_crcs = reading
    text = (
        f"Measured on: {machine()}. {whole} At most, beyond the imports: {took}. Reading all values of "
        f"DeepSpeed's checkpoint: {without:.1f} GB a second of processor time, with CRC32s {with_crcs:.1f}."
    )
    print(text)
    if asked.write is not None:
        keep(asked.write, "bench_convert", text)


def reading_cost(path: Path, with_crcs: bool) -> float:
    """Return how many GB per second of processor time a reader takes for all values, from the page cache; the best of
    three.
    """
    foreign, best = told_at(path), 0.0
    for _ in range(3):
        with Reader(path, foreign.manifest, links=True) as reader:
            begin = time.process_time()
            if with_crcs:
                check_crcs(path, foreign.archives)
            for row in (row for row in foreign.manifest if row.file):
                reader.values(row)
            best = max(best, reader.bytes_read / (time.process_time() - begin) / 1e9)
    return best


def run(*asks: object) -> tuple[float, float]:
    """Run one conversion in a process of its own. Return (peak memory in MiB, seconds)."""
    command = [sys.executable, __file__, "--one", *map(str, asks)]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return said["bytes"] / MIB, said["seconds"]


def directions(folder: Path) -> Iterator[tuple[str, str, tuple[Path, Path, str]]]:
    """Yield (from, to, arguments: path, out, --to) for each conversion, in an order in which each finds its input."""
    ours = folder / "ours"
    yield "DeepSpeed's, ZeRO stage 2", "ours", (folder / "zero", ours, "universal")
    for name in ("safetensors", "deepspeed-universal", "dcp"):
        yield "ours", name, (ours, folder / f"its.{name}", name)
    for name in ("safetensors", "deepspeed-universal", "dcp"):
        yield name, "ours", (folder / f"its.{name}", folder / f"from-{name}", "universal")


def measure(path: str, out: str, to: str) -> None:
    """Convert in this process, and print the additional peak memory in bytes and the seconds."""
    import pyarrow
    import torch.distributed.checkpoint.state_dict_saver
    from torch._subclasses.fake_tensor import FakeTensorMode

    import ds_dynatrain.engine.checkpoints.extra_state  # noqa: F401
    from ds_dynatrain.cli import conversion
    from ds_dynatrain.cli.choices import Format

    with FakeTensorMode():
        torch.empty(1)
    pyarrow.array([0])  # imports everything that the conversion needs
    before, begin = resident(), time.perf_counter()
    reset_high_water()
    list(conversion.convert(Path(path), Path(out), Format(to), None, False))
    seconds = time.perf_counter() - begin
    print(json.dumps({"bytes": high_water() - before, "seconds": seconds}))


def shapes_of(mib: int, tensors: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of fp32 matrices by name: one of this many MiB, and others of half the size."""
    wide = {"words.weight": (mib * 256, 1024)}
    return {**wide, **{f"layers.{number}.weight": (mib * 128, 1024) for number in range(tensors)}}


def write_zero(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a checkpoint in the form of DeepSpeed 0.19, with random values rank by rank."""
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text(folder.name)
    part = sum(torch.Size(shape).numel() for shape in shapes.values()) // RANKS
    config = {"bf16": {"enabled": True}}
    said = {"global_steps": 3, "global_samples": 36, "skipped_steps": 0, "dp_world_size": RANKS, "buffer_names": []}
    model = {"param_shapes": [{name: torch.Size(shape) for name, shape in shapes.items()}], "module": {}, **said}
    torch.save(
        {**model, "frozen_param_shapes": {}, "shared_params": {}, "ds_config": config},
        folder / "mp_rank_00_model_states.pt",
    )
    for rank in range(RANKS):
        state = {"step": torch.tensor(3.0), "exp_avg": torch.randn(part), "exp_avg_sq": torch.rand(part)}
        base = {"state": {0: state}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}]}
        optimizer = {
            "zero_stage": 2,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": [torch.randn(part)],
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_config": config}, folder / name)


if __name__ == "__main__":
    main()
