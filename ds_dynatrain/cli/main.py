"""Commands and options of `ds-dynatrain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_dynatrain.cli.choices import Format, TransportChoice, WeightType
from ds_dynatrain.exits import REFUSED, saying
from ds_dynatrain.extension import COMMANDS, named
from ds_dynatrain.version import __version__

TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with the job's token. Default: DYNATRAIN_TOKEN_FILE, then DYNATRAIN_TOKEN, then your user's token."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Coordinator = Annotated[str, typer.Argument(help="HOST:PORT of the coordinator, or file:FILE.")]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"ds-dynatrain {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Live changes of world size, ZeRO stage and parallel sizes for DeepSpeed jobs."""


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="A DeepSpeed configuration file.", show_default=False)] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes. Default: WORLD_SIZE, then dynatrain.layout.data, then 1."),
    ] = None,
    as_json: AsJson = False,
    table: Annotated[bool, typer.Option("--table", help="Print the whole support table as Markdown.")] = False,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Also check what an exact job needs; implied by a configuration with `exact`."),
    ] = False,
    tries: Annotated[
        bool, typer.Option("--try", help="Also start two processes that train, switch once and end. Takes a minute.")
    ] = False,
) -> None:
    """Say whether a job would start here, with the given configuration if any, and what to do if not.

    Example: ds-dynatrain doctor ds_config.json --processes 8

    Exit code: 0 if the job would start, 1 if it would be refused or not be exact, 2 if the configuration is unreadable.
    """
    from ds_dynatrain.cli import show

    if table:
        show.whole_table()
        return
    from ds_dynatrain.cli.configuration import examine_file
    from ds_dynatrain.cli.doctor import examine_environment
    from ds_dynatrain.exact.machine import examine_exact

    environment = examine_environment(tries)
    with saying("doctor"):
        job = None if config is None else examine_file(config, processes, environment.has_deepspeed)
    rounding = (
        examine_exact(environment.has_deepspeed) if exact or (job is not None and "exact" in job.extensions) else None
    )
    if as_json:
        show.json_report(environment, job, rounding)
    else:
        show.report(environment, job, rounding)
    would_start = not environment.failed and (job is None or job.would_start)
    if not would_start or (rounding is not None and rounding.failed):
        raise typer.Exit(REFUSED)


@app.command()
def init(
    config: Annotated[Path, typer.Argument(help="A DeepSpeed configuration file.", show_default=False)],
    checkpoints: Annotated[
        str | None, typer.Option(help="A folder for checkpoints twice an hour, from which the next start continues.")
    ] = None,
    report: Annotated[str | None, typer.Option(help="A file that gets a line of JSON for each switch.")] = None,
    exact: Annotated[
        bool | None, typer.Option("--exact/--no-exact", help="Whether all worlds compute the same bits.")
    ] = None,
) -> None:
    """Add a `dynatrain` block to a DeepSpeed configuration file, or complete the block that is there.

    At a terminal, asks for each option that is not given. Keys that are there already are neither asked for nor
    changed, and the rest of the file stays as it is.

    Example: ds-dynatrain init ds_config.json --checkpoints checkpoints

    Exit code: 0, or 2 if the file cannot be read, or the block would be invalid; the file is unchanged then.
    """
    import sys

    from ds_dynatrain.cli import block
    from ds_dynatrain.config_file import read_config

    with saying("init"):
        held, asks = read_config(config), sys.stdin.isatty()
        if checkpoints is None and asks and block.lacks(held, "fallback"):
            checkpoints = typer.prompt(
                "A folder for automatic checkpoints (Enter: none)", default="", show_default=False
            )
        if report is None and asks and block.lacks(held, "report"):
            report = typer.prompt(
                "A file for a line of JSON about each switch (Enter: none)", default="", show_default=False
            )
        if exact is None and asks and block.lacks(held, "exact"):
            exact = typer.confirm("The same bits in any number of ranks? Steps take longer")
        made = block.complete(config, block.additions(checkpoints or "", report or "", bool(exact)))
    typer.echo(f"{config} has the block {made}; whether a job would start with it: ds-dynatrain doctor {config}")


