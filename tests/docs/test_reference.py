"""The reference is that of the code: names, commands, keys with their defaults, errors."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import ds_dynatrain
from ds_dynatrain import errors
from ds_dynatrain.config import DynatrainConfig, block_at
from tests.docs.pages import ROOT, section, text_of

NOT_LISTED = {"layouts"}
"""Its blocks are those of `layout`."""


def test_the_pages_are_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path("tools/reference.py", run_name="__main__")
    assert not end.value.code, end.value.code


def test_every_public_name_is_listed() -> None:
    page = "".join(text_of(page) for page in (ROOT / "docs" / "reference").glob("api*.md"))
    listed = {name for name in ds_dynatrain.__all__ if f"`ds_dynatrain.{name}`" in page}
    of_errors = {name for name in ds_dynatrain.__all__ if hasattr(errors, name)}
    assert listed | of_errors | {"__version__"} == set(ds_dynatrain.__all__)


def keys(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the block with its default."""
    for name, field in model.model_fields.items():
        inside = block_at(name, field.annotation)
        default = field.default
        if inside is None or not isinstance(default, BaseModel):
            yield path + name, default
        if inside is not None and name not in NOT_LISTED:
            yield from keys(inside, f"{path}{name}.")


def test_every_key_has_its_default() -> None:
    table = section(ROOT / "docs" / "configuration.md", "Configuration")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (?:[^|]|\\\|)+ \| ([^|]+) \|", table, re.MULTILINE))
    wanted = dict(keys(DynatrainConfig))
    assert set(rows) == set(wanted)
    for key, default in wanted.items():
        said = rows[key].strip()
        if default is PydanticUndefined:
            assert said == "needed", key
        elif key not in ("exact", "buddies.mode") and not key.startswith("layout."):  # these follow from other things
            value = said.split(" (")[0].replace("`", "")
            assert json.loads(value) == default, key


def test_every_error_is_described() -> None:
    page = text_of(ROOT / "docs" / "troubleshoot.md")
    classes = [
        name for name, found in vars(errors).items() if isinstance(found, type) and found.__module__ == errors.__name__
    ]
    assert len(classes) > 15
    assert [name for name in classes if f"`{name}`" not in page and name != "DynatrainError"] == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_site_is_built_without_a_warning() -> None:
    ran = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
