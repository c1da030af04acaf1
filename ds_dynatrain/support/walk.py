"""The rows of the support table, and the check of each key of a user's configuration against them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from ds_dynatrain import extension
from ds_dynatrain.errors import SwitchRefused, UnsupportedError
from ds_dynatrain.support.keys import CONFIG_TABLES
from ds_dynatrain.support.row import Config, Refusal, Row, Target, Verdict
from ds_dynatrain.support.usage import USAGE

_ROWS = tuple(chain.from_iterable(CONFIG_TABLES.values()))
CONFIG_ROWS = {row.key: tuple(other for other in _ROWS if other.key == row.key) for row in _ROWS}
"""A map from each key of DeepSpeed's configuration to its rows."""
_USAGE = {row.key: row for row in USAGE}

AUTO = "auto"
SECTIONS_WITHOUT_AUTO = frozenset(
    {"zero_optimization", "bf16", "bfloat16", "fp16", "tensorboard", "wandb", "csv_monitor", "comet", "compile"}
    | {"hybrid_engine", "tensor_parallel", "weight_quantization", "comms_logger", "timers"}
)
"""Sections in which DeepSpeed takes "auto" to mean that a key was left out."""
_AUTO_REFUSAL = Refusal("'auto' is filled in by Hugging Face's Trainer only", "give a value, or leave the key out")


def all_tables() -> dict[str, tuple[Row, ...]]:
    """Return all tables of rows, including those of extensions, keyed by their names in the docs."""
    return {**CONFIG_TABLES, "usage": USAGE, **extension.rows()}


def usage(name: str) -> Row:
    """Return the row about a usage of DeepSpeed outside its configuration. Raises KeyError if there is none."""
    return _USAGE[name]


@dataclass(frozen=True)
class Finding:
    """The result of looking up one key of a configuration in the support table.

    row: the row of the key; None if there is none.
    is_off: whether the value turns the feature off.
    refusal: why the job cannot start with this key; None if it can.
    """

    key: str
    value: object
    row: Row | None
    is_off: bool = False
    refusal: Refusal | None = None

    @property
    def subject(self) -> str:
        """The key, followed by its value if that is a number or a string."""
        plain = isinstance(self.value, str | int | float) and not isinstance(self.value, bool)
        return f"{self.key} = {self.value!r}" if plain and self.row is not None else self.key

    @property
    def verdict(self) -> Verdict:
        """The verdict on the key (whether it works), which follows from its row, its value and its refusal."""
        if self.refusal is not None:
            return Verdict.AT_START
        return Verdict.WORKS if self.is_off or self.row is None else self.row.verdict


def examine(config: Config) -> list[Finding]:
    """Return the table's finding on every key of a configuration, in the order of the keys.

    config: the configuration without its `dynatrain` block.
    """
    return [finding for key, value in config.items() for finding in _look(str(key), value, config)]


def refuse_config(config: Config) -> None:
    """Raise UnsupportedError for the first key that is not supported, with the reason and an alternative."""
    for finding in examine(config):
        if finding.refusal is not None:
            raise UnsupportedError(f"{finding.subject}: {finding.refusal.why}; {finding.refusal.instead}")


def refuse_layout(target: Target) -> None:
    """Raise SwitchRefused for the first key of the configuration that does not work in the target's layout."""
    for finding in examine(target.config):
        if finding.row is None or finding.row.at_layout is None or finding.is_off:
            continue
        refusal = finding.row.at_layout(target)
        if refusal is not None:
            raise SwitchRefused(f"{finding.subject}: {refusal.why}", refusal.instead)


def row_of(key: str, value: object = None) -> Row | None:
    """Return the row of a dotted key; None if there is none.

    A row about `value` comes first, then the key's general row, then the row of a section that covers the key.
    """
    rows = CONFIG_ROWS.get(key, ())
    for row in (*(row for row in rows if row.is_about(value)), *(row for row in rows if not row.values)):
        return row
    section = key.rpartition(".")[0]
    above = row_of(section) if section else None
    return above if above is not None and above.below else None


def _look(key: str, value: object, config: Config) -> Iterator[Finding]:
    row = row_of(key, value)
    if row is None:
        close = difflib.get_close_matches(key, CONFIG_ROWS, n=1, cutoff=0.8)
        hint = f"did you mean {close[0]!r}? " if close else ""
        instead = f"{hint}remove it, or the dynatrain block"
        yield Finding(key, value, None, refusal=Refusal("an unknown key, which was not tried", instead))
        return
    if row.is_off(value) or (value == AUTO and key.partition(".")[0] in SECTIONS_WITHOUT_AUTO):
        yield Finding(key, value, row, is_off=True)
        return
    finding = Finding(key, value, row, refusal=_refusal(row, value, config))
    yield finding
    if finding.refusal is None and isinstance(value, Mapping) and not row.below:
        for name, inner in value.items():
            yield from _look(f"{key}.{name}", inner, config)


def _refusal(row: Row, value: object, config: Config) -> Refusal | None:
    if row.verdict is Verdict.AT_START:
        return Refusal(row.why, row.instead)
    if value == AUTO:
        return _AUTO_REFUSAL
    if not isinstance(value, Mapping) and any(key.startswith(f"{row.key}.") for key in CONFIG_ROWS):
        return Refusal(f"{value!r} is no object of keys", "write it as a section")
    return None if row.at_start is None else row.at_start(config)
