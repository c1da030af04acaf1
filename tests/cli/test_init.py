"""`ds-dynatrain init`: what it writes, what it leaves alone, and what it asks at a terminal."""

from __future__ import annotations

import json
import os
import pty
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ds_dynatrain.cli.main import app
from ds_dynatrain.config import split_config
from ds_dynatrain.config_file import read_config

COMMENTED = (
    '{\n    "train_batch_size": 12,  // ours\n    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}  # last\n}\n'
)


def init(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


def written(folder: Path, text: str) -> Path:
    path = folder / "config.json"
    path.write_text(text)
    path.chmod(0o640)
    return path


@pytest.mark.parametrize(
    "text", [COMMENTED, "{}", '{"train_batch_size": 12}', '{\n\t"a": [1,\n\t\t2], "b": "}"\n}\n\n']
)
def test_a_new_block_leaves_the_rest_of_the_file_alone(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    before = read_config(path)
    assert init(path, "--checkpoints=kept", "--report=switches.jsonl", "--exact").exit_code == 0
    assert path.read_text().startswith(text.rstrip().removesuffix("}").rstrip())
    after = read_config(path)
    assert {key: value for key, value in after.items() if key != "dynatrain"} == before
    _, block = split_config(after)
    assert block is not None and block.fallback.path == "kept" and block.resume is not None and block.exact is not None
    assert block.report.jsonl == "switches.jsonl" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_keys_that_are_there_stay(tmp_path: Path) -> None:
    held = {"fallback": {"path": "mine", "every_steps": 7}, "late": True}
    path = written(tmp_path, json.dumps({"dynatrain": held, "train_batch_size": 12}, indent=3))
    assert init(path, "--checkpoints=kept", "--no-exact").exit_code == 0
    expected = {"dynatrain": {**held, "resume": {"path": "kept"}}, "train_batch_size": 12}
    assert path.read_text() == json.dumps(expected, indent=3) + "\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (COMMENTED.replace("{\n", '{\n    "dynatrain": {},\n', 1), "its comments would be lost"),
        ('{"dynatrain": {"lte": true}}', "did you mean 'late'"),
        ('{"dynatrain": []}', "expected an object of keys"),
        ('{"a": 1, "a": 2}', "stands twice"),
        ("[1]", "expected an object"),
    ],
)
def test_what_cannot_be_completed_stays_as_it_is(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    done = init(path, "--checkpoints=kept")
    assert done.exit_code == 2 and said in done.stderr and path.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_it_asks_at_a_terminal_for_what_is_not_there(tmp_path: Path) -> None:
    path = written(tmp_path, '{"dynatrain": {"report": {"jsonl": "mine"}}}')
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"kept\ny\n")
    command = [sys.executable, "-m", "ds_dynatrain.cli", "init", str(path)]
    done = subprocess.run(command, stdin=terminal, capture_output=True, text=True, timeout=60)
    os.close(terminal), os.close(keyboard)
    assert done.returncode == 0, done.stderr
    assert "A folder" in done.stdout and "The same bits" in done.stdout and "A file" not in done.stdout
    block = read_config(path)["dynatrain"]
    assert block["report"] == {"jsonl": "mine"} and block["resume"] == {"path": "kept"} and block["exact"] is True
