"""Write docs/reference/ (public names, the command line) and the table of keys in docs/configuration.md, from the code.

python tools/reference.py           # write the pages
python tools/reference.py --check   # exit code 1 if they are not what the code says

The written page of names only lists them. `make docs` adds their docstrings (docs/conf.py).
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import typer
from keys import table as table_of_keys
from torch.utils.data import DataLoader

from ds_dynatrain.cli.main import app
from ds_dynatrain.data.loader import Loader

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "reference"
NOTE = "<!-- written by tools/reference.py: do not change it by hand -->"
END = "<!-- end -->"

NAMES: dict[str, tuple[str, ...]] = {
    "Start": (
        "ds_dynatrain.engine.initialize.initialize",
        "ds_dynatrain.engine.initialize.init_distributed",
        "ds_dynatrain.adapters.zero.optimizers.register_optimizer",
        "ds_dynatrain.space.layout.Layout",
        "ds_dynatrain.extension.Extension",
    ),
    "The engine": (
        "ds_dynatrain.engine.dynatrain_engine.DynatrainEngine",
        "ds_dynatrain.engine.pipeline_engine.DynatrainPipelineEngine",
    ),
    "What the engine gives": (
        "ds_dynatrain.reshard.pending.PendingSwitch",
        "ds_dynatrain.reshard.pending.SwitchEstimate",
        "ds_dynatrain.report.event.SwitchEvent",
        "ds_dynatrain.report.event.Side",
        "ds_dynatrain.report.event.CertificateSummary",
        "ds_dynatrain.engine.changes.Change",
        "ds_dynatrain.engine.changes.Place",
        "ds_dynatrain.reshard.context.OwnGroup",
        "ds_dynatrain.engine.checkpoints.saving.PendingSave",
        "ds_dynatrain.buddies.extension.Protection",
        "ds_dynatrain.balance.balancer.Balancer",
    ),
    "Loaders and weights": (
        "ds_dynatrain.data.loader.Loader",
        "ds_dynatrain.data.loader.TrainLoader",
        "ds_dynatrain.data.loader.EvaluationLoader",
        "ds_dynatrain.data.loader.MicroBatch",
        "ds_dynatrain.weights.weight_source.source",
        "ds_dynatrain.weights.weight_source.WeightSource",
        "ds_dynatrain.weights.outputs.ParamMeta",
    ),
    "Other tools, and reports": (
        "ds_dynatrain.integrations.transformers.elastic",
        "ds_dynatrain.integrations.transformers.make_trainers_elastic",
        "ds_dynatrain.integrations.accelerate.Accelerator",
        "ds_dynatrain.integrations.lightning.DynatrainStrategy",
        "ds_dynatrain.integrations.lightning.SwitchCallback",
        "ds_dynatrain.integrations.mpi.join",
        "ds_dynatrain.integrations.ray.coordinate",
        "ds_dynatrain.integrations.ray.join",
        "ds_dynatrain.integrations.ray.SaveWhenPreempted",
        "ds_dynatrain.report.writer.read_events",
        "ds_dynatrain.report.table.table",
    ),
}
"""Names that scripts use, by the title of their table. The first ones are also in `ds_dynatrain` itself."""
FOR_THE_ENGINE = (
    "PendingSave.run",
    "Balancer.timed_step",
    "Balancer.timed_pass",
    "Balancer.timed_update",
    "Balancer.finish_step",
)
"""Methods that only the engine calls; the page of names leaves them out."""
AS_IN_TORCH = frozenset(inspect.signature(DataLoader).parameters)
"""Attributes of loaders that mean what they mean in torch; the page of names leaves them out."""
AS_JSON = "Print one JSON object."
"""The help of the option --json, which the page of commands mentions below its other text."""
HOME = "ds_dynatrain"
HOOKS = f"{HOME}.extension.Extension"
"""The class whose methods docs/extensions.md lists by the time at which they are called."""


def names_page(head: str, intro: str) -> str:
    """Return the page of names, each with the first sentence of its docstring."""
    lines = [f"# {head}", "", NOTE, "", intro, ""]
    for title, names in NAMES.items():
        lines += [f"## {title}", "", "| name | |", "|---|---|"]
        lines += [*(f"| `{name}` | {said} |" for name, said in listed(names)), ""]
    return "\n".join(lines)


def listed(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (name, first sentence), except for hooks and overrides that another page or tool describes."""
    for path in names:
        found = find(path)
        yield shown(path), first_sentence(found)
        if inspect.isclass(found) and path != HOOKS:
            for name, member in vars(found).items():
                theirs = any(name in vars(base) for base in found.__mro__ if base.__module__.split(".")[0] != HOME)
                theirs = theirs or (issubclass(found, Loader) and name in AS_IN_TORCH)
                is_ours = not (name.startswith("_") or theirs) and f"{shown(path)}.{name}" not in FOR_THE_ENGINE
                if is_ours and (callable(member) or isinstance(member, property)):
                    yield f"{shown(path)}.{name}", first_sentence(member)


