"""The command `ds-dynatrain balance`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_dynatrain.exits import saying


def balance(
    profile: Annotated[Path, typer.Argument(help="The profile that `Profile.save` wrote.", show_default=False)],
    stages: Annotated[
        int | None, typer.Option(min=1, help="Number of pipeline stages. Default: any that --members allows.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Bytes of memory per member, such as 80e9. Default: no limit.")
    ] = None,
    members: Annotated[
        int | None, typer.Option(min=1, help="Number of members. Default: one per stage, or the profile's.")
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Micro-batches per data rank and step. Default: of the size that was timed."),
    ] = None,
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="The ZeRO stage.")] = 1,
    present: Annotated[
        str | None, typer.Option(help="The current boundaries, such as 0,3,7. Default: uniform boundaries.")
    ] = None,
    bytes_per_second: Annotated[
        float, typer.Option(help="A member's sending speed. Default: messages take no time.")
    ] = float("inf"),
    latency_seconds: Annotated[float, typer.Option(help="Latency of a message.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict how best to split a profile's layers into pipeline stages, and how long a step would take.

    Changes nothing, and needs neither torch nor DeepSpeed.

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
