"""Weights as safetensors, read back by the library of that name; no format is given what is not as it was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from ds_dynatrain.checkpoint.others.safetensors import to_safetensors
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.cli.main import app
from ds_dynatrain.errors import CheckpointError
from tests.checkpoint.test_damage import SPACE, STATE, TENSORS, whole

TO = {"safetensors": "m.safetensors", "deepspeed-universal": "new/theirs", "dcp": "new/dcp"}
"""Format -> what is written, in `out`."""


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What is expected: cast from masters, or the frozen weight itself."""
    found = {}
    for number, tensor in enumerate(TENSORS):
        kind = "master" if tensor.trainable else "weight"
        run = STATE[kind][int(SPACE.bases[number]) : int(SPACE.bases[number + 1])]
        found[tensor.name] = run.to(dtype).view(tensor.shape)
    return found


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
def test_it_is_read_by_the_library(tmp_path: Path, dtype: torch.dtype | None) -> None:
    saved = Saved.open(whole(tmp_path))
    nbytes = to_safetensors(saved, tmp_path / "model.safetensors", dtype)
    assert nbytes == (tmp_path / "model.safetensors").stat().st_size
    found, expected = load_file(tmp_path / "model.safetensors"), weights(dtype or torch.bfloat16)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and torch.equal(found[name], values), name
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_cannot_be_written(tmp_path: Path) -> None:
    saved = Saved.open(whole(tmp_path))
    with pytest.raises(CheckpointError, match="give dtype="):
        to_safetensors(saved, tmp_path / "x", torch.int64)
    (tmp_path / "there").write_text("mine")
    with pytest.raises(CheckpointError, match="there already"):
        to_safetensors(saved, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        to_safetensors(saved, tmp_path / "no" / "folder")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "step7", "there"]


def test_the_command(tmp_path: Path) -> None:
    whole(tmp_path)
    out = tmp_path / "model.safetensors"
    command = ["checkpoint", "convert", str(tmp_path), str(out)]
    assert CliRunner().invoke(app, [*command, "--dtype", "float32"]).exit_code == 0
    assert torch.equal(load_file(out)["a"], weights(torch.float32)["a"])
    assert CliRunner().invoke(app, command).exit_code == 2
    assert CliRunner().invoke(app, [*command[:-1], str(tmp_path / "y"), "--dtype", "float33"]).exit_code == 2


def convert(path: Path, out: Path, *options: str) -> tuple[int, str]:
    """The command; (exit code, what it says as one line)."""
    result = CliRunner().invoke(app, ["checkpoint", "convert", str(path), str(out), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("to", TO)
def test_nothing_hidden_stays(tmp_path: Path, to: str) -> None:
    (tmp_path / "out" / "new").mkdir(parents=True)
    code, text = convert(whole(tmp_path / "ours"), tmp_path / "out" / TO[to], "--to", to)
    assert code == 0 and Path(text.partition(":")[0].replace(" ", "")).exists(), text
    names = {each.name for each in (tmp_path / "out").rglob("*")}
    assert [each for each in names if each.startswith(".")] == ([".metadata"] if to == "dcp" else [])


@pytest.mark.parametrize(("kind", "dtype"), [("master", None), ("weight", None), ("master", "float32")])
@pytest.mark.parametrize("to", TO)
def test_one_bit_that_is_not_as_it_was_saved(tmp_path: Path, to: str, kind: str, dtype: str | None) -> None:
    path = whole(tmp_path / "ours")
    row = next(each for each in Saved.open(path).manifest if each.kind == kind and each.file)
    data = bytearray((path / row.file).read_bytes())
    data[row.offset + (3 if kind == "master" else 1)] ^= 0x40  # in the exponent
    (path / row.file).write_bytes(data)
    (tmp_path / "out").mkdir()
    options = ["--dtype", dtype] if dtype and to != "deepspeed-universal" else []
    code, text = convert(path, tmp_path / "out" / TO[to], "--to", to, *options)
    assert code == 2 and f"of {row.tensor!r}" in text and kind in text and "is not what was saved" in text, text
    assert list((tmp_path / "out").iterdir()) == [], "something is left"
