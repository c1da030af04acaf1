"""The table of transitions: which ordered pairs of layouts are walked for each class of models, on at most four ranks.

A row is a chain of layouts; each and the next one are a pair. "d2t2z3" is data=2 tensor=2 zero_stage=3: a letter for an
axis above 1, and the stage. The paths that the ranks walk are made of the pairs, so a row more is a line more.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from math import prod

from ds_dynatrain.space import Layout
from ds_dynatrain.support.axes import EXPERTS, NATIVE_EXPERTS, PIPELINE, ULYSSES, Features, refusal

RANKS = 4
LETTERS = {"p": "pipe", "d": "data", "e": "expert", "t": "tensor", "s": "sequence", "z": "zero_stage"}
Pair = tuple[Layout, Layout]


@dataclass(frozen=True)
class Rows:
    """The rows of a class of models: `first` are a walk of every day, `others` go with them into the full set.

    axes: those that its models have. left_out: what the rules let in and its model cannot take, with the reason.
    """

    features: Features
    axes: tuple[str, ...]
    first: tuple[str, ...]
    others: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


TABLE: Mapping[str, Rows] = {
    "module": Rows(
        frozenset(),
        ("data",),
        first=("d2z1 > d3z3 > d4z0 > d2z1",),
        others=(
            "d3z2 > d4z1 > d3z3 > z3 > d4z2 > d4z3 > z1 > d3z0 > d2z0 > d2z3 > z0 > z2 > d2z2 > d4z0 > d2z1 > d3z1",
            "d4z1 > z2",
        ),
    ),
    "AutoTP": Rows(
        frozenset(),
        ("data", "tensor"),
        first=("z1 > t2z1 > t4z1 > t3z1 > z1", "d2t2z3 > d4z1", "t4z1 > d2t2z1", "d2t2z0 > t4z3"),
        others=(
            "d2z3 > t3z3 > t4z0 > t2z1 > z2 > t2z2 > d2t2z1 > d2z2 > d4z0 > z1 > t2z3 > t4z2 > t4z3 > d2z0 > z3 > t4z1",
            "t4z1 > t3z1 > t3z0 > d2t2z3 > d2z1 > t2z0 > d4z3 > d2t2z2 > t3z2 > d3z3 > d4z1 > d4z2 > d3z0 > d2t2z0",
            "d2t2z0 > d3z2 > d3z1 > z0",
        ),
    ),
    "AutoEP": Rows(
        frozenset({EXPERTS}),
        ("data", "expert", "tensor"),
        first=("z1 > d2e2z1 > d4e4z1 > d4z1", "d4e4z3 > d4e2z1 > d2e2t2z1 > d2e2t2z3 > d2e2z0 > d4e4z3"),
        others=(
            "d4z1 > d4e4z2 > d2e2z1 > d4e2z0 > d3z2 > z2 > d2e2z3 > d2z3 > d4e2z2 > d4e4z3 > d3e3z0 > d4e4z0 > d4e4z1",
            "d4e4z1 > d3z0 > d4z3 > d2z1 > d3z3 > d2z2 > z0 > z3 > d3e3z1 > d3z1 > d4z2 > z1 > d4z0 > d2z0 > d4e2z3",
            "d4e2z3 > d2e2z2 > d3e3z3 > d3e3z2 > d2e2z0 > d4e2z1",
            "d2e4t2z0 > e2t2z1 > e4t4z3 > d4z2 > e2t4z0 > e3t3z2 > d2e2t2z2 > e2t2z3 > e2t4z1 > d2e4t2z3 > e3t3z1 > z0",
            "z0 > d2e2t2z0 > e4t4z1 > d2e4t2z2 > e2t2z2 > e4t4z0 > e3t3z0 > e2t4z3 > d3e3z1 > e4t4z2 > e2t2z0",
            "e2t2z0 > d2e4t2z1 > e2t4z2 > d2e2t2z1",
        ),
        left_out={"e3t3z3": "three tensor ranks have different numbers of sub-groups"},
    ),
    "deepspeed.moe": Rows(
        frozenset({NATIVE_EXPERTS}),
        ("data", "expert"),
        first=("z1 > d2e2z1 > d4e4z1 > d4z1", "d4e4z2 > d2e2z0"),
        others=(
            "d4z2 > d2z2 > d4e2z0 > d2e2z0 > d2z1 > d3z2 > z2 > d3z1 > d2z0 > d4e2z1 > d4e4z0 > d4z1 > d3z0 > d4e4z2",
            "d4e4z2 > d4e4z1 > d2e2z1 > z1 > d4e2z2 > z0 > d2e2z2 > d4z0",
        ),
        left_out=dict.fromkeys(("d3e3z0", "d3e3z1", "d3e3z2"), "the layers have 4 and 8 experts"),
    ),
    "PipelineModule": Rows(
        frozenset({PIPELINE}),
        ("pipe", "data"),
        first=("z1 > p2z1 > p4z1 > p2z1", "p2d2z1 > p4z1", "p4z1 > p2d2z0"),
        others=(
            "z0 > p4z0 > d4z0 > p3z1 > p2z1 > p4z1 > p2z0 > p2d2z0 > d4z1 > d2z1 > d3z0 > d2z0 > p2d2z1 > p3z0 > d3z1",
            "d3z1 > z1",
        ),
    ),
    "PipelineModule of deepspeed.moe": Rows(
        frozenset({PIPELINE, NATIVE_EXPERTS}),
        ("pipe", "data", "expert"),
        first=("p2d2e2z1 > d4e4z1 > p2d2z1 > d4e2z1", "p2d2e2z0 > d2e2z1"),
        others=(
            "d2e2z1 > p4z1 > d4e2z0 > p3z0 > p2z0 > d4e2z1 > z1 > p2d2z0 > p4z0 > d4e4z1 > p3z1 > p2d2e2z1 > p2d2e2z0",
            "p2d2e2z0 > d4z0 > d3z0 > z0 > p2d2z1 > d2z0 > d2e2z0 > p2z1 > d4e4z0 > d2z1 > d4z1 > d3z1",
        ),
        left_out=dict.fromkeys(("d3e3z0", "d3e3z1"), "the layers have 4 and 8 experts"),
    ),
    "PipelineModule under AutoEP": Rows(
        frozenset({PIPELINE, EXPERTS}),
        ("pipe", "data", "expert"),
        first=("p2d2e2z1 > d4e4z1 > p2d2z1 > d4e2z1", "p2d2e2z0 > d2e2z1"),
        others=(
            "d2e2z1 > p4z1 > d4e2z0 > p3z0 > p2z0 > d4e2z1 > z1 > p2d2z0 > p4z0 > d4e4z1 > p3z1 > p2d2e2z1 > p2d2e2z0",
            "p2d2e2z0 > d4z0 > d3z0 > z0 > p2d2z1 > d2z0 > d2e2z0 > p2z1 > d4e4z0 > d2z1 > d4z1 > d3z1",
        ),
        left_out=dict.fromkeys(("d3e3z0", "d3e3z1"), "the layers have 4 and 8 experts"),
    ),
    "Ulysses": Rows(
        frozenset({ULYSSES}),
        ("data", "sequence"),
        first=("z1 > s2z1 > z1", "d2z1 > s2z1", "s2z3 > d2s2z2 > s4z0"),
        others=(
            "d2z3 > s3z3 > s4z0 > s2z1 > z2 > s2z2 > d2s2z1 > d2z2 > d4z0 > z1 > s2z3 > s4z2 > s4z3 > d2z0 > z3 > s4z1",
            "s4z1 > s3z1 > s3z0 > d2s2z3 > d2z1 > s2z0 > d4z3 > d2s2z2 > s3z2 > d3z3 > d4z1 > d4z2 > d3z0 > d2s2z0",
            "d2s2z0 > d3z2 > d3z1 > z0",
        ),
    ),
}
"""By the name of the class; `subjects` has a model of each."""


def layout(short: str) -> Layout:
    """The layout that a short form such as "d2t2z3" means."""
    sizes = {LETTERS[letter]: int(size) for letter, size in re.findall(r"([pdetsz])(\d)", short)}
    return Layout.from_dict(sizes)


def pairs(rows: Iterable[str]) -> list[Pair]:
    """The ordered pairs of rows, each once, in order."""
    found = chain.from_iterable(pairwise(map(layout, row.split(" > "))) for row in rows)
    return list(dict.fromkeys(found))


def path(taken: Sequence[Pair]) -> list[Layout]:
    """A walk that takes every pair once, and as few others as can be between them.

    Hierholzer's algorithm: where more pairs begin than end in a layout, a walk begins anew, and a hop leads there from
    where another one ends. Pairs that do not hang together come one part after the other.
    """
    ways: dict[Layout, list[Layout]] = defaultdict(list)
    surplus: Counter[Layout] = Counter()
    for source, target in taken:
        ways[source].append(target)
        surplus.update({source: 1})
        surplus.subtract({target: 1})
    begins, ends = list[Layout](), list[Layout]()
    for part in _parts(taken):
        begins += [each for each in part for _ in range(surplus[each])] or part[:1]
        ends += [each for each in part for _ in range(-surplus[each])] or part[:1]
    for end, begin in zip(ends, begins[1:], strict=False):
        ways[end].append(begin)
    stack, walk = begins[:1], list[Layout]()
    while stack:
        if ways[stack[-1]]:
            stack.append(ways[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def _parts(taken: Sequence[Pair]) -> list[list[Layout]]:
    """The layouts of pairs that hang together, part by part, in an order that is always the same."""
    parts: list[set[Layout]] = []
    for pair in taken:
        touched = [part for part in parts if not part.isdisjoint(pair)]
        parts = [part for part in parts if part.isdisjoint(pair)] + [set(pair).union(*touched)]
    return [sorted(part, key=str) for part in parts]


def combinations(axes: Sequence[str], folds: bool = False) -> Iterator[Layout]:
    """Every combination of sizes of these axes, and of stages, on at most `RANKS` ranks.

    folds: whether experts are dealt out over tensor ranks, too.
    """
    for *sizes, stage in product(*(range(1, RANKS + 1) for _ in axes), range(4)):
        place = dict(zip(axes, sizes, strict=True))
        shared = prod(place.get(axis, 1) for axis in ("data", "sequence", "tensor")[: 2 + folds])
        ranks = prod(size for axis, size in place.items() if axis != "expert")
        if ranks <= RANKS and shared % place.get("expert", 1) == 0:
            yield Layout(**place, zero_stage=stage)


def accepted(rows: Rows) -> list[Layout]:
    """The combinations of a class of models that the rules let in."""
    every = combinations(rows.axes, folds=EXPERTS in rows.features)
    return [found for found in every if refusal(rows.features, found, RANKS) is None]
