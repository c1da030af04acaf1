"""Exit of a command that cannot do what it was asked to do: one line on stderr, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ds_dynatrain.errors import DynatrainError

REFUSED, UNREADABLE, INTERRUPTED = 1, 2, 130
"""Exit codes other than 0."""


@contextmanager
def saying(command: str) -> Iterator[None]:
    """Context manager that reports an error raised in its block as one line on stderr, and exits with the matching
    exit code."""
    try:
        yield
    except (DynatrainError, OSError) as error:
        typer.echo(f"ds-dynatrain {command}: {error}", err=True)
        raise typer.Exit(UNREADABLE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
