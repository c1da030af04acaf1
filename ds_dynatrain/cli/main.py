"""Commands and options of `ds-dynatrain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

REFUSED, UNREADABLE = 1, 2
"""Exit codes of `doctor` besides 0."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Live changes of world size and ZeRO stage for DeepSpeed jobs.",
)


@app.callback()
def commands() -> None:
    """Keep `doctor` a command of its own while it is the only one."""


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="A DeepSpeed configuration file.", show_default=False)] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes of the launch. Without it: WORLD_SIZE, else dynatrain.layout.data, else 1."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Print the whole support table as Markdown.")] = False,
) -> None:
    """Say whether a job would start here, with a configuration if one is given, and what to do if not.

    Exit code: 0 it would start, 1 it would be refused, 2 the configuration cannot be read.
    """
    from ds_dynatrain.cli import show

    if table:
        show.whole_table()
        return
    from ds_dynatrain.cli.configuration import examine_file
    from ds_dynatrain.cli.environment import examine_environment
    from ds_dynatrain.errors import ConfigError

    environment = examine_environment()
    try:
        job = None if config is None else examine_file(config, processes, environment.has_deepspeed)
    except ConfigError as error:
        typer.echo(f"ds-dynatrain doctor: {error}", err=True)
        raise typer.Exit(UNREADABLE) from None
    if as_json:
        show.json_report(environment, job)
    else:
        show.report(environment, job)
    if not environment.is_well or (job is not None and not job.would_start):
        raise typer.Exit(REFUSED)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="ds-dynatrain")
