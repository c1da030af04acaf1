"""Help texts import no library that only the commands need, so that they appear at once."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "deepspeed", "numpy", "scipy", "matplotlib", "ds_dynatrain.space", "ds_dynatrain.records"}


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from ds_dynatrain.cli.main import app
from ds_dynatrain.extension import COMMANDS
assert "pydantic" not in sys.modules  # typer imports it for its own use, but only to parse
for name in [[], *([name] for name in COMMANDS), ["doctor"], ["coordinator"], ["probe"], ["checkpoint", "convert"]]:
    found = CliRunner().invoke(app, [*name, "--help"])
    assert found.exit_code == 0 and "Usage" in found.stdout, found.output
    assert not {HEAVY} & set(sys.modules), (name, {HEAVY} & set(sys.modules))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
