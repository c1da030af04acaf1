"""Check of a library's private names, made when an integration that relies on them is imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ds_dynatrain.errors import ConfigError


def check(wanted: Mapping[str, str], library: str, extra: str) -> None:
    """Raise ConfigError if names are missing.

    The error lists the missing names, and the extra of this package that installs versions which have them.
    """
    missing = [f"{place}.{name}" for place, names in wanted.items() for name in names.split() if not _has(place, name)]
    if missing:
        version = getattr(importlib.import_module(library), "__version__", "?")
        raise ConfigError(
            f"{library} {version} has no {', '.join(missing)}: install a version that ds_dynatrain was tested with, "
            f"pip install 'ds-dynatrain[{extra}]'"
        )


def _has(place: str, name: str) -> bool:
    found: Any = None
    module, _, inner = place.rpartition(".")
    try:
        found = importlib.import_module(place)
    except ImportError:
        try:
            found = getattr(importlib.import_module(module), inner, None)
        except ImportError:
            return False
    return hasattr(found, name)
