"""Another value in the place of DeepSpeed's or torch's own, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside the block an attribute of a module, class or object is `value`; then it is what it was, or gone again."""
    own = dict(vars(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        if name in own:
            setattr(owner, name, own[name])
        else:
            delattr(owner, name)