def directives() -> Iterator[str]:
    """Yield the directive with which Sphinx shows the docstrings of each name."""
    for path in (path for names in NAMES.values() for path in names):
        yield f".. {'autoclass' if inspect.isclass(find(path)) else 'autofunction'}:: {path}"


def find(path: str) -> Any:
    """Return the object at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def shown(path: str) -> str:
    """Return a name as scripts write it."""
    import ds_dynatrain

    module, _, name = path.rpartition(".")
    if name in ds_dynatrain.__all__:
        return f"ds_dynatrain.{name}"
    return f"{module}.{name}" if ".integrations." in module or ".report.w" in module or ".report.t" in module else name


def first_sentence(found: Any) -> str:
    """Return the first sentence of an object's docstring."""
    text = " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".").replace("|", "\\|")


def commands_page(head: str, intro: str, commands: Iterable[tuple[str, Any]]) -> str:
    """Return the page of commands, with their arguments and options.

    commands: (name as typed, command) of each.
    """
    lines = [f"# {head}", "", NOTE, "", intro, ""]
    for words, each in commands:
        prints_json = any(one.help == AS_JSON for one in each.params)
        text = paragraphs(each.help) + (" With `--json`, it prints one JSON object." if prints_json else "")
        lines += [f"## {words}", "", text, ""]
        lines += table(each)
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Return all pages that this command writes, by file."""
    whole: Any = typer.main.get_command(app)
    below = whole.commands["checkpoint"].commands.items()
    alone = [(name, each) for name, each in whole.commands.items() if name != "checkpoint"]
    return {
        FOLDER / "api.md": names_page(
            "Public names",
            "All names that a script uses, from their docstrings. Methods that DeepSpeed, Accelerate, Lightning or "
            "torch's DataLoader also have are not listed. [Extensions](../extensions.md#the-hooks) and "
            "[errors](../troubleshoot.md#exceptions) have their own pages.",
        ),
        FOLDER / "cli.md": commands_page(
            "The command `ds-dynatrain`",
            "Each command takes `--help`. Arguments (in capitals) come in the order of the table. "
            "`python -m ds_dynatrain.cli` is the same command. `--version` prints the version.",
            [*alone, *((f"checkpoint {name}", each) for name, each in below)],
        ),
        DOCS / "configuration.md": keys_page(),
    }


def table(command: Any) -> list[str]:
    """Return the lines of a table with the arguments and options of a command."""
    rows = []
    for one in command.params:
        if one.name == "help" or one.help == AS_JSON:
            continue
        name = one.name.upper() if is_argument(one) else ", ".join(one.opts)
        is_plain = (
            one.default is None or isinstance(one.default, bool) or one.default in ("", ()) or callable(one.default)
        )
        given = "needed" if one.required else "" if is_plain else f"`{getattr(one.default, 'value', one.default)}`"
        words = ", ".join(f"`{word}`" for word in choices(one))
        meaning = f"{one.help or ''} One of {words}." if words else one.help or ""
        rows.append(f"| `{name}` | {given} | {meaning.replace('|', chr(92) + '|')} |")
    return ["| argument or option | default | meaning |", "|---|---|---|", *rows, ""] if rows else []


def keys_page() -> str:
    """Return the page of the configuration, with a new table."""
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    before, mark, rest = page.partition(NOTE)
    return f"{before}{mark}\n\n{table_of_keys()}\n\n{END}{rest.partition(END)[2]}"


def choices(one: Any) -> list[str]:
    """Return the permitted values of an option; [] if it takes any text."""
    kind = one.type_descriptor.annotation
    kinds = [each for each in (kind, *get_args(kind)) if inspect.isclass(each) and issubclass(each, Enum)]
    return [each.value for kind in kinds for each in kind]


def is_argument(one: Any) -> bool:
    """Return whether a parameter is an argument rather than an option."""
    return not one.opts[0].startswith("-")


def paragraphs(text: str) -> str:
    """Return a help text with one line per paragraph, and its example as code before the exit codes."""
    joined = "\n\n".join(" ".join(each.split()) for each in inspect.cleandoc(text).split("\n\n"))
    return re.sub(r"^Example: (.*)\n\n(?=Exit code)", r"Example: `\1`. ", joined, flags=re.MULTILINE)


def main() -> None:
    """Write the pages, or compare them with the code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page is out of date")
    args = parser.parse_args()
    if args.check:
        old = [file.name for file, text in pages().items() if not is_written(file, text)]
        sys.exit(f"out of date: {', '.join(old)}; run: python tools/reference.py" if old else 0)
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        file.write_text(text.rstrip() + "\n", encoding="utf-8")


def is_written(file: Path, text: str) -> bool:
    """Return whether a page has this text."""
    return file.exists() and file.read_text(encoding="utf-8") == text.rstrip() + "\n"


if __name__ == "__main__":
    main()
