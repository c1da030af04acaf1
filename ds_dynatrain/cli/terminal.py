"""Console for commands: tables that fit a terminal, and whole lines in a pipe or a file."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PIPE_COLUMNS = 10_000
"""Width for pipes, enough for any line; rich would otherwise cut lines at 80 columns."""


def stdout_console() -> Console:
    """Return a console for stdout that folds at the terminal's width (or COLUMNS), and never in a pipe."""
    is_bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if is_bounded else PIPE_COLUMNS)
