"""Temporary replacement of attributes of DeepSpeed or torch, and methods that forward calls to another object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def passing_on(name: str, to: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a method that calls the method `name` of the object `to(self)`."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(to(self), name)(*arguments, **named)

    call.__name__ = name
    return call


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module, class or object to `values` inside the `with` block."""
    own = dict(vars(owner))
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
