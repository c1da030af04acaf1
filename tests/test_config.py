"""The `dynatrain` block: what is read, what is filled in, and what each mistake is told."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.config import DynatrainConfig, LayoutConfig, block_at, split_config
from ds_dynatrain.config_file import read_config
from ds_dynatrain.errors import ConfigError, UnsupportedError

DEEPSPEED: dict[str, Any] = {"train_batch_size": 12, "zero_optimization": {"stage": 2}}


def with_block(block: object) -> dict[str, Any]:
    """Return a DeepSpeed configuration with this `dynatrain` block."""
    return {**DEEPSPEED, "dynatrain": block}


def test_no_block_is_none() -> None:
    assert split_config(DEEPSPEED) == (DEEPSPEED, None)


def test_empty_block_is_all_defaults() -> None:
    _, block = split_config(with_block({}))
    assert block is not None
    assert block.layout is None
    assert block.safety == "rollback"
    assert (block.memory_budget_bytes, block.timeout_seconds) == (1 << 30, 60.0)
    assert (block.data.reshuffle, block.report.jsonl) == (False, None)


def test_empty_balance_block_moves_nothing() -> None:
    _, block = split_config(with_block({"balance": {}}))
    assert block is not None and block.balance is not None
    assert block.balance.measures and not block.balance.acts


def test_whole_block_is_read() -> None:
    _, block = split_config(
        with_block(
            {
                "layout": {"data": 2, "zero_stage": 1, "pipe": 1, "tensor": 1},
                "safety": "rollback",
                "memory_budget_bytes": 131072,
                "timeout_seconds": 5,
                "data": {"reshuffle": True},
                "report": {"jsonl": "switches.jsonl"},
            }
        )
    )
    assert block is not None
    assert block.layout == LayoutConfig(data=2, zero_stage=1)
    assert (block.memory_budget_bytes, block.timeout_seconds) == (131072, 5.0)
    assert (block.data.reshuffle, block.report.jsonl) == (True, "switches.jsonl")


def test_split_leaves_the_given_dictionary_as_it_is() -> None:
    given = with_block({"layout": {"data": 2}})
    before = json.dumps(given)
    own, block = split_config(given)
    assert own == DEEPSPEED
    assert block is not None
    assert json.dumps(given) == before


@pytest.mark.parametrize(("zero", "stage"), [({"stage": 3}, 3), ({}, 0), (None, 0)])
def test_stage_is_taken_from_deepspeed(zero: dict[str, int] | None, stage: int) -> None:
    config: dict[str, Any] = {"dynatrain": {"layout": {"data": 2}}}
    if zero is not None:
        config["zero_optimization"] = zero
    _, block = split_config(config)
    assert block is not None and block.layout is not None
    assert block.layout.zero_stage == stage


def test_stage_that_cannot_be_taken_from_deepspeed() -> None:
    with pytest.raises(ConfigError, match=r"dynatrain\.layout\.zero_stage: .*'auto'"):
        split_config({"zero_optimization": {"stage": "auto"}, "dynatrain": {"layout": {"data": 2}}})


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"layuot": {"data": 2}}, "dynatrain.layuot: unknown key; did you mean 'layout'? valid here: layout, safety, "),
        ({"zzz": 1}, "dynatrain.zzz: unknown key; valid here: layout"),
        (
            {"layout": {"data": 2, "zero_stge": 1}},
            "dynatrain.layout.zero_stge: unknown key; did you mean 'zero_stage'?",
        ),
        ({"data": {"shuffle": True}}, "dynatrain.data.shuffle: unknown key; did you mean 'reshuffle'?"),
        ({"buddies": {"every_step": 1}}, "dynatrain.buddies.every_step: unknown key; did you mean 'every_steps'?"),
        ({"buddies": {"every_steps": 0}}, "dynatrain.buddies.every_steps: expected greater than or equal to 1, got 0"),
        ({"buddies": {"copies": 0}}, "dynatrain.buddies.copies: expected greater than or equal to 1, got 0"),
        ({"buddies": {"mode": "ring"}}, "dynatrain.buddies.mode: expected 'off' or 'copy', got 'ring'"),
        ({"buddies": {"mode": "replay"}}, 'dynatrain.buddies.mode: "replay" is gone, because a step waited less'),
        ({"buddies": {"mode": "auto"}}, '(0.9 to 14.9 %); use "copy", which works with every optimizer'),
        (
            {"buddies": {"verify_every_steps": 100}},
            "dynatrain.buddies.verify_every_steps: this key is gone, because buddies replay no steps",
        ),
        ({"balance": {"every_step": 1}}, "dynatrain.balance.every_step: unknown key; did you mean 'every_steps'?"),
        ({"balance": {"mode": "moves"}}, "dynatrain.balance.mode: expected 'act', 'advise' or 'off', got 'moves'"),
        ({"balance": {"slow_ratio": 1}}, "dynatrain.balance.slow_ratio: expected greater than 1, got 1"),
        ({"balance": {"shape": "all"}}, "dynatrain.balance.shape: expected 'boundaries' or 'any', got 'all'"),
        ({"balance": {"least_gain": 1}}, "dynatrain.balance.least_gain: expected less than 1, got 1"),
        ({"balance": {"least_gain": -0.1}}, "dynatrain.balance.least_gain: expected greater than or equal to 0"),
        ({"balance": {"safety": -1}}, "dynatrain.balance.safety: expected greater than or equal to 0"),
        (
            {"balance": {"window_steps": 3, "every_steps": 2}},
            "balance.window_steps: 3 steps are to be timed of every 2",
        ),
        ({"report": {"json": "x"}}, "dynatrain.report.json: unknown key; did you mean 'jsonl'?"),
        ({"layout": {}}, "dynatrain.layout.data: this key is needed"),
        ({"layout": {"data": "2"}}, "dynatrain.layout.data: expected integer, got '2' (string)"),
        ({"layout": {"data": True}}, "dynatrain.layout.data: expected integer, got True (boolean)"),
        ({"layout": {"data": 2.0}}, "dynatrain.layout.data: expected integer, got 2.0 (number)"),
        ({"layout": {"data": 0}}, "dynatrain.layout.data: expected greater than or equal to 1, got 0 (integer)"),
        (
            {"layout": {"data": 2, "zero_stage": 4}},
            "dynatrain.layout.zero_stage: expected less than or equal to 3, got 4",
        ),
        ({"layout": [2, 1]}, "dynatrain.layout: expected an object of keys, got [2, 1] (list)"),
        ({"layout": 2}, "dynatrain.layout: expected an object of keys, got 2 (integer)"),
        ({"safety": None}, "dynatrain.safety: expected 'rollback' or 'lean', got None (null)"),
        ({"timeout_seconds": "60"}, "dynatrain.timeout_seconds: expected number, got '60' (string)"),
        ({"timeout_seconds": 0}, "dynatrain.timeout_seconds: expected greater than 0, got 0 (integer)"),
        ({"memory_budget_bytes": 1e9}, "dynatrain.memory_budget_bytes: expected integer, got 1000000000.0 (number)"),
        ({"data": {"reshuffle": 1}}, "dynatrain.data.reshuffle: expected boolean, got 1 (integer)"),
        ({"report": {"jsonl": 3}}, "dynatrain.report.jsonl: expected string, got 3 (integer)"),
        ({"safety": "lean"}, "name a folder for it in dynatrain.fallback.path"),
        ({"safety": "none"}, "dynatrain.safety: expected 'rollback' or 'lean', got 'none' (string)"),
        ({"fallback": {"every_steps": 5}}, "dynatrain.fallback.path: this key is needed"),
        ({"fallback": {"path": "x", "evry_steps": 5}}, "evry_steps: unknown key; did you mean 'every_steps'?"),
        ({"fallback": {"path": "x", "on_sigterm": 1}}, "dynatrain.fallback.on_sigterm: expected boolean, got 1"),
        ({"fallback": {"path": "x", "every_seconds": 0}}, "dynatrain.fallback.every_seconds: expected greater than 0"),
        ({"resume": {"tag": "x"}}, "dynatrain.resume.path: this key is needed"),
        ({"resume": {"pth": "x"}}, "dynatrain.resume.pth: unknown key; did you mean 'path'? valid here: path, tag, "),
        ({"resume": {"path": "x", "tga": "y"}}, "dynatrain.resume.tga: unknown key; did you mean 'tag'?"),
        ({"layouts": {"2": {"dat": 2}}}, "dynatrain.layouts.2.dat: unknown key; did you mean 'data'?"),
        ({"layout": {"dat": 2}}, "dynatrain.layout.dat: unknown key; did you mean 'data'?"),
        ({"resume": "checkpoints"}, "dynatrain.resume: expected an object of keys, got 'checkpoints'"),
        ({"layouts": {"best": {"data": 2}}}, "dynatrain.layouts.best"),  # a table, or "best"
        ({"layouts": 4}, "dynatrain.layouts: expected string, got 4 (integer)"),
        ({"layouts": {"2": {"data": 0}}}, "dynatrain.layouts.2.data: expected greater than or equal to 1, got 0"),
        (
            {"layouts": {"2": {"data": 2, "date": 2}}},
            "dynatrain.layouts.2.date: unknown key; did you mean 'data'? valid here: ",
        ),
        ({"layouts": {"two": {"data": 2}}}, "dynatrain.layouts.two"),
        ({"elastic": {"wait": 1}}, "dynatrain.elastic.wait: unknown key; valid here: wait_for_members_seconds"),
        ("full", "dynatrain: expected an object of keys, got 'full' (string)"),
        (None, "dynatrain: expected an object of keys, got None (null)"),
    ],
)
def test_mistakes_are_named(block: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_config(with_block(block))
    assert words in str(caught.value)
    assert not isinstance(caught.value, UnsupportedError)


def test_file_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        '{\n  # a comment\n  "train_batch_size": 12,\n  "dynatrain": {"layout": {"data": 2, "zero_stage": 1}}\n}'
    )
    for name in (file, str(file)):
        own, block = split_config(name)
        assert own == {"train_batch_size": 12}
        assert block is not None and block.layout == LayoutConfig(data=2, zero_stage=1)


def test_base64_is_read() -> None:
    text = base64.urlsafe_b64encode(json.dumps(with_block({})).encode()).decode()
    assert read_config(text) == with_block({})


def test_key_twice_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"dynatrain": {"safety": "rollback", "safety": "rollback"}}')
    with pytest.raises(ConfigError, match="'safety' stands twice"):
        split_config(file)


@pytest.mark.parametrize("content", ["[1, 2]", "{", "\udcff"])
def test_file_that_is_no_configuration(tmp_path: Path, content: str) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"ds\.json"):
        split_config(file)


def test_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"no/such/file\.json"):
        split_config("no/such/file.json")


BLOCKS = [name for name, field in DynatrainConfig.model_fields.items() if block_at(name, field.annotation)]


@pytest.mark.parametrize("name", BLOCKS)
def test_each_block_names_its_misspelt_keys(name: str) -> None:
    """Also one that is new since this was written."""
    assert {"layout", "layouts", "resume", "fallback"} <= {*BLOCKS}
    block = {"zzz": 1}
    with pytest.raises(ConfigError, match=r"zzz: unknown key; valid here: [a-z_, ]+$"):
        split_config(with_block({name: {"2": block} if name == "layouts" else block}))
