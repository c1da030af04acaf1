"""The command `ds-dynatrain compare-exact`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ds_dynatrain.exits import REFUSED, saying


def compare_exact(
    one: Annotated[Path, typer.Argument(help="A report file (report.jsonl) of a job with dynatrain.exact.")],
    other: Annotated[
        Path,
        typer.Argument(help="The report file of a different run of the same job, in any layout and on any machines."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether two runs of an exact job are bit-identical, or name the first step that differs and what differs.

    Needs neither torch nor DeepSpeed.

    Example: ds-dynatrain compare-exact two_ranks.jsonl four_ranks.jsonl

    Exit code: 0 if all common steps are identical, 1 if not, 2 if a file is unreadable or the jobs differ.
    """
    from ds_dynatrain.exact.bits.difference import compared, lines, report

    with saying("compare-exact"):
        runs, found = compared(one, other)
    if as_json:
        typer.echo(json.dumps(report(runs, found), indent=2))
    else:
        for line in lines(runs, found):
            typer.echo(line)
    if not found.is_identical:
        raise typer.Exit(REFUSED)
