"""What a pickle would make, counted before it is read: a short one can stand for endless values.

Sixty tuples, each of which holds the one before it twice, are 200 bytes and 2^60 values for whoever follows them; to
look at such a key's hash, which `weights_only` does, never ends. So what is shared counts as often as it is met.
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass
class _Made:
    """A value that an operation makes: how many values it stands for, how deep, and whether it was fetched again."""

    values: int
    depth: int = 0
    is_shared: bool = False


def check_pickle(data: bytes) -> None:
    """ValueError for a pickle of too many values, one that is nested too deep, or one that is in itself."""
    stack: list[_Made | None] = []  # None: a mark
    memo: dict[int, _Made] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data), 1):
        if opcode.name in _PUTS:
            top, index = stack[-1], len(memo) if opcode.name == "MEMOIZE" else int(argument or 0)
            if top is None or index > count:  # Python's unpickler makes room for all places below
                raise ValueError(f"value {index} is noted by operation {count}")
            memo[index] = top
        elif opcode.name in _GETS:
            made = memo[int(argument or 0)]
            made.is_shared = True
            stack.append(made)
        elif opcode.name == "DUP":
            raise ValueError("it doubles a value")
        elif opcode.name == "MARK":
            stack.append(None)
        else:
            taken = _taken(stack, opcode)
            made = taken.pop(0) if opcode.name in _FILLS else _Made(1 + _weight(argument))
            if made.is_shared and opcode.name in _FILLS:
                raise ValueError("a value is changed after it was used: it is in itself")
            made.values += sum(each.values for each in taken)
            made.depth = max([made.depth, *(1 + each.depth for each in taken)])
            if max(count, made.values) > MOST_VALUES:
                raise ValueError(f"it stands for more than {MOST_VALUES} values")
            if made.depth > MOST_DEPTH:
                raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
            stack += [made] * len(opcode.stack_after)


def _taken(stack: list[_Made | None], opcode: pickletools.OpcodeInfo) -> list[_Made]:
    """Take what an operation takes off the stack, the lowest one first."""
    before, found = opcode.stack_before, list[_Made | None]()
    if pickletools.markobject in before:
        while (top := stack.pop()) is not None:
            found.append(top)
        before = before[: before.index(pickletools.markobject)]
    found += [stack.pop() for _ in before]
    return [each for each in reversed(found) if each is not None]


def _weight(value: Any) -> int:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"an integer of {value.bit_length()} bits")
    return len(value) // PER_VALUE if isinstance(value, str | bytes | bytearray) else 0
