"""A seeded sample of the messages that a user can meet, for somebody who judges them by rule 12 of docs/dev/style.md.

python tools/messages.py                      # 100 messages, seed 2026
python tools/messages.py --count 20 --seed 7

Sampled are the `raise` statements of errors that answer what a user gave: a key, an argument, a file, a layout. Those
that only pass on another one's text are left out, and so are failures of a switch (`SwitchFailed` and below), to which
there is one answer.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLASSES = {
    *("ConfigError", "UnsupportedError", "DataError", "LayoutError", "ProfileError", "SwitchRefused"),
    *("CheckpointError", "CheckpointDamaged", "ElasticError", "PeerRefused", "CoordinatorUnproved", "LaunchError"),
}


@dataclass(frozen=True)
class Message:
    """A `raise` statement."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n   {self.text}"


def messages() -> list[Message]:
    """All of the package, in the order of files and lines."""
    found = []
    for path in sorted((ROOT / "ds_dynatrain").rglob("*.py")):
        for call in raised(ast.parse(path.read_text(encoding="utf-8"))):
            found.append(Message(path.relative_to(ROOT), call.lineno, ast.unparse(call)))
    return sorted(found, key=lambda each: (each.path, each.line))


def raised(tree: ast.AST) -> Iterator[ast.Call]:
    """Errors of the classes above with words of their own."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in CLASSES:
            if any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in ast.walk(call)):
                yield call


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
