"""A run of DeepSpeed's converter to its universal format that records the converter's peak memory.

Usage: python -m ds_dynatrain.comparison.converter FOLDER NOTES. FOLDER contains the checkpoint and receives its
    universal form. The measurements are written to NOTES.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from ds_dynatrain.comparison.job import SAVED, UNIVERSAL
from ds_dynatrain.comparison.notes import Notes


def main(folder: Path, notes: Path) -> int:
    """Run the converter on the checkpoint in `folder`, write its peak memory to `notes`, and return its exit status.

    `--inject_missing_state` is needed because a plain model's checkpoint lacks entries that the converter requires.
    """
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(folder / SAVED / "step"), "--output_folder", str(folder / UNIVERSAL)]
    status = subprocess.run(command, check=False).returncode
    Notes(peak=1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss).write(notes, 0)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
