"""How a command ends that cannot do what it is asked: a line, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ds_dynatrain.errors import DynatrainError

REFUSED, UNREADABLE, INTERRUPTED = 1, 2, 130
"""Exit codes besides 0."""


@contextmanager
def saying(command: str) -> Iterator[None]:
    """What the command cannot do is said in a line, and is its exit code."""
    try:
        yield
    except (DynatrainError, OSError) as error:
        typer.echo(f"ds-dynatrain {command}: {error}", err=True)
        raise typer.Exit(UNREADABLE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
