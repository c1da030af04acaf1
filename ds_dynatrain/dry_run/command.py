"""The command `ds-dynatrain plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_dynatrain.exits import REFUSED, saying


def plan(
    model: Annotated[
        str,
        typer.Option(help="A model such as llama-3-70b, a Hugging Face config.json, or a JSON of names and shapes."),
    ],
    source: Annotated[str, typer.Option("--from", help="The present layout, such as tensor=8,data=4,zero_stage=1.")],
    target: Annotated[
        str | None, typer.Option("--to", help="The wanted layout; axes that it leaves out keep their sizes.")
    ] = None,
    deepspeed: Annotated[
        Path | None, typer.Option(help="DeepSpeed's configuration. Without it: bf16, Adam, ZeRO's defaults.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster file: what `ds-dynatrain probe` wrote, or one written by hand.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=1.0, help="Bytes per second of a member between nodes, without a cluster file.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Members of a node, without a cluster file.")] = 8,
    suggest: Annotated[
        bool,
        typer.Option("--suggest", help="Instead of --to: the layouts of --gpus that fit, cheapest to reach first."),
    ] = False,
    gpus: Annotated[int | None, typer.Option(min=1, help="Ranks of the layouts to suggest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write one page for a browser, which needs no network.")
    ] = None,
) -> None:
    """Say what a change of layout would cost, and whether it fits. Needs no job, no GPU and no torch.

    Example: ds-dynatrain plan --model llama-3-8b --from data=8,zero_stage=1 --to data=4,zero_stage=3

    Exit code: 0 it fits, 1 it is refused, 2 a model, a file or an option cannot be used.
    """
    from ds_dynatrain.dry_run import printing
    from ds_dynatrain.dry_run.change import Question

    with saying("plan"):
        question = Question.read(model, source, target, deepspeed, cluster, bandwidth, gpus_per_node)
        if suggest:
            printing.suggestions(question.suggestions(gpus or question.source.world_size), as_json)
            return
        answer = question.answer()
        if html is not None:
            html.write_text(printing.page(answer), encoding="utf-8")
    printing.answer(answer, as_json)
    if not answer.fits:
        raise typer.Exit(REFUSED)


def estimate(
    model: Annotated[
        str,
        typer.Argument(help="A model such as llama-3-8b, a Hugging Face config.json, or a JSON of names and shapes."),
    ],
    data: Annotated[int, typer.Option(min=1, help="Number of data ranks.")] = 1,
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 1,
    pipe: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor ranks.")] = 1,
    expert: Annotated[int, typer.Option(min=1, help="Expert ranks.")] = 1,
    deepspeed: Annotated[
        Path | None, typer.Option(help="DeepSpeed's configuration. Without it: bf16, Adam, ZeRO's defaults.")
    ] = None,
) -> None:
    """Say how much memory a model's state takes in a layout, and what switches from there cost. Needs no job.

    Example: ds-dynatrain estimate llama-3-8b --data 8 --zero-stage 3

    Exit code: 0, 1 if the layout is refused, 2 if a model, a file or an option cannot be used.
    """
    from ds_dynatrain.dry_run import printing
    from ds_dynatrain.dry_run.change import Question

    with saying("estimate"):
        sizes = f"data={data},zero_stage={zero_stage},pipe={pipe},tensor={tensor},expert={expert}"
        question = Question.read(model, sizes, sizes, deepspeed, None, None, 8)
        refused = question.job.refusal(question.source, question.source)
        held = [] if refused is not None else question.held()
        switches = [] if refused is not None else question.suggestions(question.source.world_size)
    printing.estimate(question, refused, held, switches)
    if refused is not None:
        raise typer.Exit(REFUSED)
