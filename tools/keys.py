"""The table of the keys of the `dynatrain` block, made from its model: name, type and unit, default, meaning.

The meaning of a key is the docstring below it in `ds_dynatrain/config.py`, or in an extension's `config.py`. Only the
links to other pages are defined here.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ds_dynatrain.config import DynatrainConfig, Said, block_at

LINKS = {
    "layout.pipe": "[pipelines](pipeline.md)",
    "layout.expert": "[experts](experts.md)",
    "layout.tensor": "[tensor parallelism](axes.md#tensor-parallelism)",
    "layout.sequence": "[sequence parallelism](sequence.md)",
    "layout.boundaries": "[boundaries of the start](balance.md#boundaries-of-the-start)",
    "layout.shares": "[data](data.md#how-a-batch-is-dealt)",
    "safety": "[when both sides do not fit](switching.md#when-both-sides-do-not-fit)",
    "exact": "[exact jobs](exact.md)",
    "exact.digest_every_steps": "[proof](exact.md#proof)",
    "late": "[late switches](switching.md#late-switches)",
    "replica_tolerance": "[notes](#notes)",
    "transport": "[notes](#notes)",
    "fallback": "[checkpoints](checkpoint.md)",
    "resume": "[resume](checkpoint.md#resume)",
    "layouts": "[elastic jobs](elastic.md)",
    "buddies": "[buddies](buddies.md)",
    "buddies.mode": "[buddies](buddies.md)",
    "buddies.copies": "[buddies](buddies.md)",
    "balance": "[balance in a job](balance.md#in-a-job)",
    "balance.profile": "[which layout](balance.md#which-layout)",
    "balance.experts": "[experts that follow the tokens](experts.md#experts-that-follow-the-tokens)",
    "balance.shape": "[what moves](balance.md#what-moves)",
    "clocks": "[clocks](gpu.md#clocks)",
    "report.jsonl": "[proof](exact.md#proof)",
    "report.monitor": "[monitors](monitoring.md#wb-tensorboard-csv)",
}
"""For each key, links to further reading."""
TABLES = {"layouts"}
"""Keys whose blocks are described elsewhere: the blocks of `layouts` have the keys of `layout`."""
KINDS: dict[Any, str] = {Any: "object or null", bool: "boolean", int: "integer", float: "number", str: "string"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def table() -> str:
    """Return the table of all keys as Markdown."""
    rows = ["| key | type, unit | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{path}` | {kind} | {default} | {meaning} |" for path, kind, default, meaning in keys(DynatrainConfig)]
    return "\n".join(rows)


def keys(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type and unit, default, meaning). A block that always exists is represented only by its keys."""
    said = docstrings(model)
    for name, field in model.model_fields.items():
        path, block = above + name, None if name in TABLES else block_at(name, field.annotation)
        if not isinstance(field.default, BaseModel):
            yield path, kind_of(field), default_of(field), meaning_of(path, said[name])
        if block is not None:
            yield from keys(block, f"{path}.")


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field, as one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return found


def meaning_of(path: str, said: str) -> str:
    """Return the meaning of a key in JSON's terms, with links to other pages."""
    said = said.replace("`None`", "null").replace("`False`", "false").rstrip(".")
    said = said[0].lower() + said[1:] if not said[1].isupper() else said
    return f"{said}; see {LINKS[path]}" if path in LINKS else said


def default_of(field: FieldInfo) -> str:
    """Return a field's default in JSON's terms."""
    other = next((each.default for each in marks(field.annotation, field.metadata) if each.default), "")
    return other or ("needed" if field.default is PydanticUndefined else json.dumps(field.default))


def kind_of(field: FieldInfo) -> str:
    """Return a field's type, limits and unit."""
    noted = list(marks(field.annotation, field.metadata))
    unit = next((each.unit for each in noted if each.unit), "")
    kind = next((each.kind for each in noted if each.kind), f"{told(field.annotation)}{limits(field.metadata)}")
    return f"{kind}, {unit}" if unit else kind


def marks(annotation: Any, metadata: Any) -> Iterator[Said]:
    """Yield the notes on a value, outermost first."""
    yield from (each for each in metadata if isinstance(each, Said))
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            if get_origin(part) is Annotated:
                yield from marks(get_args(part)[0], get_args(part)[1:])


def told(annotation: Any) -> str:
    """Return a type in JSON's terms."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return f"{told(parts[0])}{limits(parts[1:])}"
    if origin is Literal:
        return ", ".join(f'`"{each}"`' for each in parts)
    if origin in (Union, UnionType):
        return " or ".join("null" if each is NoneType else told(each) for each in parts)
    if origin is list:
        return f"list of {told(parts[0]).replace('integers', 'integer').replace('integer', 'integers')}"
    return "object" if origin is dict or issubclass(annotation, BaseModel) else KINDS[annotation]


def limits(metadata: Any) -> str:
    """Return the limits of a value as text, such as " ≥ 1"."""
    rules = [rule for each in metadata for rule in (each.metadata if isinstance(each, FieldInfo) else [each])]
    found = [f"{sign} {getattr(rule, name)}" for rule in rules for name, sign in SIGNS.items() if hasattr(rule, name)]
    return f" {' and '.join(found)}" if found else ""