@app.command()
def coordinator(
    address: Annotated[str, typer.Argument(help="HOST:PORT to listen on, which is every torchrun's --rdzv-endpoint.")],
    nnodes: Annotated[str, typer.Option(help="MIN:MAX nodes; overrides torchrun's --nnodes.")],
    job: Annotated[str, typer.Option(help="The job's name (--rdzv-id). Default: the first node's.")] = "",
    token_file: TokenFile = None,
    store_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the store for process groups; 0: any free port.")
    ] = 0,
    silent_seconds: Annotated[float, typer.Option(help="A member without a heartbeat for this long is lost.")] = 5.0,
    stuck_seconds: Annotated[
        float, typer.Option(help="A member whose main thread stands still for this long is lost; 0: never.")
    ] = 300.0,
    recovery_seconds: Annotated[float, typer.Option(help="How long to wait first for members of a running job.")] = 3.0,
    announce: Annotated[
        Path | None, typer.Option(help="A file to write the address to, for --rdzv-endpoint=file:FILE.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            help='HOST:PORT of the page for browsers and Prometheus, or "off". '
            "Default: a free port, only for this machine."
        ),
    ] = None,
    http_token_file: Annotated[
        Path | None, typer.Option(help="A file with the readers' token. Default: a file that is created.")
    ] = None,
) -> None:
    """Coordinate the nodes of an elastic job from start to end, so that no node is special.

    The coordinator can be killed and restarted: members continue, reconnect, and report the state of the job. With
    --announce it can be started elsewhere, on any port; a coordinator that is still running then exits.

    Example: ds-dynatrain coordinator 10.0.0.1:29400 --nnodes 2:8 --job run-7 --token-file run-7.token

    Exit code: 0 if the job has finished, 2 if it could not listen or a newer coordinator has replaced it.
    """
    from ds_dynatrain.cli import jobs as membership
    from ds_dynatrain.elastic.settings import Settings

    with saying("coordinator"):
        least, most = membership.nodes(nnodes)
        times = {"silent_seconds": silent_seconds, "stuck_seconds": stuck_seconds, "recovery_seconds": recovery_seconds}
        settings = Settings(least, most, **times)
        given = job, token_file, store_port, announce, http, http_token_file
        membership.run_coordinator(address, settings, *given)


