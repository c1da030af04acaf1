"""Files with `pytestmark = pytest.mark.on_device` run on ranks that compute on the device, as they stand."""

from __future__ import annotations

import inspect
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on the device needs its ranks."""
    for item in items:
        if item.get_closest_marker("on_device") and isinstance(item, pytest.Function):
            item.fixturenames.append("lab_pool")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of such a file on every rank: this process has no such device, and could not be rid of it."""
    if not pyfuncitem.get_closest_marker("on_device"):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    pyfuncitem.funcargs["lab_pool"].run(pyfuncitem.obj, **arguments)
    return True
