"""The calls of DeepSpeed's engines that ours override can be asked what they take, and answer what DeepSpeed's do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_dynatrain.engine.dynatrain_engine import DynatrainEngine
from ds_dynatrain.engine.pipeline_engine import DynatrainPipelineEngine

ENGINES: list[tuple[type, type]] = [(DynatrainEngine, DeepSpeedEngine), (DynatrainPipelineEngine, PipelineEngine)]
CATCH_ALL = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def overridden(ours: type, theirs: type) -> list[str]:
    """Public methods of DeepSpeed's engine that are another function in ours."""
    names = [name for name in dir(theirs) if not name.startswith("_") and not hasattr(nn.Module, name)]
    names += ["forward", "compile"]  # torch's module has them, too
    held = [(name, inspect.getattr_static(ours, name), inspect.getattr_static(theirs, name)) for name in names]
    return [name for name, mine, stock in held if mine is not stock and inspect.isfunction(stock)]


CALLS = [(ours, theirs, name) for ours, theirs in ENGINES for name in overridden(ours, theirs)]


def signature(call: Callable[..., Any]) -> list[Parameter]:
    """What a call takes; of one that DeepSpeed's `instrument_w_nvtx` hides, what is below that."""
    held = inspect.getclosurevars(call).nonlocals.get("func") if call.__name__ == "wrapped_fn" else None
    return list(inspect.signature(held or call).parameters.values())


def differences(mine: list[Parameter], stock: list[Parameter]) -> list[str]:
    """In what they differ, in words; more of ours may follow by keyword, and a catch-all of DeepSpeed's is any."""
    if [each.kind for each in stock[1:]] == list(CATCH_ALL):
        return []
    found = [
        f"{one.name}={one.default!r} for {other.name}={other.default!r}"
        for one, other in zip(mine, stock, strict=False)
        if (one.name, one.kind, one.default) != (other.name, other.kind, other.default)
    ]
    more = [each for each in mine[len(stock) :] if each.kind is not Parameter.KEYWORD_ONLY]
    return found + [f"{each.name} is none of DeepSpeed's" for each in more + stock[len(mine) :]]


@pytest.mark.parametrize(("ours", "theirs", "name"), CALLS, ids=lambda value: getattr(value, "__name__", value))
def test_a_call_takes_what_deepspeed_s_does(ours: type, theirs: type, name: str) -> None:
    assert differences(signature(getattr(ours, name)), signature(getattr(theirs, name))) == []


def test_the_calls_that_frameworks_ask_about_are_among_them() -> None:
    names = {name for _, theirs, name in CALLS if theirs is DeepSpeedEngine}
    assert names >= {"save_checkpoint", "load_checkpoint", "forward", "backward", "step", "compile", "destroy"}
    for ours, _ in ENGINES:
        assert "exclude_frozen_parameters" in inspect.signature(ours.save_checkpoint).parameters


def test_a_call_that_takes_something_else_is_found() -> None:
    def stock(self: Any, folder: str, tag: str | None = None, state: dict[str, Any] = {}) -> None:  # noqa: B006
        pass

    def renamed(self: Any, path: str, tag: str | None = None, state: dict[str, Any] = {}) -> None:  # noqa: B006
        pass

    def hidden(self: Any, folder: str, *others: Any, **named: Any) -> None:
        pass

    def longer(self: Any, folder: str, tag: str | None = None, state: dict[str, Any] = {}, *, own: int = 0) -> None:  # noqa: B006
        pass

    wanted = signature(stock)
    assert differences(signature(longer), wanted) == []
    assert all(differences(signature(call), wanted) for call in (renamed, hidden))
    assert differences(wanted, signature(longer)[:-1] + signature(renamed)[1:2])