@app.command()
def status(
    address: Coordinator,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show an elastic job's members, what each of them is doing, and the last change.

    Example: ds-dynatrain status 10.0.0.1:29400 --token-file run-7.token

    Exit code: 0, or 2 if no coordinator answers or it rejects the request.
    """
    from ds_dynatrain.cli import jobs as membership

    with saying("status"):
        found = membership.status(address, token_file)
    if as_json:
        typer.echo(found.model_dump_json(indent=2, exclude={"kind"}))
    else:
        membership.show_status(found)


@app.command()
def leave(
    address: Coordinator,
    node: Annotated[str, typer.Argument(help="The node, as `ds-dynatrain status` shows it before the slash.")],
    token_file: TokenFile = None,
) -> None:
    """Let a node hand over its state and leave an elastic job, as SIGTERM to its torchrun does.

    Returns once the workers have been told; the status shows when they have left.

    Example: ds-dynatrain leave 10.0.0.1:29400 NODE --token-file run-7.token

    Exit code: 0, or 2 if there is no such node, no coordinator answers, or it rejects the request.
    """
    from ds_dynatrain.cli import jobs as membership

    with saying("leave"):
        told = membership.leave(address, node, token_file)
    typer.echo(f"told to leave: {', '.join(told)}")


@app.command()
def probe(
    write: Annotated[Path | None, typer.Option(help="The cluster file to write.")] = None,
    transport: Annotated[
        TransportChoice, typer.Option(help="As dynatrain.transport: gloo does not read the memory of other members.")
    ] = TransportChoice.AUTO,
) -> None:
    """Measure memory, links inside nodes and links between nodes, under torchrun with a process for each member.

    Members on hosts of one name are one node; DYNATRAIN_NODE gives it another name. Start it in each process of a
    launch: torchrun --nproc-per-node=8 -m ds_dynatrain.cli probe --write cluster.toml

    Example: ds-dynatrain probe --write cluster.toml

    Exit code: 0, or 2 outside of torchrun, or if the processes do not reach each other.
    """
    from ds_dynatrain.cli import probe as links

    with saying("probe"):
        text = links.probe(transport.value)
        if text is not None and write is not None:
            write.write_text(text, encoding="utf-8")
    if text is not None:
        typer.echo(text, nl=False)


for name, path in COMMANDS.items():
    app.command(name)(named(path))

checkpoint = typer.Typer(no_args_is_help=True, help="Inspect, verify and convert checkpoints.")
app.add_typer(checkpoint, name="checkpoint")

Where = Annotated[Path, typer.Argument(help="A checkpoint, or a folder of checkpoints (the latest is used).")]


@checkpoint.command()
def inspect(path: Where, as_json: AsJson = False) -> None:
    """Show what a checkpoint contains: steps, layout, state kinds, bytes. Tensors are not read.

    Example: ds-dynatrain checkpoint inspect checkpoints

    Exit code: 0, or 2 if there is no checkpoint or its record is damaged.
    """
    import json

    from ds_dynatrain.cli import checkpoints

    with saying("checkpoint inspect"):
        said = checkpoints.summary(checkpoints.found(path))
    if as_json:
        typer.echo(json.dumps(said, indent=2))
    else:
        checkpoints.show(said)


@checkpoint.command()
def convert(
    path: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, or a folder of checkpoints (the latest is used); with --to universal: another tool's."
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            help="A new safetensors file (in a folder: model.safetensors) or DCP folder; for universal and "
            "deepspeed-universal, the folder of checkpoints."
        ),
    ],
    to: Annotated[
        Format, typer.Option(help="The format to write. safetensors holds only weights; universal is ds_dynatrain's.")
    ] = Format.SAFETENSORS,
    dtype: Annotated[
        WeightType | None, typer.Option(help="The type to convert all weights to. Default: unchanged.")
    ] = None,
    trust_pickle: Annotated[
        bool,
        typer.Option(
            "--trust-pickle",
            help="With --to universal: also unpickle code, not only tensors and plain values.",
        ),
    ] = False,
) -> None:
    """Convert a checkpoint to another tool's format or, with --to universal, from another tool's format.

    Example: ds-dynatrain checkpoint convert checkpoints model.safetensors --dtype bfloat16

    Exit code: 0, or 2 if there is no checkpoint to read, it is damaged, or the output cannot
    be written.
    """
    from ds_dynatrain.cli import conversion

    with saying("checkpoint convert"):
        for line in conversion.convert(path, out, to, dtype, trust_pickle):
            typer.echo(line)


@checkpoint.command()
def verify(path: Where) -> None:
    """Read a whole checkpoint and compare it with its digests.

    Example: ds-dynatrain checkpoint verify checkpoints

    Exit code: 0 if everything is as it was saved, 1 if not (a line for each difference), 2 if there is no checkpoint.
    """
    from ds_dynatrain.cli import checkpoints

    with saying("checkpoint verify"):
        saved = checkpoints.found(path)
    wrong = 0
    for line in checkpoints.damage(saved):
        wrong += 1
        typer.echo(line)
    typer.echo(f"{saved.path}: {f'{wrong} places are damaged' if wrong else 'all is as it was saved'}")
    if wrong:
        raise typer.Exit(REFUSED)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="ds-dynatrain")
