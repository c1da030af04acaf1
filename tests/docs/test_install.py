"""What a stranger does first, as README has it: install beside a torch and a DeepSpeed, doctor, a first switch."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.docs.pages import README, ROOT, blocks

SECONDS = 600
BEHIND = "import site; site.addsitedir({packages!r})\n"
"""The torch and the DeepSpeed that are there already."""


@pytest.mark.full
@pytest.mark.usefixtures("shared_memory")
@pytest.mark.timeout(2 * SECONDS)
def test_the_first_ten_minutes(tmp_path: Path) -> None:
    """Needs an index of packages, for what builds the package."""
    clone, home = tmp_path / "clone", tmp_path / "environment"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    venv.create(home, with_pip=True)
    places = {"base": str(home), "platbase": str(home)}
    packages = Path(sysconfig.get_path("purelib", scheme="venv", vars=places))
    (packages / "behind.pth").write_text(BEHIND.format(packages=sysconfig.get_path("purelib")))
    (script,) = blocks(README, "python")
    (clone / "first_switch.py").write_text(script)
    (install, *_), (start, *_) = list(blocks(README, "text")), list(blocks(README, "bash"))
    assert install.startswith("pip install .")
    env = {**os.environ, "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}
    for commands in (install, "python -m torch.distributed.run" + re.sub(r"^.*?torchrun", "", start)):
        done = subprocess.run(
            ["bash", "-euc", commands], cwd=clone, env=env, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "step 20: loss 0.661, data=4 zero_stage=3" in done.stdout
    where = subprocess.run(
        [home / "bin" / "python", "-c", "import ds_dynatrain; print(ds_dynatrain.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(home) in where.stdout
