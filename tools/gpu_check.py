"""Run checks and measurements of this package on a machine with a GPU. Each step writes its results as JSON at once.

python tools/gpu_check.py --out DIR [--minutes 25] [--only digests nccl] [--dry-run]
python tools/gpu_check.py --carry FOLDER

Each step runs in a process of its own, so a step that hangs or crashes affects no other. A step is left out if it does
not fit into the remaining minutes, or if it needs NCCL and the probe of NCCL has failed. `--only nccl` selects all
steps with collectives by NCCL among ranks that share the card, the cheapest first. `--dry-run` prints what would run.
Without a device, the command says so and exits with 0. `--carry` makes a folder of the wheels that a machine without a
package index lacks (Python 3.12, x86-64). Install them there with `pip install --no-index --no-deps --target SITE
FOLDER/*.whl`, and put SITE on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_steps
from figures import table
from processes import with_variable

LIMIT_SECONDS, SPARE_SECONDS = 300.0, 10.0
"""Time limit of a step, and how much less the step itself is given, so that it can report unfinished parts."""
MARK = "GPU_CHECK_STEP"
"""Environment variable by which a step's processes are found."""
CARRIED = {
    "deepspeed==0.19.8": "wheel",
    "hjson==3.1.0": "wheel",
    "pydantic==2.14.3": "download",
    "pydantic_core==2.50.4": "download",
    "annotated-types==0.8.0": "download",
    "typing-inspection==0.4.5": "download",
}
"""Packages that the package needs and images for training often lack; "wheel" if there is only source, which is
built."""
FOREIGN = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", "--platform=manylinux_2_17_x86_64"]


def carry(folder: Path) -> None:
    """Make the folder of wheels."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, way in CARRIED.items():
        where = ["-w", str(folder)] if way == "wheel" else ["-d", str(folder), *FOREIGN]
        subprocess.run([sys.executable, "-m", "pip", way, "--quiet", "--no-deps", *where, name], check=True)
    size = sum(each.stat().st_size for each in folder.iterdir())
    print(f"{len(CARRIED)} wheels in {folder}, {size / 2**20:.1f} MiB")


def chosen(names: list[str]) -> dict[str, float]:
    """Return the steps with these names, in order and each once, with the seconds that each may take."""
    found = dict[str, float]()
    for name in names:
        for step, seconds in gpu_steps.GROUPS.get(name, {name: LIMIT_SECONDS}).items():
            found.setdefault(step, seconds)
    return found


def left_out(name: str, seconds: float, left: float, every: dict[str, dict[str, Any]]) -> str:
    """Return why a step is not run; "" if it is.

    left: the seconds that are left.
    every: the results so far, by step.
    """
    if left < min(seconds, LIMIT_SECONDS) / 2:
        return f"left out: it may take {seconds:.0f} s, and {max(left, 0):.0f} s are left"
    probe = every.get(gpu_steps.PROBE, {"exit": 0})
    needs_probe = name.endswith(gpu_steps.NCCL) and name != gpu_steps.PROBE
    return "left out: the probe failed" if needs_probe and probe.get("exit") != 0 else ""


def run(name: str, out: Path, seconds: float) -> dict[str, Any]:
    """Run one step in a process of its own. Return its results, or why it has none. Its output goes to a file.

    Processes that it leaves behind are killed, because they would use the card during the next step.
    """
    path, log, mark, begin = out / f"{name}.json", out / f"{name}.log", f"{os.getpid()} {name}", time.monotonic()
    command = [sys.executable, gpu_steps.__file__, name, str(path), str(max(seconds - SPARE_SECONDS, 1))]
    try:
        with log.open("wb") as output:
            environment = {**os.environ, MARK: mark}
            done = subprocess.run(command, stdout=output, stderr=output, timeout=seconds, env=environment)
        error = "" if done.returncode == 0 else f"exit {done.returncode}: {log.read_text(errors='replace')[-2000:]}"
    except subprocess.TimeoutExpired:
        error = f"not done in {seconds:.0f} s: {log.read_text(errors='replace')[-2000:]}"
    for process in with_variable(MARK, mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found |= {"error": error} if error else {}
    found["seconds"] = round(time.monotonic() - begin, 1)
    path.write_text(json.dumps(found, indent=1))
    return found


def shown(found: dict[str, Any]) -> str:
    """Return the results of a step as text for one cell."""
    return "; ".join(f"{name}: {value}" for name, value in found.items() if name != "seconds")


def main() -> None:
    """Run the steps, and print their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu_check"))
    parser.add_argument("--minutes", type=float, default=25)
    names = [*gpu_steps.GROUPS, *gpu_steps.STEPS]
    parser.add_argument("--only", nargs="+", choices=names, default=list(gpu_steps.STEPS))
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--carry", type=Path, help="make a folder of wheels, and nothing else")
    args = parser.parse_args()
    if args.carry is not None:
        return carry(args.carry)
    if args.dry_run:
        rows = [[name, f"{seconds:.0f}", gpu_steps.described(name)] for name, seconds in chosen(args.only).items()]
        return print(table(("step", "at most, s", "what it runs"), rows))
    if not gpu_steps.has_device():
        return print("no accelerator that torch can use here: nothing was checked")
    check(chosen(args.only), args.out, time.monotonic() + 60 * args.minutes)


def check(steps: dict[str, float], out: Path, end: float) -> None:
    """Run steps until the time `end`, print their results, and write all of them."""
    out.mkdir(parents=True, exist_ok=True)
    rows, every = [], dict[str, dict[str, Any]]()
    for name, seconds in steps.items():
        left = end - time.monotonic()
        why = left_out(name, seconds, left, every)
        every[name] = found = {"error": why} if why else run(name, out, min(seconds, left))
        if name == gpu_steps.PROBE:
            os.environ["RANKS"] = str(gpu_steps.ranks_after(found))
        rows.append([name, found.get("seconds", "–"), shown(found)])
        print(f"{name}: {rows[-1][2]}", flush=True)
    text, proved = table(("step", "seconds", "found"), rows), gpu_steps.proved(every, *gpu_steps.versions())
    (out / "gpu_check.md").write_text(text + (f"\nFor support/proved.py:\n\n{proved}\n" if proved else ""))
    print(text, proved, sep="\n")


if __name__ == "__main__":
    main()
