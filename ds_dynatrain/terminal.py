"""The console to which commands print. Tables fit the terminal, and lines in a pipe or a file are never wrapped."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PIPE_COLUMNS = 10_000
"""Width for output to a pipe or file, enough for any line. rich would otherwise wrap lines at 80 columns."""


def stdout_console() -> Console:
    """Return a console for stdout that wraps lines at the terminal's width (or COLUMNS), but not in a pipe."""
    is_bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if is_bounded else PIPE_COLUMNS)
