"""What a pickle would make, counted before it is read and again afterwards: a short one can stand for endless values.

Sixty lists, each of which holds the one before it twice, are 200 bytes and 2^60 values once somebody follows them. What
is counted is therefore the tree, with what is shared as often as it is met.
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping
from typing import Any

from ds_dynatrain.checkpoint.files import MOST_VALUES

MOST_BYTES = 1 << 28
MOST_DEPTH = 200
MOST_BITS = 4096
"""Of an integer: more digits than Python is willing to write."""
PER_VALUE = 16
"""Bytes of a text that count as one value."""
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
"""What changes a value that is there already."""


class Opaque:
    """An instance of a class that is not imported. args: given to it. fields: set on it."""

    args: tuple[Any, ...]
    fields: dict[str, Any]

    def __new__(cls, *args: Any) -> Opaque:
        """As pickle makes it."""
        made = super().__new__(cls)
        made.args, made.fields = args, {}
        return made

    def __setstate__(self, state: Any) -> None:
        """As pickle fills it."""
        if isinstance(state, Mapping):
            self.fields.update(state)


def check_pickle(data: bytes) -> None:
    """ValueError for a pickle of too many values; nothing is made of it.

    Each place on the unpickler's stack is how many values it stands for, in a list of one: shared with the memo, since
    it may still be filled.
    """
    stack: list[list[int] | None] = []  # None: a mark
    memo: dict[int, list[int] | None] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data), 1):
        if opcode.name in _PUTS:
            index = len(memo) if opcode.name == "MEMOIZE" else int(argument or 0)
            if index > count:
                raise ValueError(f"value {index} is noted by operation {count}")
            memo[index] = stack[-1]
        elif opcode.name in _GETS:
            stack.append(memo[int(argument or 0)])
        elif opcode.name == "DUP":
            raise ValueError("it doubles a value")
        elif opcode.name == "MARK":
            stack.append(None)
        else:
            taken = _taken(stack, opcode)
            filled = taken.pop(0) if opcode.name in _FILLS else [1 + _weight(argument)]
            filled[0] += sum(each[0] for each in taken)
            if max(count, filled[0]) > MOST_VALUES:
                raise ValueError(f"it stands for more than {MOST_VALUES} values")
            stack += [filled] * len(opcode.stack_after)


def _taken(stack: list[list[int] | None], opcode: pickletools.OpcodeInfo) -> list[list[int]]:
    """Take what an operation takes off the stack, the lowest one first."""
    before, found = opcode.stack_before, list[list[int] | None]()
    if pickletools.markobject in before:
        while (top := stack.pop()) is not None:
            found.append(top)
        before = before[: before.index(pickletools.markobject)]
    found += [stack.pop() for _ in before]
    return [each for each in reversed(found) if each is not None]


def check_tree(tree: Any) -> None:
    """ValueError for a tree of too many values, one that is too deep, or one that is in itself."""
    _count(tree, {}, 0)


def _count(part: Any, known: dict[int, int], depth: int) -> int:
    if isinstance(part, Mapping):
        below = [*part.keys(), *part.values()]
    elif isinstance(part, list | tuple | set | frozenset):
        below = list(part)
    elif isinstance(part, Opaque):
        below = [part.args, part.fields]
    else:
        return 1 + _weight(part)
    if known.get(id(part), 0) < 0 or depth > MOST_DEPTH:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
    if id(part) not in known:
        known[id(part)] = -1  # until it is known: whoever meets it meanwhile is in it
        known[id(part)] = 1 + sum(_count(each, known, depth + 1) for each in below)
    if known[id(part)] > MOST_VALUES:
        raise ValueError(f"it stands for more than {MOST_VALUES} values")
    return known[id(part)]


def _weight(value: Any) -> int:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"an integer of {value.bit_length()} bits")
    return len(value) // PER_VALUE if isinstance(value, str | bytes | bytearray) else 0
