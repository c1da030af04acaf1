"""Print a seeded sample of the messages that a user can meet, to judge them by rule 12 in CONTRIBUTING.md.

python tools/messages.py                      # 100 messages, seed 2026
python tools/messages.py --count 20 --seed 7

The sample is taken from `raise` statements of errors about a user's input (a key, an argument, a file, a layout), and
from log lines that are warnings or errors. Messages that only pass on another text are left out, and so are failures of
a switch (`SwitchFailed` and its subclasses), which have one answer. Errors about damaged checkpoints are printed as
users see them: `checkpoint.files.naming` adds the path in front and the advice behind.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_dynatrain.checkpoint.files import WHERE_DAMAGED

ROOT = Path(__file__).parents[1]
CLASSES = {
    *("ConfigError", "UnsupportedError", "DataError", "LayoutError", "ProfileError", "SwitchRefused"),
    *("CheckpointError", "CheckpointDamaged", "ElasticError", "PeerRefused", "CoordinatorUnproved", "LaunchError"),
    "ImportError",
}
LEVELS = ("warning", "error")


@dataclass(frozen=True)
class Message:
    """A `raise` statement, or a log line."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n   {self.text}"


def messages() -> list[Message]:
    """Return all messages of the package, in the order of files and lines."""
    found = []
    for path in sorted(file for folder in ("ds_dynatrain", "integrations") for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for call in (*raised(tree), *logged(tree)):
            found.append(Message(path.relative_to(ROOT), call.lineno, as_met(path, ast.unparse(call))))
    return sorted(found, key=lambda each: (each.path, each.line))


def raised(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the `raise` statements of these error classes that have a text of their own."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in CLASSES:
            if any(isinstance(each, ast.Constant) and " " in str(each.value) for each in ast.walk(call)):
                yield call


def logged(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the warnings and errors of the log that have a text of their own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
            first = node.args[0] if node.args and ast.unparse(node.func.value) == "logger" else None
            if isinstance(first, ast.Constant) and len(str(first.value).replace("%s", "").split()) > 2:
                yield node


def as_met(path: Path, text: str) -> str:
    """Return a message as users see it, with the path and the advice that `checkpoint.files.naming` adds."""
    is_read = "checkpoint" in str(path.parent) and text.startswith("CheckpointDamaged")
    return f"PATH: {text}; {WHERE_DAMAGED}" if is_read else text


def main() -> None:
    """Print the sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args()
    every = messages()
    print(f"{args.count} of {len(every)}, seed {args.seed}")
    for number, each in enumerate(random.Random(args.seed).sample(every, args.count), 1):
        print(f"{number}. {each}")


if __name__ == "__main__":
    main()
