"""How commands print: tables that fit a terminal, and whole lines into a pipe or a file."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PIPE_COLUMNS = 10_000
"""Wide enough for any line; rich would otherwise cut at 80 columns what goes into a pipe."""


def stdout_console() -> Console:
    """Return a console for stdout that folds at the terminal's width (or COLUMNS), and never in a pipe."""
    is_bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if is_bounded else PIPE_COLUMNS)
