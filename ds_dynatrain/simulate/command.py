"""The command `ds-dynatrain simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.exits import saying


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(help="JSON lines, or a .csv of a spot market; with --draw: to be written.", show_default=False),
    ],
    profile: Annotated[Path, typer.Option(help="The profile of the model that `Profile.save` wrote.")],
    cluster: Annotated[
        Path, typer.Option(help="A cluster file: what `ds-dynatrain probe` wrote, or one written by hand.")
    ],
    layout: Annotated[
        str | None,
        typer.Option(help="The layout of all members, such as pipe=4,data=8. Default: data ranks only, ZeRO stage 1."),
    ] = None,
    least: Annotated[int, typer.Option(help="Members below which training waits.")] = 1,
    most: Annotated[int | None, typer.Option(min=1, help="Members that train at once; more are spares.")] = None,
    assume: Annotated[
        str, typer.Option(help="Times that are not known, such as start_seconds=90,save_every_seconds=1800.")
    ] = "",
    draw: Annotated[
        str | None,
        typer.Option(help="Draw the trace first, such as hours=24,loss=3600,preemption=7200,slow=7200,back=600."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of --draw. Default: 0.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw the outcome into a .svg, .png or .pdf file; needs matplotlib.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate a job through losses, slow-downs, joins and pre-emptions, under this scheduler and under rival rules.

    Needs no job, no GPU and no torch. --draw writes a new trace from exponential distributions, whose means are in
    seconds.

    Example: ds-dynatrain simulate trace.jsonl --profile profile.json --cluster cluster.toml --picture storm.svg

    Exit code: 0, or 2 if the trace, the profile, the cluster file or an option cannot be used.
    """
    from ds_dynatrain.simulate import outcome
    from ds_dynatrain.simulate.player import play
    from ds_dynatrain.simulate.simulated_job import Assumptions, SimulatedJob
    from ds_dynatrain.simulate.trace import read_trace, read_values, write_drawn

    with saying("simulate"):
        assumed = read_values(Assumptions, assume, "--assume")
        job = SimulatedJob.read(profile, cluster, layout, assumed, least, most)
        if draw is not None:
            write_drawn(trace, draw, seed or 0, job.topology)
        elif seed is not None:
            raise ConfigError(f"--seed {seed}: nothing is drawn from it without --draw; give both, or neither")
        found = play(job, read_trace(trace, job.topology))
        if picture is not None:
            outcome.draw_picture(found, picture)
    outcome.show(found, as_json)
