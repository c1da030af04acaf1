"""DeepSpeed's own reading of a configuration, watched: every key that it asks for has a row in the support table.

A release that reads a new key fails here by that key's name. Keys of hand-written getters are seen by handing
DeepSpeed dictionaries that note what they are asked for; those of its pydantic models are read off the models.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

from ds_dynatrain.adapters.versions.deepspeed_versions import SERIES, present
from ds_dynatrain.support import CONFIG_TABLES, Verdict, row_of
from ds_dynatrain.support.walk import SECTIONS_WITHOUT_AUTO

PROBE = "a_probe"
NEWEST = pytest.mark.skipif(
    present() is not SERIES[0], reason="the table follows the newest series in these; see versions.py"
)
OPEN = frozenset({"optimizer.params", "scheduler.params"})
"""Sections without keys of DeepSpeed's: what a class takes."""


class Noting(dict[str, Any]):
    """A section that notes which keys it is asked for, and the default that comes with the question."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.asked: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        if self.asked.get(key) is None:
            self.asked[key] = default
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), None)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.setdefault(key, None)
        return super().__getitem__(key)

    def keys(self) -> Any:
        """Itself: `key in section.keys()` is a question too."""
        return self


class Reading:
    """What DeepSpeed reads: `defaults` by dotted key, and the top sections that a pydantic model parses."""

    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}
        self.modelled: set[str] = set()
        self._hit: type[DeepSpeedConfigModel] | None = None

    def walk(self) -> Reading:
        """Ask DeepSpeed for all keys, section by section."""
        self._look((), self._parse(()))
        return self

    def _look(self, path: tuple[str, ...], found: dict[str, Any]) -> None:
        for key, default in found.items():
            if key == PROBE:
                continue
            inner = (*path, key)
            if ".".join(inner) in self.defaults:
                continue
            self.defaults[".".join(inner)] = default
            if isinstance(default, str | int | float):
                continue
            deeper = self._parse(inner)
            if self._hit is not None:
                self.modelled.add(inner[0])
                self._note_model(".".join(inner), self._hit)
            elif ".".join(inner) not in OPEN:
                self._look(inner, deeper)

    def _parse(self, path: tuple[str, ...]) -> dict[str, Any]:
        """Let DeepSpeed read a configuration in which this section holds only a probe; what it asked the section."""
        last = here = top = Noting(train_batch_size=1)
        for place, key in enumerate(path):
            last = Noting({PROBE: 1} if place == len(path) - 1 else {}, enabled=True, type="Adam")
            dict.__setitem__(here, key, last)
            here = last
        self._hit = None
        try:
            DeepSpeedConfig(top)
        except Exception:
            pass  # a probe is no value: what counts is what was asked for before
        return last.asked

    def note(self, model: DeepSpeedConfigModel, data: dict[str, Any]) -> None:
        """Called with whatever model is made of whatever keys."""
        if PROBE in data and self._hit is None:
            self._hit = type(model)

    def _note_model(self, path: str, model: type[DeepSpeedConfigModel]) -> None:
        for name, field in model.model_fields.items():
            inner = [*_models_in(field.annotation)]
            default = (
                field.default
                if field.default_factory is None or inner
                else field.get_default(call_default_factory=True)
            )
            for key in {name, field.alias or name}:
                self.defaults[f"{path}.{key}"] = None if inner else default
                for part in inner:
                    self._note_model(f"{path}.{key}", part)


def _models_in(annotation: Any) -> Iterator[type[DeepSpeedConfigModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, DeepSpeedConfigModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_in(part)


@pytest.fixture(scope="module")
def reading() -> Iterator[Reading]:
    """One walk over everything that DeepSpeed reads."""
    found, init = Reading(), DeepSpeedConfigModel.__init__

    def noting(self: DeepSpeedConfigModel, strict: bool = False, **data: Any) -> None:
        found.note(self, data)
        init(self, strict, **data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedConfigModel, "__init__", noting)
        yield found.walk()


@NEWEST
def test_the_walk_sees_what_there_is(reading: Reading) -> None:
    """Some of each kind: getters, models, sections of models, aliases, deprecated keys, and sections of getters."""
    seen = {
        "gradient_clipping",
        "managed_gradient_accumulation",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.offload_optimizer.super_offload",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.prefetch_bucket_size",
        "zero_optimization.cpu_offload",
        "zero_optimization.zenflow.topk_ratio",
        "bf16.check_grad_overflow",
        "bfloat16",
        "flops_profiler.profile_step",
        "data_efficiency.data_routing.random_ltd.enabled",
        "checkpoint.writer.io_buffer_size",
        "torch_autocast.lower_precision_safe_modules",
        "timers.throughput.synchronized",
        "expert_parallel.autoep_size",
        "optimizer.legacy_fusion",
    }
    missing = seen - set(reading.defaults)
    assert not missing


def test_every_key_has_a_row(reading: Reading) -> None:
    without = [key for key in reading.defaults if row_of(key) is None]
    assert not without, f"DeepSpeed {deepspeed.__version__} reads keys that have no row in ds_dynatrain/support"


@NEWEST
def test_every_row_has_a_key(reading: Reading) -> None:
    """A key that DeepSpeed no longer reads must not stand in the table."""
    removed = {row.key for row in CONFIG_TABLES["removed"]}
    elsewhere = {key for key, _ in _keys_read_elsewhere()} | {"zero_optimization.allgather_size"}
    rows = {row.key for rows in CONFIG_TABLES.values() for row in rows}
    stale = rows - removed - elsewhere - set(reading.defaults)
    assert not stale


@NEWEST
def test_the_default_of_a_refused_key_is_off(reading: Reading) -> None:
    wrong = []
    for key, default in reading.defaults.items():
        row = row_of(key)
        if row is None or row.verdict is not Verdict.AT_START or row.key != key or default is None:
            continue
        if not row.is_off(default) and not isinstance(default, torch.dtype):
            wrong.append((key, default))
    assert not wrong


def test_sections_in_which_auto_means_nothing(reading: Reading) -> None:
    assert reading.modelled == SECTIONS_WITHOUT_AUTO


@NEWEST
def test_removed_keys() -> None:
    gone = {*deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    gone |= {f"zero_optimization.{key}" for key in deepspeed_config._REMOVED_ZERO_CONFIG_KEYS}
    assert gone == {row.key for row in CONFIG_TABLES["removed"]}


def _keys_read_elsewhere() -> Iterator[tuple[str, str]]:
    """(key, module) of literal look-ups in a configuration outside of DeepSpeedConfig."""
    from deepspeed.runtime import engine

    for module in (deepspeed, engine):
        source = inspect.getsource(module)
        for key in re.findall(r"\b(?:self\.)?config(?:\[|\.get\(|_params\[)[\"'](\w+)[\"']", source):
            yield key, module.__name__


@pytest.mark.parametrize(("key", "module"), sorted(set(_keys_read_elsewhere())))
def test_keys_that_are_read_elsewhere(key: str, module: str) -> None:
    assert row_of(key) is not None, f"{module} reads the key {key}"


@NEWEST
@pytest.mark.parametrize("name", deepspeed_config.DEEPSPEED_OPTIMIZERS)
def test_every_optimizer_of_deepspeed_is_named(name: str) -> None:
    row = row_of("optimizer.type", name)
    assert row is not None and row.is_about(name)


def test_every_scheduler_of_deepspeed_is_named() -> None:
    for name in lr_schedules.VALID_LR_SCHEDULES:
        row = row_of("scheduler.type", name)
        assert row is not None and row.is_about(name)
