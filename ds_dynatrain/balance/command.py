"""The command `ds-dynatrain balance`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_dynatrain.exits import saying


def balance(
    profile: Annotated[Path, typer.Argument(help="The profile: what `Profile.save` wrote.", show_default=False)],
    stages: Annotated[
        int | None, typer.Option(min=1, help="Pipeline stages. Without it: any number that --members can have.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Bytes that each member has, such as 80e9. Without it: enough.")
    ] = None,
    members: Annotated[
        int | None, typer.Option(min=1, help="Members. Without it: a member for each stage, or those of the profile.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Of a data rank in a step. Without it: as large as those that were timed.")
    ] = None,
    zero_stage: Annotated[int, typer.Option(min=0, max=3)] = 1,
    present: Annotated[
        str | None, typer.Option(help="The present boundaries, such as 0,3,7. Without it: uniform ones.")
    ] = None,
    bytes_per_second: Annotated[
        float, typer.Option(help="What a member sends. Without it messages take no time.")
    ] = float("inf"),
    latency_seconds: Annotated[float, typer.Option(help="Of one message.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how the layers of a profile would best be cut into pipeline stages, and what a step would take.

    It predicts, and changes nothing. Needs neither torch nor DeepSpeed.

    Example: ds-dynatrain balance profile.json --stages 4 --memory 80e9

    Exit code: 0, or 2 if the profile cannot be used or nothing fits.
    """
    from ds_dynatrain.balance.prediction import PredictionOptions, advise, report, show
    from ds_dynatrain.balance.step_time import Link

    with saying("balance"):
        link = Link(bytes_per_second, latency_seconds)
        asked = PredictionOptions(stages, members, micro_batches, zero_stage, memory, present, link)
        found = advise(profile, asked)
    if as_json:
        typer.echo(report(found))
    else:
        show(found)
