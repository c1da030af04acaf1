"""Temporary replacement of an attribute of DeepSpeed or torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager that sets an attribute of a module, class or object to `value`, and restores it at the end."""
    own = dict(vars(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        if name in own:
            setattr(owner, name, own[name])
        else:
            delattr(owner, name)
